"""Does it learn? GRPO through the whole stack, from chance to above 0.9; and not when log-probs are off by one."""

import dataclasses

import pytest

import toy
from alula.config.load import load_config
from alula.data.tasks import build
from alula.learner import learner

CHANCE = 1 / 16
NEEDED = 40
"""Steps; every seed tried needed at most that many."""
LIMIT = 60

pytestmark = pytest.mark.slow


def train_until_it_knows(config, limit=LIMIT):
    """(accuracy of the dense policy before training, and at the end)"""
    run = toy.trainer(config)
    run.evaluate()
    start = run.evaluation.accuracy
    while run.step < limit and (run.evaluation.accuracy or 0) < 0.9:
        run.train_step()
        if run.step % 10 == 0:
            run.evaluate()
    return start, run.evaluation.accuracy


def test_accuracy_of_random_answers_is_the_chance_of_the_task():
    assert build("successor", symbols=4, prefix=2, length=2).chance == CHANCE


@pytest.mark.parametrize(("sparsity", "seed"), [("dense", 0), ("sparse", 0), ("sparse", 1)])
def test_accuracy_rises_from_chance_to_nine_in_ten(tmp_path, sparsity, seed):
    settings = [toy.DENSE] if sparsity == "dense" else []
    start, end = train_until_it_knows(toy.toy(tmp_path, f"seed={seed}", *settings))
    assert start < 3 * CHANCE
    assert end >= 0.9
    metrics = toy.rows(tmp_path, "metrics.jsonl")
    if sparsity == "dense":
        assert all(row["kv/saved"] == 0 and row["mismatch/kl_k3"] < 1e-6 for row in metrics)
    else:
        assert all(row["kv/saved"] > 0.1 for row in metrics), "nothing was evicted"
        assert max(row["mismatch/kl_k3"] for row in metrics) > 1e-3, "eviction made no difference"


@pytest.mark.parametrize("recipe", ["sparrow-toy", "distill-toy"])
def test_the_toys_of_the_other_methods_learn_too(tmp_path, recipe):
    start, end = train_until_it_knows(load_config(recipe, [f"out={tmp_path}"]))
    assert start < 3 * CHANCE
    assert end >= 0.9


def test_shifted_log_probs_do_not_learn(tmp_path, monkeypatch):
    """The classic mistake: a token's log-prob is taken from the hidden state *after* that token."""
    right = learner.collate

    def shifted(*arguments, **options):
        packed = right(*arguments, **options)
        return dataclasses.replace(packed, targets=packed.targets + 1)

    monkeypatch.setattr(learner, "collate", shifted)
    _, end = train_until_it_knows(toy.toy(tmp_path, toy.DENSE), NEEDED)
    assert end < 0.9
    mismatch = [row["mismatch/kl_k3"] for row in toy.rows(tmp_path, "metrics.jsonl")]
    assert min(mismatch) > 1e-3, "dense rollouts that do not match the learner must be visible"
