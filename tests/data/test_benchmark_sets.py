"""Benchmarks by name: published rows in their documented columns become gradable examples."""

import base64
import json
import pickle
import zlib
from pathlib import Path

import pytest

import toy
from alula.data import load
from alula.data.benchmarks import BENCHMARKS, INSTRUCTION, hub_split, trainable
from alula.data.code_benchmarks import called_function, private_cases
from alula.data.code_tests import read_tests
from alula.data.load import load_source
from alula.data.sources import files_on_hub
from alula.errors import SettingError
from alula.rewards.code.reward import build as code_grader
from alula.rewards.math_answer import build as math_grader
from alula.settings import Source

# One row of each benchmark, in the form of its published file; where the hub's differs, the second row.
MATH = {
    "gsm8k": ({"question": "2 and 3?", "answer": "2+3=<<2+3=5>>5\n#### 5"}, "2 and 3?", "5"),
    "math500": ({"problem": "Half?", "answer": "\\frac{1}{2}", "level": 2}, "Half?", "0.5"),
    "gaokao2023en": ({"question": "Root?", "answer": "$\\sqrt{5}$", "lang": "en"}, "Root?", "\\sqrt5"),
    "minerva_math": ({"problem": "Far?", "solution": "$\\boxed{1.5}$ m, not \\boxed{2}"}, "Far?", "2"),
    "olympiadbench": ({"question": "All?", "final_answer": ["$3$"], "context": None}, "All?", "3"),
    "aime24": ({"problem": "Sum?", "answer": "073"}, "Sum?", "73"),
    "aime25": ({"problem_idx": 1, "problem": "Bases?", "answer": 70, "problem_type": ["Algebra"]}, "Bases?", "70"),
    "aime26": ({"problem_idx": 1, "problem": "Speed?", "answer": 277}, "Speed?", "277"),
    "amc23": ({"problem": "Miles?", "answer": 27.0}, "Miles?", "27"),
    "amc22-23": ({"id": 0, "problem": "Nested?", "answer": 3.0, "url": "https://…"}, "Nested?", "3"),
    "amc12-24": ({"problem": "Minimum?", "answer": "\\frac{1}{2}", "exam": "2024 AMC 12A"}, "Minimum?", "0.5"),
    "svamp": ({"Body": "Ann has 4.", "Question": "How many?", "Answer": 4.0}, "Ann has 4. How many?", "4"),
    "mawps": ({"input": "How many ?", "target": 8.25}, "How many ?", "8.25"),
    "asdiv": ({"body": "Two apples.", "question": "Count?", "answer": "2 (apples)"}, "Two apples. Count?", "2"),
    "math_level3to5": ({"problem": "GCD?", "answer": "1"}, "GCD?", "1"),
    "polaris": ({"problem": "Volume?", "answer": "12", "difficulty": "3/8"}, "Volume?", "12"),
}
EVALPLUS = """import numpy as np

def assertion(out, exp, atol):
    assert out == exp

def check(candidate):
    inputs = [[[1, 2]], [[]]]
    results = [3, 0]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""
HIDDEN = [{"input": "5\n", "output": "10\n", "testtype": "stdin"}]
CONTEST = {
    "question_title": "A",
    "question_content": "Double it.",
    "platform": "atcoder",
    "starter_code": "",
    "public_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
    "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(json.dumps(HIDDEN)))).decode(),
    "metadata": "{}",
}
METHOD = CONTEST | {
    "starter_code": "class Solution:\n    def pair(self, a: int, b: str) -> List:",
    "public_test_cases": json.dumps([{"input": '1\n"x"', "output": '[1, "x"]', "testtype": "functional"}]),
    "private_test_cases": "[]",
    "metadata": '{"func_name": "pair"}',
}
STUB = 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """The sum."""\n'
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": STUB,
    "entry_point": "total",
    "canonical_solution": "    return sum(numbers)\n",
}
MBPP = {"task_id": 601, "text": "Write a sum.", "code": "def total(n): return sum(n)", "test_setup_code": "import math",
        "test_list": ["assert total([1]) == 1"], "challenge_test_list": []}  # fmt: skip
MBPP_PLUS = {"task_id": 2, "prompt": "Write a sum.", "code": "def total(n): return sum(n)", "source_file": "x",
             "test_imports": ["import math"], "test_list": ["assert set(total([1])) == {1}"],
             "test": EVALPLUS}  # fmt: skip
TACO = {"question": "Double it.", "solutions": "[]", "starter_code": "", "difficulty": "EASY", "name": None,
        "input_output": json.dumps({"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", "4\n6"]})}  # fmt: skip


def called(**published):
    return TACO | {"input_output": json.dumps(published), "starter_code": "def double(x):\n\t"}


PLAIN = "(lambda r: list(r) if isinstance(r, tuple) else r)"
CODE = [
    ("humaneval", HUMANEVAL | {"test": "def check(candidate):\n    assert candidate([1]) == 1\n"},
     [{"call": "total([1])", "expected": "1"}], "```python\n" + STUB.rstrip(), {"prelude": STUB}),
    ("humaneval+", HUMANEVAL | {"test": EVALPLUS},
     [{"call": "total(*[[1, 2]])", "expected": "3", "tolerance": 1e-6},
      {"call": "total(*[[]])", "expected": "0", "tolerance": 1e-6}], "```python\n" + STUB.rstrip(), {"prelude": STUB}),
    ("mbpp", MBPP, [{"call": "total([1])", "expected": "1"}], "assert total([1]) == 1", {"setup": "import math"}),
    ("mbpp+", MBPP_PLUS,
     [{"call": "total(*[[1, 2]])", "expected": "3", "tolerance": 1e-6},
      {"call": "total(*[[]])", "expected": "0", "tolerance": 1e-6}], "Write a sum.", {"prelude": "import math"}),
    ("livecodebench", CONTEST,
     [{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "5\n", "stdout": "10\n"}], "Double it.\n\nThe program reads", {}),
    ("livecodebench", METHOD,
     [{"call": f"{PLAIN}(Solution().pair(1, 'x'))", "expected": "[1, 'x']"}], METHOD["starter_code"], {}),
    ("taco", TACO, [{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "2\n3", "stdout": "4\n6"}], "reads the input", {}),
    ("taco", called(fn_name="double", inputs=[[1], [2]], outputs=[[2], [4]]),
     [{"call": f"{PLAIN}(double(1))", "expected": "2"}, {"call": f"{PLAIN}(double(2))", "expected": "4"}],
     "def double(x):", {}),
    ("taco", called(fn_name="double", inputs=[[[1]], [[2, 3]]], outputs=[[2], [4, 6]]),
     [{"call": f"{PLAIN}(double([1]))", "expected": "[2]"}, {"call": f"{PLAIN}(double([2, 3]))", "expected": "[4, 6]"}],
     "def double(x):", {}),
]  # fmt: skip


def write(folder: Path, name: str, *rows, split: str | None = None) -> None:
    (folder / name).mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name / f"{split or BENCHMARKS[name].split}.jsonl").write_text(text)


def test_every_benchmark_has_a_row_here():
    assert {*MATH, *(name for name, *_ in CODE)} == set(BENCHMARKS)


@pytest.mark.parametrize("name", MATH)
def test_rows_of_mathematics_become_gradable_examples(tmp_path, name):
    row, question, answer = MATH[name]
    write(tmp_path, name, row)
    (example,) = load(name, data_dir=tmp_path)
    assert example.prompt == f"{question}\n{INSTRUCTION}"
    grade = math_grader(boxed_only=True)
    assert grade(f"\\boxed{{{answer}}}", example.record()) == 1
    assert grade("\\boxed{12345}", example.record()) == 0


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("gsm8k", MATH["gsm8k"][0], "5"),
        ("minerva_math", {"question": "Far?", "answer": "2"}, "2"),
        ("amc23", {"id": 0, "question": "Miles?", "answer": "27.0", "url": ""}, "27.0"),
        ("mawps", {"question": "How many ?", "result": "8.25", "chain": ""}, "8.25"),
        ("math_level3to5", {"extra_info": {"question": "GCD?", "answer": "1"}, "prompt": []}, "1"),
    ],
)
def test_the_copies_on_the_hub_have_their_own_columns(name, row, answer):
    assert BENCHMARKS[name].mapping(from_hub=True).example(row).answer == answer


@pytest.mark.parametrize(("name", "row", "tests", "shown", "code"), CODE)
def test_rows_of_coding_tasks_get_tests(tmp_path, name, row, tests, shown, code):
    write(tmp_path, name, row)
    (example,) = load(name, data_dir=tmp_path)
    assert read_tests(example.record()) == tests
    assert shown in example.prompt
    assert example.prompt.count("one ```python block") == 1
    assert {name: example.fields[name] for name in ("prelude", "setup") if name in example.fields} == code
    assert not {"solutions", "private_test_cases", "input_output"} & set(example.fields), "large fields are dropped"
    assert BENCHMARKS[name].reward == "code"


def test_rows_without_tests_are_dropped_and_counted(tmp_path):
    write(tmp_path, "taco", TACO | {"input_output": '{"inputs": [], "outputs": []}'}, TACO, TACO | {"input_output": ""})
    data = load("taco", data_dir=tmp_path)
    assert (len(data), data.dropped) == (1, {"no tests": 2})


def test_other_rows_raise(tmp_path):
    write(tmp_path, "mbpp", MBPP, {"text": "Write."}, split="test")
    with pytest.raises(SettingError, match=r"mbpp, row 2: not in the published form \(KeyError\('test_list'\)\)"):
        load("mbpp", data_dir=tmp_path)


def test_evalplus_tests_that_are_no_plain_lists_stay_a_check(tmp_path):
    source = EVALPLUS.replace("[3, 0]", "[sum(x) for x, in inputs]")
    write(tmp_path, "humaneval+", HUMANEVAL | {"test": source})
    (example,) = load("humaneval+", data_dir=tmp_path)
    assert read_tests(example.record()) == [{"check": f"{source}\ncheck(total)"}]


def test_hidden_tests_are_plain_data_only():
    class Attack:
        def __reduce__(self):
            return (print, ("run",))

    hostile = base64.b64encode(zlib.compress(pickle.dumps(Attack()))).decode()
    with pytest.raises(pickle.UnpicklingError, match="not plain data"):
        private_cases(hostile)
    assert private_cases(CONTEST["private_test_cases"]) == HIDDEN


def test_the_function_of_an_assert():
    assert called_function("assert set(similar((3, 4), (5, 4))) == set((4,))") == "similar"
    assert called_function("assert math.isclose(area(2), 12.5, rel_tol=0.001)") == "area"


def test_setup_code_of_mbpp_may_use_the_program(tmp_path):
    setup = {"code": "class Node: value = 2", "test_setup_code": "root = Node()", "test_list": ["assert f(root) == 2"]}
    write(tmp_path, "mbpp", MBPP | setup)
    (example,) = load("mbpp", data_dir=tmp_path)
    answer = "class Node: value = 2\ndef f(node): return node.value"
    assert code_grader(10)(answer, example.record()) == 1


def test_mbpp_is_one_file_with_the_published_splits(tmp_path):
    (tmp_path / "mbpp").mkdir()
    rows = [MBPP | {"task_id": number} for number in (1, 10, 11, 510, 511, 600, 601, 974)]
    (tmp_path / "mbpp" / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def ids(**options):
        return [
            example.fields["task_id"]
            for example in load_source(Source(source="mbpp", data_dir=str(tmp_path)), **options)
        ]

    assert ids() == [11, 510]
    assert ids(training=True) == [601, 974]


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_test_sets_are_for_evaluation_only(name, tmp_path):
    known = BENCHMARKS[name]
    if known.train_split is None:
        with pytest.raises(
            SettingError, match=f"data.source={name}: a test set, for evaluation only".replace("+", r"\+")
        ):
            toy.toy(tmp_path, f"data={{source: {name}}}")
        return
    assert toy.toy(tmp_path, f"data={{source: {name}}}").data.split is None
    if known.split != known.train_split:
        with pytest.raises(SettingError, match=r"data\.split=test"):
            toy.toy(tmp_path, f"data={{source: {name}, split: test}}")


def test_trainable_sets():
    assert trainable() == ["gsm8k", "svamp", "mawps", "math_level3to5", "polaris", "mbpp", "taco"]


def test_files_and_splits_on_the_hub():
    assert files_on_hub("BAAI/TACO", "train", "ALL/{split}-*.parquet") == {
        "path": "parquet", "data_files": {"train": "hf://datasets/BAAI/TACO/ALL/train-*.parquet"}, "split": "train",
    }  # fmt: skip
    assert files_on_hub("a/b", "test", "test*.jsonl")["path"] == "json"
    assert hub_split(BENCHMARKS["aime24"], None).split == hub_split(BENCHMARKS["aime24"], "test").split == "train"
    assert hub_split(BENCHMARKS["gsm8k"], "train").split == "train"
