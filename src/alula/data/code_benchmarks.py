"""Published rows of coding benchmarks -> rows with `prompt` and `tests`, in the format of `code_tests`."""

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

from alula.data.code_tests import (
    Test,
    call_test,
    split_asserts,
    split_check_function,
    split_inputs_and_results,
)

Row = Mapping[str, Any]
FORM = "Answer with the complete Python code in one ```python block."


def humaneval(row: Row) -> dict[str, Any]:
    """openai/openai_humaneval: the prompt is a function with a docstring; the answer repeats and completes it."""
    return _completion(row, split_check_function(row["test"], row["entry_point"]))


def humaneval_plus(row: Row) -> dict[str, Any]:
    """evalplus/humanevalplus: HumanEval's columns, with lists of inputs and results in `test`."""
    return _completion(row, _evalplus_tests(row["test"], row["entry_point"], f"\ncheck({row['entry_point']})"))


def _completion(row: Row, tests: list[Test]) -> dict[str, Any]:
    prompt = f"Complete this Python function. {FORM}\n\n```python\n{row['prompt'].rstrip()}\n```"
    return _coding_row(row, prompt, tests, {"prelude": row["prompt"]})


def mbpp(row: Row) -> dict[str, Any]:
    """google-research-datasets/mbpp (full): the prompt holds the tests, as in the paper; they name the function."""
    tests = split_asserts("\n".join(row["test_list"]))
    return _from_text(row["text"], row, tests, {"setup": row["test_setup_code"]})


def mbpp_split(row: Row) -> str:
    """The published split of a row of the single file mbpp.jsonl."""
    number = int(row["task_id"])
    return "prompt" if number <= 10 else "test" if number <= 510 else "validation" if number <= 600 else "train"


def mbpp_plus(row: Row) -> dict[str, Any]:
    """evalplus/mbppplus: MBPP's prompt and `test_list`, with lists of inputs and results in `test`."""
    tests = _evalplus_tests(row["test"], called_function(row["test_list"][0]), "")
    return _from_text(row["prompt"], row, tests, {"prelude": "\n".join(row["test_imports"])})


def _from_text(text: str, row: Row, tests: list[Test], code: dict[str, str]) -> dict[str, Any]:
    shown = "\n".join(row["test_list"])
    prompt = f"{text.strip()}\nYour code should pass these tests:\n\n```python\n{shown}\n```\n\n{FORM}"
    return _coding_row(row, prompt, tests, code)


def _evalplus_tests(source: str, entry_point: str, call: str) -> list[Test]:
    """Calls with expected values; the published code as one check where its lists are not plain values."""
    try:
        return split_inputs_and_results(source, entry_point)
    except ValueError:
        return [{"check": source + call}]


def livecodebench(row: Row) -> dict[str, Any] | None:
    """livecodebench/code_generation_lite: tests with stdin and stdout, or calls of a method of `Solution`."""
    cases = json.loads(row["public_test_cases"]) + private_cases(row["private_test_cases"])
    name = json.loads(row["metadata"] or "{}").get("func_name")
    if name:
        tests = [
            call_test(f"Solution().{name}", map(json.loads, case["input"].split("\n")), json.loads(case["output"]))
            for case in cases
        ]
    else:
        tests = [{"stdin": case["input"], "stdout": case["output"]} for case in cases]
    small = {key: value for key, value in row.items() if key not in ("public_test_cases", "private_test_cases")}
    return _contest_row(row["question_content"], row["starter_code"], tests, small)


class TextUnpickler(pickle.Unpickler):
    """Reads plain values only: a pickle from a data set may not name classes or functions."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the tests name {module}.{name}, which is not plain data")


def private_cases(text: str) -> list[dict[str, str]]:
    """Hidden tests: JSON, or (in the lite version) its base64 of a compressed pickle of that text."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load())


def taco(row: Row) -> dict[str, Any] | None:
    """BAAI/TACO: `input_output` is JSON with `inputs`, `outputs` and, for call tests, `fn_name`."""
    published = json.loads(row["input_output"] or "{}")
    inputs, outputs = published.get("inputs") or [], published.get("outputs") or []
    name, starter = published.get("fn_name"), row["starter_code"] or ""
    if name:
        function = f"Solution().{name}" if "class Solution" in starter else name
        # Results are wrapped in a list in problems of some sites and not in others.
        wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
        tests = [
            call_test(function, arguments, output[0] if wrapped else output)
            for arguments, output in zip(inputs, outputs)
        ]
    else:
        tests = [{"stdin": _lines(given), "stdout": _lines(output)} for given, output in zip(inputs, outputs)]
    small = {key: row[key] for key in ("name", "source", "difficulty", "url") if key in row}
    return _contest_row(row["question"], starter, tests, small)


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _contest_row(question: str, starter: str | None, tests: list[Test], row: Row) -> dict[str, Any] | None:
    if not tests:
        return None
    if starter and starter.strip():
        task = f"Complete this code:\n\n```python\n{starter.rstrip()}\n```"
    else:
        task = "The program reads the input from stdin and prints the answer to stdout."
    return _coding_row(row, f"{question.strip()}\n\n{task} {FORM}", tests, {})


def _coding_row(row: Row, prompt: str, tests: list[Test], code: dict[str, str]) -> dict[str, Any]:
    """`code` runs around the answer's program: `prelude` before it, `setup` after it."""
    return {**row, "prompt": prompt, "tests": json.dumps(tests), **code}


def called_function(statement: str) -> str:
    """The function that an assert calls: the innermost call of a name, as in `assert set(f(1)) == {1}`."""
    builtin = {"set", "tuple", "list", "sorted", "abs", "round", "math", "isclose", "len", "bool"}
    calls = [
        node.func.id
        for node in ast.walk(ast.parse(statement))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in builtin
    ]
    if not calls:
        raise ValueError(f"{statement!r:.80} calls no function")
    return calls[0]
