"""Evaluation: metrics against brute force, and an evaluation of rollouts with known outcomes."""

import dataclasses
import itertools
import json
import math
import random

import pytest
from rich.console import Console

from alula.data import Dataset, Example
from alula.engine.rollout import KVUse, Rollout
from alula.errors import SettingError
from alula.evals import evaluate, markdown, table
from alula.evals import metrics as m
from alula.rewards import Rewards, RewardTerm

GRADED = [[True, False, False, True], [False, False, False, False], [False, True, True, True]]


def test_averages_by_hand():
    assert m.pass_at_k(GRADED, 1) == pytest.approx(m.avg_at_k(GRADED, 4))
    assert m.avg_at_k(GRADED, 4) == pytest.approx((2 / 4 + 0 + 3 / 4) / 3)
    assert m.avg_at_k(GRADED, 2) == pytest.approx((1 / 2 + 0 + 1 / 2) / 3)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    def brute(samples):
        subsets = list(itertools.combinations(samples, k))
        return sum(any(subset) for subset in subsets) / len(subsets)

    assert m.pass_at_k(GRADED, k) == pytest.approx(sum(map(brute, GRADED)) / 3)


@pytest.mark.parametrize(
    ("samples", "answers", "expected"),
    [
        ([True, True, False], ["1/2", "0.5", "3"], 1),  # right answers vote together, in any notation
        ([True, False, False], ["1", "3", "3"], 0),
        ([True, False, False], ["1", "3", "4"], 1 / 3),
        ([True, False, False], ["1", "3", None], 1 / 2),
        ([True, False, False], ["1", " 3", "3 "], 0),
        ([False, False], [None, None], 0),
        ([True, False, False, False], ["1", None, None, None], 1),
    ],
)
def test_majority(samples, answers, expected):
    assert m.maj_at_k([samples], [answers], len(samples)) == pytest.approx(expected)


def test_k_beyond_the_samples_raises():
    with pytest.raises(SettingError, match="k=5"):
        m.pass_at_k(GRADED, 5)


def test_clustered_error_by_hand_and_by_simulation():
    means = [2 / 4, 0, 3 / 4]
    center = sum(means) / 3
    assert m.clustered_error(GRADED) == pytest.approx(
        math.sqrt(sum((x - center) ** 2 for x in means) / 2) / math.sqrt(3)
    )
    assert m.clustered_error(GRADED[:1]) is None

    generator = random.Random(0)
    found, errors = [], []
    for _ in range(400):
        skills = [generator.random() ** 3 for _ in range(40)]
        graded = [[generator.random() < skill for _ in range(8)] for skill in skills]
        found.append(m.avg_at_k(graded, 8))
        errors.append(m.clustered_error(graded))
    spread = math.sqrt(sum((x - sum(found) / 400) ** 2 for x in found) / 399)
    assert sum(errors) / 400 == pytest.approx(spread, rel=0.12)
    naive = math.sqrt(sum(found) / 400 * (1 - sum(found) / 400) / 320)
    assert spread > 1.5 * naive  # samples of one problem are far from independent


def test_percentile():
    values = [5, 1, 4, 2, 3]
    assert [m.percentile(values, share) for share in (0.01, 0.2, 0.21, 0.5, 0.9, 1.0)] == [1, 1, 2, 3, 5, 5]


TEXTS = {"1+1": ["\\boxed{2}", "\\boxed{2.0}", "\\boxed{3}"], "2+2": ["\\boxed{5}", "\\boxed{5}", "4 cut"]}


def rollout(text, tokens, finish, peak, carry_text=True):
    kv = KVUse(
        peak_tokens=peak, mean_tokens=peak / 2, dense_mean_tokens=peak, mean_read_tokens=peak / 2, peak_bytes=8 * peak
    )
    return Rollout(
        [1],
        [ord(c) for c in text] if not carry_text else [0] * tokens,
        None,
        finish,
        kv,
        text=text if carry_text else None,
    )


def fake_engine(calls):
    def generate(prompts, n):
        calls.append(list(prompts))
        return [
            rollout(TEXTS[prompt][j], 10 * (j + 1), "length" if "cut" in TEXTS[prompt][j] else "stop", 100 * (j + 1))
            for prompt in prompts
            for j in range(n)
        ]

    return generate


@pytest.fixture
def data():
    return Dataset((Example("1+1", "2"), Example("2+2", "4")), "sums")


@pytest.mark.slow
def test_programs_do_not_vote(data):
    with Rewards([RewardTerm(name="math")], workers=1) as rewards:
        result = evaluate(fake_engine([]), data, rewards, 3, answer_of=None)
    assert result.maj_at_k is None
    assert "| – |" in markdown([result])
    assert json.loads(json.dumps(result.to_dict()))["accuracy"] == result.accuracy


@pytest.mark.slow
def test_evaluate(data):
    calls = []
    with Rewards(
        [RewardTerm(name="math"), RewardTerm(name="format", weight=0.5, options={"has": "boxed"})], workers=1
    ) as rewards:
        result = evaluate(fake_engine(calls), data, rewards, 3, model="M", sparsity="rkv 64+16", keep_samples=2)
    assert calls == [["1+1", "2+2"]]
    assert (result.problems, result.k, result.data) == (2, 3, "sums")
    assert result.accuracy == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert result.pass_at == pytest.approx({1: 1 / 2, 2: 5 / 6, 3: 1})
    assert result.maj_at_k == 0.5
    assert result.parts == pytest.approx({"math": 0.5, "format": 5 / 6})
    assert result.reward == pytest.approx(0.5 + 0.5 * 5 / 6)
    assert result.lengths.mean == 20
    assert (result.lengths.p50, result.lengths.longest) == (20, 30)
    assert result.lengths.truncated == pytest.approx(1 / 6)
    assert result.kv.saved == pytest.approx(0.5)
    assert (result.kv.peak_tokens, result.kv.peak_bytes) == (300, 2400)
    assert [sample.correct for sample in result.samples] == [True, True]
    assert json.loads(json.dumps(result.to_dict()))["accuracy"] == result.accuracy


def test_saved_kv_weighs_by_length(data):
    def generate(prompts, n):
        short = rollout("\\boxed{2}", 10, "stop", 100)
        long = rollout("\\boxed{4}", 90, "stop", 100)
        long.kv.mean_tokens = 10
        return [short, long]

    with Rewards([RewardTerm(name="format", options={"has": "boxed"})], workers=1) as rewards:
        result = evaluate(generate, data, rewards)
    assert result.kv.saved == pytest.approx(1 - (10 * 50 + 90 * 10) / (100 * 100))


def test_what_a_selector_reads_is_in_the_table(data):
    def generate(prompts, n):
        answers = [rollout("\\boxed{2}", 10, "stop", 100), rollout("\\boxed{4}", 90, "stop", 100)]
        for answer, read in zip(answers, (40, 20)):
            answer.kv.mean_read_tokens = read
        return answers

    with Rewards([RewardTerm(name="format", options={"has": "boxed"})], workers=1) as rewards:
        result = evaluate(generate, data, rewards)
    assert result.kv.read == pytest.approx((10 * 40 + 90 * 20) / (100 * 100))
    head, _, row = markdown([result]).splitlines()
    assert head.endswith("| KV saved | KV read | peak KV |")
    assert row.endswith("| 50 % | 22 % | 100 |")


def test_prompt_ids_are_used():
    data = Dataset((Example("1+1", "2", prompt_ids=(7, 8)),))
    seen = []

    def generate(prompts, n):
        seen.extend(prompts)
        return [rollout("\\boxed{2}", 0, "stop", 1)]

    with Rewards([RewardTerm(name="format", options={"has": "boxed"})], workers=1) as rewards:
        with pytest.raises(SettingError, match="the rollout has no text"):
            evaluate(lambda *_: [rollout("\\boxed{2}", 0, "stop", 1, carry_text=False)], data, rewards)
        result = evaluate(generate, data, rewards)
        with pytest.raises(SettingError, match="did you mean 'format'"):
            evaluate(generate, data, rewards, correct="formt")
    assert seen[0] == [7, 8]
    assert (result.accuracy, result.error) == (1, None)


def test_tables_of_models_and_sparsities(data):
    with Rewards([RewardTerm(name="math")], workers=1) as rewards:
        dense = evaluate(fake_engine([]), data, rewards, 3, model="M", sparsity="dense")
        sparse = evaluate(fake_engine([]), data, rewards, 3, model="M", sparsity="rkv 64+16")
        first = evaluate(fake_engine([]), Dataset(data[:1], "one"), rewards, 1, model="M", sparsity="dense")
    lines = markdown([dense, sparse, first]).splitlines()
    head = "| model | sparsity | sums (avg@3) | maj@3 | pass@3 | one (pass@1) | average | tokens | KV saved | peak KV |"
    assert lines[0] == head
    assert lines[2] == "| M | dense | 50.0 ± 16.7 | 50.0 | 100.0 | 100.0 | 75.0 | 15 | 50 % | 300 |"
    assert lines[3] == "| M | rkv 64+16 | 50.0 ± 16.7 | 50.0 | 100.0 | - | - | 20 | 50 % | 300 |"
    other = markdown([first, dataclasses.replace(dense, model="N")]).splitlines()
    assert other[2] == "| M | dense | 100.0 | - | - | - | - | 10 | 50 % | 100 |"
    alike = markdown([dataclasses.replace(dense, accuracy=1.0, error=0.0)]).splitlines()
    assert alike[2].startswith("| M | dense | 100.0 | "), "no error of 0"
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table([dense, sparse, first]))
    assert "50.0 ± 16.7" in console.export_text()
