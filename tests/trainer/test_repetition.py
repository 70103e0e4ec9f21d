"""Endless repetition: which answers count as a loop, its metric in a run, its warning."""

import random

import pytest

import toy
from alula.engine.rollout import Rollout
from alula.trainer.health import HealthMonitor
from alula.trainer.repetition import ends_in_a_loop, repeats_endlessly

NOISE = random.Random(0)


def text(length: int, symbols: int = 1000) -> list[int]:
    return [NOISE.randrange(symbols) for _ in range(length)]


PHRASES = {"one token": [7], "a word": [3, 4, 5], "a line": text(20), "a paragraph": text(64)}


@pytest.mark.parametrize("phrase", PHRASES.values(), ids=PHRASES)
def test_a_repeated_phrase_is_a_loop(phrase):
    repeats = max(4, -(-64 // len(phrase)) + 1)
    assert ends_in_a_loop(text(300) + phrase * repeats + phrase[:1])
    assert ends_in_a_loop(phrase * 70)
    assert not ends_in_a_loop(text(300) + phrase * 2)
    assert not ends_in_a_loop(phrase * 70 + text(20)), "a loop that ends is not endless"


@pytest.mark.parametrize("tokens", [[], [1], text(5000), text(500, symbols=2), list(range(64)) * 2])
def test_other_texts_are_not(tokens):
    assert not ends_in_a_loop(tokens)


def test_only_answers_at_the_token_limit_count():
    loop = [5] * 200
    assert repeats_endlessly(Rollout([1], loop, None, "length"))
    assert not repeats_endlessly(Rollout([1], loop, None, "stop"))


def test_a_run_logs_the_share_and_warns():
    """The metric appears for answers that can hold a loop; five steps above 5 % warn, once."""
    monitor = HealthMonitor("none")
    healthy = [warning for _ in range(10) for warning in monitor.observe({"response/repetitive": 0.04})]
    [warning] = [warning for _ in range(6) for warning in monitor.observe({"response/repetitive": 0.3})]
    assert healthy == []
    assert warning.kind == "endless-repetition"
    assert "of the rollouts of the last 5 steps repeat one phrase" in warning.message


@pytest.mark.parametrize(("limit", "logged"), [(2, False), (80, True)])
def test_the_metric_of_a_run(tmp_path, limit, logged):
    settings = ("steps=1", "eval.every=0", f"sampling.max_new_tokens={limit}", "sampling.temperature=0.02")
    run = toy.trainer(toy.quick(tmp_path, *settings))
    run.run()
    [row] = toy.rows(tmp_path, "metrics.jsonl")
    assert ("response/repetitive" in row) == logged
    if logged:  # almost greedy, a random model soon repeats itself
        assert 0 < row["response/repetitive"] <= row["response/truncated"]
