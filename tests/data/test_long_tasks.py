"""`search` and `machine`: traces against independent interpreters, and their verifiers."""

import random
import re

import pytest

from alula.data.tasks import build
from alula.data.tasks.search import Search
from alula.errors import SettingError


@pytest.mark.parametrize("options", [{}, {"numbers": 4, "tries": 16}, {"numbers": 5, "largest": 20, "limit": 99}])
def test_a_search_computes_correctly_and_never_tries_a_move_twice(options):
    task, endings = build("search", **options), set()
    for example in task.dataset(60, seed=3):
        root, target = example.prompt.removesuffix(" :").split(" > ")
        search, answer = example.fields["trace"].split(" answer ")
        attempts = re.findall(r"#(\d+) ([^x!?]+) ((?:\? \d+ )?[x!])", search)
        assert " ".join(f"#{left} {steps} {verdict}" for left, steps, verdict in attempts) == search
        assert [int(left) for left, *_ in attempts] == list(range(task.tries, task.tries - len(attempts), -1))
        known, tried = {root}, set()
        for place, (_, steps, verdict) in enumerate(attempts):
            expected = None
            for step in steps.split(" , "):
                state, move = step.split(" : ")
                assert state in known if expected is None else state == expected  # a node that was reached before
                assert step not in tried
                tried.add(step)
                expression, result = move.split(" = ")
                assert eval(expression) == int(result)
                assert 1 <= int(result) <= task.limit
                left = state.split()
                for number in re.findall(r"\d+", expression):
                    left.remove(number)
                expected = " ".join([*left, result])
                known.add(expected)
            solved = expected == target
            single = " " not in expected
            assert verdict == (f"? {target} " if single else "") + ("!" if solved else "x")
            assert not solved or place == len(attempts) - 1
        endings.add(solved)
        assert (answer == "none") == (not solved)
        assert not solved or answer.split(" ; ")[-1] == move
    assert endings == {True, False}


def test_search_heuristics_differ_and_the_target_is_rare():
    task = Search()
    traces = {task.trace((4, 3, 2), 20, random.Random(seed)) for seed in range(30)}
    assert len(traces) > 20
    assert task.chance < 0.1


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("#3 4 3 2 : 4 + 3 = 7 , 2 7 : 7 * 2 = 14 ? 20 x answer 3 + 2 = 5 ; 5 * 4 = 20", 1),
        ("answer 4 + 3 = 7 ; 7 + 2 = 9 answer 3 + 2 = 5 ; 5 * 4 = 20", 1),
        ("answer 3 + 2 = 5 ; 5 * 4 = 20 answer none", 0),
        ("answer 3 + 2 = 5 ; 5 * 4 = 21", 0),
        ("answer 5 * 4 = 20", 0),
        ("3 + 2 = 5 ; 5 * 4 = 20", 0),
        ("answer", 0),
    ],
)
def test_search_verifier(completion, score):
    assert build("search").score(completion, {"prompt": "4 3 2 > 20 :", "answer": "20"}) == score


@pytest.mark.parametrize("mark", ["", "#"])
def test_a_machine_trace_against_python_itself(mark):
    task = build("machine", registers=4, statements=5, min_rounds=2, max_rounds=12, marked=len(mark))
    formats = set()
    for example in task.dataset(60, seed=3):
        program, start, rounds = example.prompt.removesuffix(" :").split(" | ")
        words = start.split()
        values = {register: int(value) for register, value in zip(words[::2], words[1::2])}
        lines = re.findall(r"(\w [+-] \w)( : \d [+-] \d)? = (\d) ;", example.fields["trace"])
        statements = program.removesuffix(" ;").split(" ; ")
        assert [line for line, *_ in lines] == statements * int(rounds.removeprefix(mark))
        counters = re.findall(rf"\[ {mark}(\d+) ", example.fields["trace"])
        assert counters == [str(left) for left in range(len(counters) - 1, -1, -1)]
        assert rounds == f"{mark}{len(counters)}"
        assert {*example.prompt.split(), *example.fields["trace"].split()} <= {*task.words}
        for statement, work, result in lines:
            assert int(result) == eval(statement, {}, values) % 10
            assert not work or eval(work[3:]) % 10 == int(result)
            values[statement[0]] = int(result)
            formats.add(bool(work))
        assert example.answer == " ".join(map(str, values.values()))
        assert example.fields["trace"].endswith(f"] answer {example.answer}")
    assert formats == {True, False}


@pytest.mark.parametrize(
    ("completion", "score"),
    [("[ 0 a 9 b 3 ] answer 9 3", 1), ("answer 9 4", 0), ("answer 9", 0), ("answer 9 3 3", 0), ("9 3", 0)],
)
def test_machine_verifier(completion, score):
    assert build("machine").score(completion, {"answer": "9 3"}) == score


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("search", {"numbers": 2}, "numbers=2"),
        ("search", {"largest": 50}, "largest=50"),
        ("search", {"tries": 0}, "tries=0"),
        ("machine", {"registers": 1}, "registers=1"),
        ("machine", {"statements": 0}, "statements=0"),
        ("machine", {"min_rounds": 9}, "min_rounds=9"),
        ("machine", {"marked": 2}, "marked=2"),
    ],
)
def test_invalid_sizes_raise(task, options, message):
    with pytest.raises(SettingError, match=message):
        build(task, **options)
