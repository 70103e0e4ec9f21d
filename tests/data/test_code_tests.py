"""Tests of coding tasks: the format, and asserts split into calls and expected values."""

import json

import pytest

from alula.data.code_tests import (
    call_test,
    read_tests,
    split_asserts,
    split_check_function,
    split_inputs_and_results,
)

CALL = {"call": "f(1)", "expected": "2"}


def test_tests_as_list_and_as_json_text_are_the_same():
    tests = [CALL, {"stdin": "1\n", "stdout": "2\n"}, {"check": "assert f(1)"}]
    assert read_tests({"tests": tests}) == read_tests({"tests": json.dumps(tests)}) == tests


def test_missing_keys_of_arrow_tables_are_ignored():
    assert read_tests({"tests": [CALL | {"stdin": None, "stdout": None, "tolerance": None}]}) == [CALL]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "no tests"),
        ([], "no tests"),
        ("[", "not valid JSON"),
        (["assert f(1)"], "test 1"),
        ([CALL, {"call": "f(1)"}], "test 2"),
        ([{"call": "f(1)", "expected": 2}], "test 1"),
        ([CALL | {"stdin": "1"}], "test 1"),
    ],
)
def test_malformed_tests_raise(tests, message):
    with pytest.raises(ValueError, match=message):
        read_tests({"tests": tests})


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("assert f([1], 'a') == (4, 5)", [{"call": "f([1], 'a')", "expected": "(4, 5)"}]),
        ("assert f(1) == {1, 2}, 'why'", [{"call": "f(1)", "expected": "{1, 2}"}]),
        ("assert f(1) == frozenset([1, 2])", [{"call": "f(1)", "expected": "{1, 2}"}]),
        ("assert f(1) == (frozenset([]), 1)", [{"call": "f(1)", "expected": "(set(), 1)"}]),
        ("assert f(1) == set([frozenset([1])])", [{"check": "assert f(1) == set([frozenset([1])])"}]),
        ("assert tuple(f(1)) == tuple([1, -2])", [{"call": "tuple(f(1))", "expected": "(1, -2)"}]),
        ("assert f(1) == (3 + 5, 3 * 5)", [{"call": "f(1)", "expected": "(8, 15)"}]),
        ("assert abs(f(1) - 2.0/4) < 1e-6", [{"call": "f(1)", "expected": "0.5", "tolerance": 1e-6}]),
        ("assert f(1) is None", [{"call": "f(1) is None", "expected": "True"}]),
        ("assert f(1)", [{"call": "bool(f(1))", "expected": "True"}]),
        ("assert not f(1)", [{"call": "bool(f(1))", "expected": "False"}]),
        ("assert True, 'always'", []),
        # no constant on the right: not split, never evaluated
        ("assert f(1) == g(1)", [{"check": "assert f(1) == g(1)"}]),
        ("assert f(1) == 1 / 0", [{"check": "assert f(1) == 1 / 0"}]),
        ("assert f(1) == 9**9**9", [{"check": "assert f(1) == 9 ** 9 ** 9"}]),
        ("assert f(1) == __import__('os').getpid()", [{"check": "assert f(1) == __import__('os').getpid()"}]),
    ],
)
def test_asserts_are_split(source, tests):
    assert split_asserts(source) == tests


def test_check_function_keeps_what_depends_on_local_names():
    source = """
HELP = 3
def check(candidate):
    assert candidate(1) == 2
    for x in range(3):
        assert candidate(x) == x + 1
    assert candidate(x) == 3
"""
    calls, rest = split_check_function(source, "succ")
    assert calls == {"call": "succ(1)", "expected": "2"}
    namespace = {"succ": lambda x: x + 1}
    exec(rest["check"], namespace)
    namespace["succ"] = lambda x: x + 1 if x < 2 else 0
    with pytest.raises(AssertionError):
        exec(rest["check"], namespace)


def test_evalplus_lists():
    source = """
def check(candidate):
    inputs = [[[1, 2], 3], [[], 0]]
    results = [2.5, None]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""
    assert split_inputs_and_results(source, "f") == [
        {"call": "f(*[[1, 2], 3])", "expected": "2.5", "tolerance": 1e-6},
        {"call": "f(*[[], 0])", "expected": "None", "tolerance": 1e-6},
    ]
    with pytest.raises(ValueError, match="inputs"):
        split_inputs_and_results("inputs = [[1]]", "f")


def test_call_test_turns_tuples_into_lists():
    test = call_test("Solution().pair", [1, "a"], [1, "a"])
    namespace = {"Solution": type("Solution", (), {"pair": lambda self, *values: values})}
    assert eval(test["call"], namespace) == eval(test["expected"]) == [1, "a"]
