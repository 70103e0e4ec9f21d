"""`code`: does the answer's program pass the example's tests?"""

import ast
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from alula.data.answers import after_thinking
from alula.data.code_tests import Test, kind_of, read_tests
from alula.errors import require
from alula.rewards.code.remote import SandboxFusion
from alula.rewards.code.results import passes, read_results, same_output
from alula.rewards.code.sandbox import Bubblewrap, Limits, Run

HARNESS = (Path(__file__).parent / "harness.py").read_text()
MARGIN = 0.3
"""Seconds before the answer's time limit at which its last program is stopped."""

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)


class Sandbox(Protocol):
    limits: Limits

    def run(self, program: str, stdin: str = "", wall_seconds: float | None = None) -> Run: ...


@dataclass(frozen=True)
class Outcome:
    passed: bool
    reason: str = ""
    """Why the test failed."""


def build(
    timeout: float, /, partial: bool = False, seconds: float = 5.0, memory: int = 1024, url: str | None = None
) -> Callable[[str, Mapping[str, Any]], float]:
    """The grader: 1 if the program passes all tests, else 0; with `partial`, the share that it passes. An answer's
    programs together take at most `timeout` seconds; what has not run by then counts as failed."""
    require(seconds > 0, f"reward code: seconds={seconds} must be above 0.")
    require(memory >= 64, f"reward code: memory={memory} MiB is too little for Python; give at least 64.")
    limits = Limits(seconds, memory << 20)
    sandbox: Sandbox = Bubblewrap(limits) if url is None else SandboxFusion(url, limits)

    def grade(completion: str, example: Mapping[str, Any]) -> float:
        deadline = time.monotonic() + timeout - MARGIN
        outcomes = run_tests(sandbox, program_of(completion), example, deadline, stop_at_failure=not partial)
        passed = sum(outcome.passed for outcome in outcomes)
        return passed / len(outcomes) if partial else float(passed == len(outcomes))

    return grade


def program_of(completion: str) -> str:
    """The last fenced block after the thinking, of those marked as Python if any are; all of the text without one."""
    text = after_thinking(completion)
    blocks = _BLOCK.findall(text)
    marked = [body for label, body in blocks if label.lower() in ("python", "python3", "py")]
    return (marked or [body for _, body in blocks] or [text])[-1]


def run_tests(
    sandbox: Sandbox,
    program: str,
    example: Mapping[str, Any],
    deadline: float = float("inf"),
    stop_at_failure: bool = False,
) -> list[Outcome]:
    """The outcome of every test. Calls and checks share one run of the program, in order; every `stdin` test has its
    own. With `stop_at_failure`, later runs are left out after the first failure."""
    tests, prelude, setup = read_tests(example), example.get("prelude") or "", example.get("setup") or ""
    outcomes = [Outcome(False, "not run")] * len(tests)

    def run(program: str, stdin: str) -> Run:
        left = deadline - time.monotonic()
        return sandbox.run(program, stdin, min(left, sandbox.limits.wall_seconds)) if left > 0 else Run(b"", "time")

    in_process = [i for i, test in enumerate(tests) if kind_of(test) != "stdin"]
    if in_process:
        chosen = [tests[i] for i in in_process]
        sources = [("check", test["check"]) if "check" in test else ("call", test["call"]) for test in chosen]
        job = {"prelude": prelude, "program": program, "setup": setup, "tests": sources}
        for i, outcome in zip(in_process, read_outcomes(run(HARNESS, repr(job)), chosen)):
            outcomes[i] = outcome
    for i, test in enumerate(tests):
        if kind_of(test) == "stdin":
            if stop_at_failure and any(not o.passed for o in outcomes if o.reason != "not run"):
                break
            outcomes[i] = script_outcome(run(f"{prelude}\n{program}" if prelude else program, test["stdin"]), test)
    return outcomes


def read_outcomes(run: Run, tests: Sequence[Test]) -> list[Outcome]:
    """Outcomes of calls and checks."""
    results = read_results(run.output)
    loaded, error = results.get(-1, (False, f"ended with {run.ended}"))

    def outcome(number: int, test: Test) -> Outcome:
        if not loaded:
            return Outcome(False, f"the program: {error}")
        finished, value = results.get(number, (False, f"ended with {run.ended}"))
        if not finished:
            if str(value).startswith(SYNTAX_ERRORS):
                check_syntax(test)
            return Outcome(False, str(value))
        right = kind_of(test) == "check" or passes(test, value)
        return Outcome(right, "" if right else f"returned {shown(value)}")

    return [outcome(number, test) for number, test in enumerate(tests)]


SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")


def check_syntax(test: Test) -> None:
    """Raise if the test itself is not Python: no program can pass it."""
    kind = str(kind_of(test))
    try:
        ast.parse(test[kind].strip() if kind == "call" else test[kind], mode="eval" if kind == "call" else "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{kind}={test[kind]!r:.100} is not Python ({error})") from error


def shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except ValueError as error:  # Python refuses to write a huge integer
        return f"a value that cannot be shown ({error})"


def script_outcome(run: Run, test: Test) -> Outcome:
    if not run.succeeded:
        return Outcome(False, f"ended with {run.ended}")
    right = same_output(test["stdout"], run.output.decode(errors="replace"))
    return Outcome(right, "" if right else f"printed {run.output[:200]!r}")
