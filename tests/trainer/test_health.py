"""Each sign of trouble fires when it should, once; a healthy run with a real run's noise stays silent."""

import json
import math
import random
import re

import pytest

from alula.objective.settings import PRESETS
from alula.trainer.health import HealthMonitor

STEPS = 300


def healthy(seed: int, steps: int = STEPS) -> list[dict[str, float]]:
    """A run that learns: reward up, length drifting, entropy halving, mismatch falling; all noisy."""
    noise = random.Random(seed)
    series = []
    for step in range(steps):
        done = step / steps
        series.append(
            {
                "step": step + 1,
                "reward/mean": 0.2 + 0.5 * done + noise.gauss(0, 0.04),
                "reward/accuracy": 0.2 + 0.5 * done + noise.gauss(0, 0.04),
                "response/length_mean": (500 - 120 * done) * noise.lognormvariate(0, 0.06),
                "policy/entropy": (0.45 - 0.25 * done) * noise.lognormvariate(0, 0.12),
                "policy/grad_norm": 0.3 * noise.lognormvariate(0, 0.4),
                "mismatch/veto_rate": max(0.0, 0.07 + noise.gauss(0, 0.025)),
                "mismatch/kl_k3": (0.006 + 0.006 * math.exp(-5 * done)) * noise.lognormvariate(0, 0.25),
                "groups/no_signal": min(1.0, max(0.0, 0.35 + 0.3 * done + noise.gauss(0, 0.06))),
            }
        )
    return series


def ramp(step: int, start: float, end: float, first: int, length: int) -> float:
    return start + (end - start) * min(1.0, max(0.0, (step - first) / length))


def watch(series: list[dict[str, float]], monitor: HealthMonitor | None = None) -> list[tuple[int, str]]:
    monitor = monitor or HealthMonitor()
    return [(row["step"], warning.kind) for row in series for warning in monitor.observe(row)]


def test_healthy_runs_are_silent():
    assert [watch(healthy(seed)) for seed in range(40)] == [[]] * 40


def test_a_long_healthy_run_is_silent():
    assert watch(healthy(99, steps=3000)) == []


def sick(name: str, value, seed: int = 0, noise: float = 0.1) -> list[dict[str, float]]:
    """A healthy run in which one metric follows `value(step)`, with noise."""
    series = healthy(seed)
    random_ = random.Random(seed)
    for row in series:
        if (level := value(row["step"])) is not None:
            row[name] = level * random_.lognormvariate(0, noise)
    return series


TROUBLES = {
    "rejection": ("mismatch/veto_rate", lambda step: ramp(step, 0.07, 0.25, 100, 50), 100, 150),
    "mismatch-rising": ("mismatch/kl_k3", lambda step: ramp(step, 0.006, 0.022, 100, 100), 100, 200),
    "mismatch-high": ("mismatch/kl_k3", lambda step: 0.08, 45, 60),
    "gradient-spike": ("policy/grad_norm", lambda step: 9.0 if step == 150 else None, 150, 150),
    "answers-shrinking": ("response/length_mean", lambda step: ramp(step, 500, 100, 100, 100), 100, 200),
    "entropy-collapsing": ("policy/entropy", lambda step: ramp(step, 0.4, 0.01, 100, 100), 100, 210),
    "groups-equal": ("groups/no_signal", lambda step: 1.0 if step > 200 else 0.5, 201, 205),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", TROUBLES)
def test_each_trouble_is_reported_once_and_in_time(kind, seed):
    name, value, earliest, latest = TROUBLES[kind]
    warnings = watch(sick(name, value, seed, noise=0.0 if kind == "groups-equal" else 0.1))
    assert [what for _, what in warnings] == [kind]
    assert earliest <= warnings[0][0] <= latest


def test_a_problem_that_comes_back_is_reported_again():
    name = "mismatch/veto_rate"
    returning = sick(name, lambda step: 0.3 if 100 < step <= 120 or step > 200 else 0.05)
    assert [kind for _, kind in watch(returning)] == ["rejection", "rejection"]
    flickering = sick(name, lambda step: 0.3 if step > 100 and step % 12 < 6 else 0.05)
    assert [kind for _, kind in watch(flickering)] == ["rejection"]


@pytest.mark.parametrize("correction", PRESETS)
def test_no_warning_advises_the_correction_that_is_in_use(correction):
    monitor = HealthMonitor(correction)
    name, value, *_ = TROUBLES["mismatch-rising"]
    warnings = [warning for row in sick(name, value) for warning in monitor.observe(row)]
    monitor.observe_eval("held", "sparse", accuracy=0.90, stderr=0.01)
    monitor.observe_eval("held", "dense", accuracy=0.9, stderr=0.01)
    monitor.observe_eval("held", "sparse", accuracy=0.95, stderr=0.01)
    warnings += monitor.observe_eval("held", "dense", accuracy=0.1, stderr=0.01)
    assert [warning.kind for warning in warnings] == ["mismatch-rising", "dense-sparse-divergence"]
    for warning in warnings:
        words = re.split(r"[^a-z-]", warning.advice)
        assert correction not in words
        assert ("strict" in words) is (correction not in ("strict", "reroll"))
        assert "{" not in warning.advice


@pytest.mark.parametrize("controlled", [False, True])
def test_a_run_with_a_controller_is_not_advised_to_use_one(controlled):
    monitor = HealthMonitor("strict", controlled)
    [warning] = [w for _ in range(5) for w in monitor.observe({"mismatch/veto_rate": 0.2})]
    assert ("control={" in warning.advice) is not controlled
    assert "budget" in warning.advice


def test_a_run_that_rerolls_is_warned_of_the_cost_and_not_advised_to_reject():
    for row, expected in (({}, True), ({"mismatch/rerolled": 0.2}, False)):
        monitor = HealthMonitor()
        [warning] = [w for _ in range(5) for w in monitor.observe({"mismatch/veto_rate": 0.2} | row)]
        assert ("objective.correction=strict" in warning.advice) is expected
        assert ("dense suffix" in warning.advice) is not expected


@pytest.mark.parametrize(
    ("veto_rate", "rejected", "parts"),
    [
        (0.2, 0.0, ["20.0%", "vetoed", "15%", "0.0% rejected"]),
        (0.2, 0.2, ["20.0%", "vetoed", "15%", "20.0% rejected"]),
        (0.0, 1.0, ["100.0%", "rejected", "15%", "mask"]),
        (0.1, 0.2, ["20.0%", "rejected", "15%", "mask"]),
        (0.1, 0.1, None),
    ],
)
def test_rejected_counts_only_rejected_rollouts(veto_rate, rejected, parts):
    """A correction without a veto rejects none of the vetoed rollouts; a mask also rejects rollouts without a veto."""
    monitor, row = HealthMonitor(), {"mismatch/veto_rate": veto_rate, "mismatch/rejected": rejected}
    warnings = [(step, w.kind, w.message) for step in range(1, 9) for w in monitor.observe(row)]
    assert [(step, kind) for step, kind, _ in warnings] == ([(5, "rejection")] if parts else [])
    for *_, message in warnings:
        positions = [message.find(part) for part in parts]
        assert -1 not in positions
        assert positions == sorted(positions)
        assert ("mask" in message) is ("mask" in parts)


def test_messages_name_the_problem_and_give_advice():
    monitor = HealthMonitor()
    warnings = [warning for row in sick("mismatch/veto_rate", lambda step: 0.2) for warning in monitor.observe(row)]
    assert "last 5 steps" in warnings[0].message
    assert "vetoed" in warnings[0].message
    assert "budget" in warnings[0].advice


@pytest.mark.parametrize(("accuracy", "word"), [(0.98, "solved"), (0.0, "easier prompts")])
def test_advice_for_equal_groups_depends_on_their_reward(accuracy, word):
    monitor = HealthMonitor()
    row = {"groups/no_signal": 1.0, "reward/accuracy": accuracy, "reward/mean": accuracy}
    warnings = [warning for step in range(5) for warning in monitor.observe(row | {"step": step})]
    assert len(warnings) == 1
    assert word in warnings[0].advice


def test_low_entropy_of_a_solved_task_is_no_warning():
    series = sick("policy/entropy", lambda step: ramp(step, 0.4, 0.005, 100, 100))
    for row in series:
        row["reward/accuracy"] = ramp(row["step"], 0.3, 0.99, 50, 100)
    assert watch(series) == []


def test_missing_and_broken_numbers_are_skipped():
    series = [
        row | {"policy/grad_norm": math.nan if row["step"] % 3 else None, "mismatch/kl_k3": math.inf}
        for row in healthy(1)
    ]
    assert watch(series) == []
    assert watch([{"step": step} for step in range(50)]) == []


def evaluate(
    dense: list[float],
    reward,
    sparse: list[float] | None = None,
    n: int = 300,
    monitor: HealthMonitor | None = None,
) -> list[tuple[int, str]]:
    """Held-out evaluations every 20 steps of a run whose reward follows `reward(step)`."""
    monitor = monitor or HealthMonitor()
    warnings: list[tuple[int, str]] = []
    for index, accuracy in enumerate(dense):
        stderr = math.sqrt(max(accuracy * (1 - accuracy), 1 / n) / n)
        if sparse:
            monitor.observe_eval("held", "sparse", accuracy=sparse[index], stderr=stderr, length=100)
        warnings += [
            (index, warning.kind)
            for warning in monitor.observe_eval("held", "dense", accuracy=accuracy, stderr=stderr, length=100)
        ]
        for step in range(20):
            monitor.observe({"step": 20 * index + step, "reward/mean": reward(20 * index + step)})
    return warnings


def rising(step: int) -> float:
    return 0.3 + 0.002 * step


def falling(step: int) -> float:
    return 0.6 - 0.004 * step


def test_dense_accuracy_falling_under_a_rising_reward():
    assert evaluate([0.4, 0.45, 0.44, 0.2, 0.1, 0.05], rising) == [(3, "dense-sparse-divergence")]


def test_with_dense_rollouts_a_rising_reward_is_one_that_is_gamed():
    accuracies = [0.4, 0.45, 0.44, 0.2, 0.1, 0.05]
    assert evaluate(accuracies, rising, monitor=HealthMonitor(sparse=False)) == [(3, "reward-gamed")]
    assert evaluate(accuracies, falling, monitor=HealthMonitor(sparse=False)) == [(3, "dense-falling")]


def test_dense_accuracy_falling_under_a_rising_sparse_accuracy():
    sparse = [0.30, 0.35, 0.40, 0.45, 0.5, 0.5]
    assert evaluate([0.4, 0.45, 0.44, 0.2, 0.1, 0.05], falling, sparse) == [(3, "dense-sparse-divergence")]


def test_a_sparse_policy_far_ahead_of_the_dense_one():
    """The dense policy never falls, but it is not the one that learns."""
    dense, sparse = [0.10, 0.12, 0.13, 0.12, 0.13], [0.10, 0.14, 0.40, 0.60, 0.70]
    assert evaluate(dense, rising, sparse) == [(2, "dense-sparse-divergence")]
    assert evaluate(sparse, rising, dense) == [], "a sparse policy behind the dense one is normal"


def test_everything_falling_is_a_breakdown():
    assert evaluate([0.4, 0.45, 0.44, 0.2, 0.1, 0.05], falling) == [(3, "dense-falling")]


def test_a_fall_from_the_evaluation_before_the_first_step_is_compared_with_the_first_rewards():
    """There are no rewards before the first step; a reward that rose from 0.3 to 0.38 has not fallen."""
    assert evaluate([0.5, 0.45, 0.2, 0.1], rising) == [(2, "dense-sparse-divergence")]
    assert evaluate([0.5, 0.45, 0.2, 0.1], falling) == [(2, "dense-falling")]


def test_a_fall_before_the_first_rewards_does_not_mention_them():
    monitor = HealthMonitor()
    monitor.observe_eval("held", "dense", accuracy=0.5, stderr=0.02)
    monitor.observe({"step": 1, "reward/mean": 0.4})
    [warning] = monitor.observe_eval("held", "dense", accuracy=0.1, stderr=0.02)
    assert warning.kind == "dense-falling"
    assert "reward" not in warning.message


def test_a_slow_fall_is_seen_in_two_evaluations():
    assert evaluate([0.50, 0.52, 0.51, 0.42, 0.40], rising) == [(4, "dense-sparse-divergence")]


def test_recovery_and_a_second_fall_are_reported_again():
    warnings = evaluate([0.5, 0.5, 0.2, 0.2, 0.5, 0.5, 0.5, 0.2], rising)
    assert [index for index, _ in warnings] == [2, 7]


def test_noise_in_evaluations_is_not_a_fall():
    alarms = 0
    for seed in range(200):
        noise = random.Random(seed)
        dense = [sum(noise.random() < 0.4 for _ in range(200)) / 200 for _ in range(15)]
        alarms += len(evaluate(dense, rising, n=200))
    assert alarms <= 10


def test_a_resumed_monitor_warns_as_an_uninterrupted_one():
    name, value, *_ = TROUBLES["rejection"]
    series = sick(name, value)
    for row in series:
        row["policy/entropy"] = ramp(row["step"], 0.4, 0.01, 50, 200)
    uninterrupted = watch(series)
    assert len(uninterrupted) >= 2
    for cut in (1, 60, 120, 140, 250):
        before, after = HealthMonitor(), HealthMonitor()
        warnings = watch(series[:cut], before)
        before.observe_eval("held", "sparse", accuracy=0.5, stderr=0.02)
        before.observe_eval("held", "dense", accuracy=0.5, stderr=0.02)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert warnings + watch(series[cut:], after) == uninterrupted
        assert after.observe_eval("held", "dense", accuracy=0.1, stderr=0.02) != []
