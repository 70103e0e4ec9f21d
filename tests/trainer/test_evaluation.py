"""Held-out evaluation in a run: several data sets, filtered sampling, stop strings, last and best."""

import math

import pytest

import toy
from alula.engine.rollout import Sampling
from alula.errors import SettingError
from alula.trainer.evaluation import RankShare, add_score, describe_score, pooled

OPTIONS = "options: {symbols: 4, prefix: 2, length: 2}"
SETS = (
    f"eval.data=[{{source: 'task:successor', size: 5, seed: 1, k: 4, {OPTIONS}}},"
    f" {{source: 'task:copy-last', size: 3, seed: 2, options: {{symbols: 4, prefix: 2}}}}]"
)


def test_several_sets_are_evaluated_each_with_its_samples(tmp_path):
    sampled: list[Sampling] = []
    settings = (
        SETS,
        "eval.temperature=0.7",
        "eval.top_p=0.9",
        "eval.top_k=3",
        "sampling.stop=['d d', 5]",
        "rewards.use=[{name: 'task:successor', options: {partial: true}}]",
    )
    run = toy.trainer(toy.quick(tmp_path, *settings))
    submit = run.rollouts.submit

    def recorded(jobs, **more):
        sampled.append(jobs[0].sampling)
        return submit(jobs, **more)

    run.rollouts.submit = recorded
    run.run()
    rows = toy.rows(tmp_path, "evals.jsonl")
    assert [(row["name"], row["policy"], row["n"], "pass_at_k" in row) for row in rows[:4]] == [
        ("task:successor", "sparse", 20, True),
        ("task:successor", "dense", 20, True),
        ("task:copy-last", "sparse", 3, False),
        ("task:copy-last", "dense", 3, False),
    ]
    assert all(row["pass_at_k"] >= row["accuracy"] for row in rows if "pass_at_k" in row)
    evaluations = [one for one in sampled if one.filtered]
    assert {(one.n, one.temperature, one.top_p, one.top_k) for one in evaluations} == {
        (4, 0.7, 0.9, 3),
        (1, 0.7, 0.9, 3),
    }
    assert all(one.stop == ("d d", 5) for one in sampled), "rollouts and evaluations stop alike"
    dense = [(row["step"], row["name"], row["accuracy"]) for row in rows if row["policy"] == "dense"]
    means = {step: sum(a for s, _, a in dense if s == step) / 2 for step, _, _ in dense}
    assert run.evaluation.accuracy == means[4]
    assert run.evaluation.best == max(means.values())
    printed = toy.printed(run)
    assert (
        f"dense accuracy on mean of 2 data sets: last {means[4]:.1%} (step 4), best {run.evaluation.best:.1%}"
        in printed
    )
    assert "dense accuracy on task:copy-last: last " in printed


def test_last_and_best_survive_a_resume(tmp_path):
    whole = toy.trainer(toy.quick(tmp_path / "whole"))
    whole.run()
    toy.trainer(toy.quick(tmp_path / "parts", "steps=2")).run()
    resumed = toy.trainer(toy.quick(tmp_path / "parts"), resume=True)
    resumed.run()
    assert {name: list(score) for name, score in resumed.evaluation.scores.items()} == {
        name: list(score) for name, score in whole.evaluation.scores.items()
    }


def test_scores_keep_the_first_of_the_best():
    score = None
    for step, accuracy in enumerate([0.2, 0.5, 0.5, 0.4]):
        score = add_score(score, step, accuracy)
    assert describe_score("gsm8k", score) == "dense accuracy on gsm8k: last 40.0% (step 3), best 50.0% (step 1)."


def test_shares_of_ranks_are_pooled():
    """The same numbers for any division of the problems."""
    answers = [[True, True], [False, True], [False, False], [True, False], [True, True], [False, False]]
    one = pooled([RankShare(answers, 16.0, 0.25)])
    two = pooled([RankShare(answers[:4], 10.0, 0.2), RankShare(answers[4:], 28.0, 0.35)])
    six = pooled([RankShare([each], 16.0, 0.25) for each in answers])
    assert (one.accuracy, one.n, one.length, one.kv_saved) == pytest.approx((0.5, 12, 16.0, 0.25))
    assert one.stderr == pytest.approx(math.sqrt(6 / 5 * (4 * 1**2)) / 12)
    assert one.pass_at_k == pytest.approx(4 / 6)
    for other in (two, six):
        assert vars(other) == pytest.approx(vars(one))
    assert pooled([RankShare([[True, False]], 1.0, 0.0)]).stderr == pytest.approx(math.sqrt(0.125))


def test_sets_of_one_name_are_told_apart(tmp_path):
    """The accuracy that chooses the best checkpoint is the mean of both."""
    sets = (
        "eval.data=[" + ", ".join(f"{{source: 'task:successor', size: 8, seed: {s}, {OPTIONS}}}" for s in (1, 2)) + "]"
    )
    run = toy.trainer(toy.quick(tmp_path, sets, "eval.sparse=false"))
    run.run()
    last = {row["name"]: row["accuracy"] for row in toy.rows(tmp_path, "evals.jsonl") if row["step"] == 4}
    assert list(last) == ["task:successor", "task:successor#2"]
    assert run.evaluation.accuracy == pytest.approx(sum(last.values()) / 2)
    assert set(run.evaluation.scores) == {*last, "mean of 2 data sets"}


def test_several_greedy_answers_are_rejected(tmp_path):
    for setting in ("eval.k=4", "eval.data={source: gsm8k, k: 4}"):
        with pytest.raises(SettingError, match="k=4 with temperature=0"):
            toy.toy(tmp_path, setting)


def test_an_override_reaches_every_set(tmp_path):
    config = toy.toy(tmp_path, "eval.data=[{source: math500}, {source: aime24}]", "eval.data.data_dir=/data")
    assert [source.data_dir for source in config.eval.data] == ["/data", "/data"]
