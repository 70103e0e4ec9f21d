"""The `code` reward: extraction, comparison, both kinds of tests, the sandbox server, and what `--check` reports."""

import json
import shutil
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from alula.errors import SettingError
from alula.rewards import Rewards, RewardTerm
from alula.rewards.code import remote
from alula.rewards.code.remote import SandboxFusion
from alula.rewards.code.results import decode, passes, read_results, same_output
from alula.rewards.code.reward import HARNESS, build, program_of, run_tests
from alula.rewards.code.sandbox import Bubblewrap, Limits, SandboxError
from alula.rewards.code.seccomp import seccomp_filter
from alula.rewards.scoring import check

LIMITS = Limits(2, 256 << 20)
ADD = {"tests": [{"call": f"add({i}, 1)", "expected": str(i + 1)} for i in range(4)]}
SUM = {"tests": [{"stdin": f"{i} 1\n", "stdout": f"{i + 1}\n"} for i in range(4)]}


@pytest.fixture(scope="module")
def sandbox():
    return Bubblewrap(LIMITS)


def outcomes(sandbox, program, tests, **fields):
    return [outcome.passed for outcome in run_tests(sandbox, program, {"tests": tests, **fields})]


# -- from answer to value ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("First\n```python\nx = 1\n```\nthen\n```python\nx = 2\n```\nDone.", "x = 2\n"),
        ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("<think>```python\nx = 0\n```</think>```py\nx = 1\n```", "x = 1\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("```python\nx = 1", "x = 1"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
    ],
)
def test_the_last_fenced_block_is_the_program(completion, program):
    assert program_of(completion) == program


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("(1, [2, {'a': {3, 4}}], None, True)", "(1, [2, {'a': {3, 4}}], None, True)"),
        ("2 ** 20000", str(2**64)),
        ("-2 ** 64", str(-(2**64))),
        ("0.1 + 0.2", "0.30000000000000004"),
        ("float('-inf'), 1j, b'\\x00', '\\ud800\\n'", None),
        ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}"),
        ("frozenset([1])", "{1}"),
        ("True", "1"),
    ],
)
def test_values_come_back_as_they_are(sandbox, call, expected):
    run = sandbox.run(HARNESS, repr({"prelude": "", "program": "", "setup": "", "tests": [("call", call)]}))
    finished, value = read_results(run.output)[0]
    assert finished
    assert value == eval(call)
    if expected is not None and "**" not in call:
        assert passes({"expected": expected}, value)


@pytest.mark.parametrize(
    "program",
    [
        "@dataclass\nclass Node:\n    value: int\n    left: 'Node' = None\n\ndef f(x):\n    return Node(x).value",
        "def g(x: int): pass\n\ndef f(x):\n    return x if g.__annotations__['x'] is int else 0",
        "class A:\n    value = 3\n\ndef f(x):\n    return pickle.loads(pickle.dumps(A())).value",
    ],
)
@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_programs_with_classes_and_annotations_run_as_a_module_would(sandbox, program, future):
    imports = "import pickle\nfrom dataclasses import dataclass\n"
    expected = "0" if future and "__annotations__" in program else "3"
    assert outcomes(sandbox, future + imports + program, [{"call": "f(3)", "expected": expected}]) == [True]


def test_huge_integers_are_compared_and_never_fail_the_grading(sandbox):
    program, huge = "def f(x):\n    return 10**5000 if x else 1", "1" + 5000 * "0"
    tests = [{"call": "f(1)", "expected": huge}, {"call": "f(1)", "expected": "1"}, {"call": "f(0)", "expected": "1"}]
    assert outcomes(sandbox, program, tests) == [True, False, True]
    assert build(10.0, partial=True)(program, {"tests": tests}) == pytest.approx(2 / 3)


def test_values_that_differ():
    assert not passes({"expected": "(1, 2)"}, [1, 2])
    assert not passes({"expected": "'1'"}, 1)
    assert not passes({"expected": "None"}, decode({"object": "Any"}))
    assert passes({"expected": "[1.0, {'a': 2}]", "tolerance": 1e-6}, [1 + 1e-7, {"a": 2}])
    assert not passes({"expected": "[1.0]", "tolerance": 1e-6}, [1.1])
    assert not passes({"expected": "[1.0]", "tolerance": 1e-6}, [1.0, 1.0])
    assert not passes({"expected": "1.0", "tolerance": 1e-6}, 10**400)
    with pytest.raises(ValueError, match="not a Python literal"):
        passes({"expected": "f(1)"}, 1)


@pytest.mark.parametrize(
    "line",
    [
        *("", "[", "[0]", "1", "[" * 10000, "[[], true, 1]", "[1e999, true, 1]"),
        *('[0, true, {"set": [[]]}]', '[0, true, {"float": "0x1p9999"}]'),
    ],
)
def test_lines_that_are_no_result_are_skipped(line):
    assert read_results(f"{line}\n[1, true, 2]\n".encode()) == {1: (True, 2)}


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("3\n", "3", True),
        ("1 2 \n3\n\n", "1 2\n3\n", True),
        ("0.5 yes", "0.50 yes", True),
        ("1", "1.0", True),
        ("3\n", "3\n4\n", False),
        ("1 2", "1  3", False),
        ("yes", "Yes", False),
        ("1\n2", "1 2", False),
    ],
)
def test_output_is_compared_by_lines_and_numbers(expected, printed, same):
    assert same_output(expected, printed) is same


# -- tests -------------------------------------------------------------------------------------------------------------


def test_calls_partial_and_all_or_nothing():
    half = "```python\ndef add(a, b): return a + b if a < 2 else None\n```"
    assert build(10)(half, ADD) == 0
    assert build(10, partial=True)(half, ADD) == 0.5
    assert build(10)("```python\ndef add(a, b): return a + b\n```", ADD) == 1
    assert build(10)("I do not know.", ADD) == 0


def test_scripts_run_once_per_input(sandbox):
    program = "print(sum(map(int, input().split())))\nif __name__ == '__main__': exit()"
    assert outcomes(sandbox, program, SUM["tests"]) == [True] * 4
    assert outcomes(sandbox, "print(2)", SUM["tests"]) == [False, True, False, False]
    assert outcomes(sandbox, "print(1); raise SystemExit(1)", SUM["tests"][:1]) == [False]


def test_later_scripts_are_left_out_after_a_failure(sandbox):
    found = run_tests(sandbox, "print(1)", SUM, stop_at_failure=True)
    assert [outcome.reason for outcome in found] == ["", "printed b'1\\n'", "not run", "not run"]


def test_prelude_setup_and_a_program_that_is_only_a_body(sandbox):
    tests = [{"call": "f(4)", "expected": "2.0"}]
    prelude = "from math import sqrt\ndef f(x):\n    '''Root.'''\n"
    assert outcomes(sandbox, "    return sqrt(x)\n", tests, prelude=prelude) == [True]
    assert outcomes(sandbox, "def f(x):\n    return sqrt(x)\n", tests, prelude=prelude) == [True]
    assert outcomes(sandbox, "class A: value = 2.0", [{"call": "a.value", "expected": "2.0"}], setup="a = A()") == [
        True
    ]


def test_checks_run_inside(sandbox):
    tests = [{"check": "for i in range(9): assert f(i) == i"}, {"check": "assert f(9) == 0"}]
    assert outcomes(sandbox, "def f(x): return x", tests) == [True, False]


def test_one_call_that_fails_leaves_the_others(sandbox):
    tests = [{"call": call, "expected": "1"} for call in ("f(1)", "f(0)", "missing()", "f(1)")]
    found = run_tests(sandbox, "def f(x): return 1 // x", {"tests": tests})
    assert [outcome.passed for outcome in found] == [True, False, False, True]
    assert "ZeroDivisionError" in found[1].reason
    assert "NameError" in found[2].reason


@pytest.mark.parametrize("test", [{"call": "f(1", "expected": "1"}, {"check": "  assert f(1)\n assert"}])
def test_a_test_that_is_not_python_is_a_fault_of_the_data(sandbox, test):
    right = {"call": "f(1)", "expected": "1"}
    with pytest.raises(ValueError, match="is not Python"):
        run_tests(sandbox, "def f(x): return x", {"tests": [right, test]})


def test_a_syntax_error_of_the_answer_is_a_wrong_answer(sandbox):
    tests = [{"call": "f(1)", "expected": "1"}]
    assert outcomes(sandbox, "def f(x): return (", tests) == [False]
    assert outcomes(sandbox, "def f(x): return eval('(')", tests) == [False]
    assert outcomes(sandbox, "def f(x): raise SyntaxError('the test is broken')", tests) == [False]


def test_calls_before_a_hang_count(sandbox):
    tests = [{"call": f"f({i})", "expected": str(i)} for i in range(3)]
    program = "import time\ndef f(x):\n  if x == 1: time.sleep(600)\n  return x"
    found = run_tests(sandbox, program, {"tests": tests}, deadline=time.monotonic() + 2)
    assert [outcome.passed for outcome in found] == [True, False, False]
    assert found[1].reason == "ended with time"


def test_a_slow_answer_is_wrong_and_no_failure_of_the_grader():
    sleeper = "import time; time.sleep(600)"
    with Rewards([RewardTerm(name="code")], timeout=1.5, workers=2) as rewards:
        batch = rewards.score([sleeper, "print(1)", "print(1)"], [SUM, {"tests": SUM["tests"][:1]}, {"tests": []}])
    assert batch.parts["code"] == [0, 1, 0]
    assert [(i, "no tests" in reason) for i, reason in batch.failures] == [(2, True)]


def test_sets_have_the_same_order_in_every_run(sandbox):
    program = "print(list(set('abcdefgh')))"
    assert len({sandbox.run(program).output for _ in range(3)}) == 1


# -- no sandbox --------------------------------------------------------------------------------------------------------


def test_without_bubblewrap_check_raises_with_a_hint(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SettingError, match=r"bubblewrap is not installed.*apt-get install bubblewrap.*url"):
        check([RewardTerm(name="code")])


def test_where_namespaces_are_blocked_check_raises_with_a_hint(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    with pytest.raises(SettingError, match=r"No permissions to create a new namespace.*user namespaces.*url"):
        check([RewardTerm(name="code")])


def test_other_processors_need_a_server():
    assert len(seccomp_filter("aarch64")) % 8 == 0
    with pytest.raises(SettingError, match=r"riscv64.*url"):
        seccomp_filter("riscv64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"second": 1}, "did you mean 'seconds'"),
        ({"timeout": 1}, "unknown option"),
        ({"seconds": 0}, "seconds=0"),
        ({"memory": 1}, "memory=1"),
        ({"url": "localhost"}, "url='localhost'"),
        ({"url": "http://127.0.0.1:9"}, "http://127.0.0.1:9/run_code does not work"),
    ],
)
def test_invalid_options_raise(options, message, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    with pytest.raises(SettingError, match=message):
        check([RewardTerm(name="code", options=options)])


# -- a server ----------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """SandboxFusion's interface over the local sandbox. `faults` are served first: a status, a text, or a delay."""

    def __init__(self, sandbox):
        super().__init__(("127.0.0.1", 0), Handler)
        self.sandbox, self.faults, self.requests = sandbox, [], []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if isinstance(fault, float):
            time.sleep(fault)
        if isinstance(fault, int):
            self.send_error(fault)
            return
        text = fault if isinstance(fault, str) else json.dumps(self.reply(body))
        self.send_response(200)
        self.end_headers()
        with suppress(BrokenPipeError):  # after a timeout
            self.wfile.write(text.encode())

    def reply(self, body):
        run = self.server.sandbox.run(body["code"], body["stdin"])
        code = int(run.ended.split()[-1]) if run.ended.startswith("exit") else None
        result = {
            "status": "Finished" if code is not None else "TimeLimitExceeded",
            "return_code": code,
            "stdout": run.output.decode(),
            "stderr": "",
            "execution_time": run.seconds,
        }
        return {"status": "Success" if code == 0 else "Failed", "message": "", "run_result": result}

    def log_message(self, *_):
        pass


@pytest.fixture
def server(sandbox, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(sandbox) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_a_server_grades_as_the_local_sandbox_does(server):
    grade = build(10, url=server.url, seconds=2, memory=300)
    good = "```python\ndef add(a, b):\n    print('noise')\n    return a + b\n```"
    assert [grade(good, ADD), grade("print(sum(map(int, input().split())))", SUM), grade("x", ADD)] == [1, 1, 0]
    path, body = server.requests[1]
    assert path == "/run_code"
    assert body.keys() == {"code", "stdin", "language", "compile_timeout", "run_timeout", "memory_limit_MB"}
    assert (body["language"], body["run_timeout"], body["memory_limit_MB"]) == ("python", 2, 300)
    assert grade("def f(): return 'words ' * 2", {"tests": [{"call": "f()", "expected": "'words words '"}]}) == 1
    assert not any("words words" in json.dumps(body) for _, body in server.requests)


@pytest.mark.parametrize("faults", [[500], [503, 502], ['{"status": "SandboxError", "message": "no pod"}']])
def test_passing_faults_of_a_server_are_tried_again(server, faults):
    box = SandboxFusion(server.url + "/run_code", LIMITS)
    server.faults = list(faults)
    assert box.run("print(1)").output == b"1\n"
    assert len(server.requests) == 2 + len(faults)


@pytest.mark.parametrize(
    ("faults", "message", "requests"),
    [
        ([500] * 3, "HTTP status 500", 3),
        ([404], "HTTP status 404", 1),
        (["<html>"], "malformed", 1),
        (["[]"], "malformed", 1),
        (['{"status": "Success"}'], "malformed", 1),
        (['{"status": "Success", "run_result": {"status": "Finished"}}'], "malformed", 1),
        ([1.0] * 3, "TimeoutError", 3),
    ],
)
def test_a_broken_server_is_a_failure_of_the_sandbox(server, monkeypatch, faults, message, requests):
    box = SandboxFusion(server.url, LIMITS)
    server.faults = list(faults)
    monkeypatch.setattr(remote, "OVERHEAD", 0.1)
    with pytest.raises(SandboxError, match=message):
        box.run("print(1)", wall_seconds=0.1)
    assert len(server.requests) == 1 + requests


def test_a_lost_server_is_reported_with_the_answers(server):
    options = {"url": server.url}
    with Rewards([RewardTerm(name="code", options=options)], workers=1) as rewards:
        rewards.start()
        server.faults = [404]
        batch = rewards.score(["print(1)"], [SUM])
    assert batch.total == [0]
    assert "SandboxError: HTTP status 404" in batch.failures[0][1]
