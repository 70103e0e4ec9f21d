"""The tail watched during training, on a real engine: what is measured, what it costs, what the controller does."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import oracle
from alula import Engine, Evict, Sampling, Schedule, Select, Sparsity
from alula.engine.rollout import Span
from alula.errors import SettingError
from alula.mismatch.control.controller import default_ladder
from alula.mismatch.control.monitor import Monitor, controlled, resolve_control, schedule_of
from alula.settings import ControlSettings, MonitorSettings
from alula.sparsity.policy import DENSE

PROMPTS = [[int(t) for t in row] for row in np.random.default_rng(0).integers(2, 96, (12, 6))]
LONGEST = 6 + 30
SCHEDULE = Schedule((12, 12, 16), 12, "planned", None, "block-topk", 4, {"tau": 0.7})
SELECTING = Sparsity(select=Select("block-topk", SCHEDULE, 4, 0))
EVICTING = Sparsity(Evict("streaming", 6, buffer=2, window=2, sinks=1))


@pytest.fixture(scope="module")
def engine():
    return Engine(oracle.custom_model(3, layers=2), page=4, kv_memory="4MiB", max_rows=48, lookahead=4)


def rollouts_of(engine, monitor: Monitor, seed: int = 0, n: int = 2):
    sampling = Sampling(n=n, max_new_tokens=30, seed=seed, ignore_eos=True)
    return engine.generate(
        PROMPTS, sampling, monitor.recommended, keep_hidden=monitor.keep_hidden(range(len(PROMPTS))), progress=False
    )


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[max(0, int(np.ceil(share * len(values) - 1e-9)) - 1)]


@pytest.mark.parametrize("sparsity", [SELECTING, EVICTING], ids=["select", "evict"])
def test_metrics_against_plain_counting(sparsity, engine):
    monitor = Monitor(watch(5), sparsity, engine.acceptance, LONGEST)
    rollouts = rollouts_of(engine, monitor)
    watched = [r for r in rollouts if r.hidden is not None]
    assert [(r.prompt_index, r.sample_index) for r in watched] == [(i, 0) for i in range(5)]
    found = monitor.step(rollouts)
    assert all(r.hidden is None for r in rollouts), "hidden states are freed"
    assert found.events == ()

    alphas = engine.acceptance(watched, sparsity)
    every = [a for alpha in alphas for a in alpha.tolist()]
    for p in (1, 5, 50):
        assert found.metrics[f"mismatch/alpha_p{p:02}"] == pytest.approx(percentile(every, p / 100), abs=1e-4)
    assert found.metrics["mismatch/alpha_tokens"] == 5 * 30
    width = 12 if sparsity is SELECTING else 5
    bins: dict[int, list[float]] = {}
    for rollout, alpha in zip(watched, alphas):
        for i, a in enumerate(alpha.tolist()):
            first = (len(rollout.prompt_ids) + i) // width * width
            bins.setdefault(min(first, 24) if width == 12 else first, []).append(a)
    tails = {first: percentile(values, 0.05) for first, values in bins.items() if len(values) >= 20}
    shown = {name: value for name, value in found.metrics.items() if name.startswith("mismatch/tail/")}
    assert shown == {f"mismatch/tail/{first}": pytest.approx(tail, abs=1e-4) for first, tail in tails.items()}
    assert len(shown) >= 3
    assert found.metrics["mismatch/tail"] == pytest.approx(min(tails.values()), abs=1e-4)
    assert min(tails.values()) < 0.95
    budgets = {name: value for name, value in found.metrics.items() if name.startswith("schedule/")}
    if sparsity is SELECTING:
        assert budgets == {"schedule/budget/0": 12, "schedule/budget/24": 16}
        assert found.metrics["mismatch/below_tau"] == pytest.approx(np.mean(np.array(every) < 0.7), abs=0.02)
    else:
        assert budgets == {"schedule/budget/0": 6}


def test_nothing_to_watch(engine):
    for monitor in (
        Monitor(watch(8), DENSE, engine.acceptance, LONGEST),
        Monitor(watch(0), SELECTING, engine.acceptance, LONGEST),
    ):
        rollouts = rollouts_of(engine, monitor)
        assert all(r.hidden is None for r in rollouts)
        assert monitor.step(rollouts).metrics == {}
    assert Monitor(watch(8), DENSE, engine.acceptance, LONGEST).recommended is DENSE


def watch(rollouts: int) -> MonitorSettings:
    return MonitorSettings(rollouts=rollouts)


def control(**changes) -> ControlSettings:
    settings = {
        "tau": 0.97,
        "enabled": True,
        "on_violation": "adapt",
        "false_alarm_steps": 2.0,
        "patience": 100,
        "margin": 0.02,
        "ladder": (12, 16, 24, 36),
    }
    return ControlSettings(**(settings | changes))


@pytest.mark.slow
def test_budgets_rise_until_the_tail_is_held(engine):
    """The engine generates under the schedule in force, α comes back, and the schedule ends where the tail is."""
    monitor = Monitor(watch(12), SELECTING, engine.acceptance, LONGEST, control())
    seen = [monitor.recommended.select.budget.budgets]
    events = []
    for seed in range(12):
        events += monitor.step(rollouts_of(engine, monitor, seed, n=1)).events
        seen.append(monitor.recommended.select.budget.budgets)
    assert seen[0] == SCHEDULE.budgets
    assert all(b <= a for earlier, later in pairwise(seen) for b, a in zip(earlier, later))
    assert seen[-1][-1] > SCHEDULE.budgets[-1]
    assert any("budget 16 -> 24" in event for event in events)
    last = monitor.step(rollouts_of(engine, monitor, 99, n=1)).metrics
    assert last["mismatch/tail/24"] > 0.9, "the last bin reads enough by now"
    assert last["schedule/version"] == monitor.controller.version > 0


def test_an_evictor_rises_everywhere(engine):
    monitor = Monitor(
        MonitorSettings(rollouts=12, bin=12), EVICTING, engine.acceptance, LONGEST, control(ladder=(6, 12, 24, 36))
    )
    assert monitor.recommended.evict.budget.budgets == (6, 6, 6)
    for seed in range(3):
        monitor.step(rollouts_of(engine, monitor, seed, n=1))
    assert min(monitor.recommended.evict.budget.budgets) > 6
    assert monitor.recommended.evict.window == 2, "the other settings stay"


def test_old_rollouts_do_not_count_against_a_new_budget(engine):
    monitor = Monitor(watch(12), SELECTING, engine.acceptance, LONGEST, control())
    stale = rollouts_of(engine, monitor, 0, n=1)
    while monitor.controller.version == 0:
        monitor.step(rollouts_of(engine, monitor, 1, n=1))
    state = json.dumps(monitor.state_dict()["controller"]["low"])
    changed = [j for j, since in enumerate(monitor.controller.bins.since) if since]
    monitor.step(stale)
    after = monitor.controller.low.log_m
    assert all((after[j] == np.array(json.loads(state))[j]).all() for j in changed)


@pytest.mark.parametrize("old", [10, 30])
def test_tokens_of_older_weights_are_reported_but_not_acted_upon(engine, old):
    """The first `old` of 30 tokens are from older weights, and bad. Only such tokens: there is nothing to act upon."""
    alpha = torch.cat([torch.full((old,), 0.1), torch.linspace(0.96, 1.0, 30)[old:]])
    monitor = Monitor(watch(12), SELECTING, lambda rollouts: [alpha] * len(rollouts), LONGEST, control())
    rollouts = rollouts_of(engine, monitor, n=1)
    for rollout in rollouts:
        rollout.spans, rollout.policy_version = [Span(old, 4), Span(30 - old, 5)], 5
    found = [monitor.step(rollouts_with_hidden(rollouts)) for _ in range(5)]
    assert all(observed.events == () for observed in found)
    assert monitor.recommended.select.budget.budgets == SCHEDULE.budgets
    expected = {"mismatch/current_alpha_p01": pytest.approx(float(alpha[10]))} if old == 10 else {}
    shown = {name: value for name, value in found[0].metrics.items() if name == "mismatch/current_alpha_p01"}
    assert shown == expected
    assert found[0].metrics["mismatch/alpha_p01"] == pytest.approx(0.1)


def rollouts_with_hidden(rollouts):
    """The same, as if they had just been sampled: a step frees the hidden states."""
    return [replace(rollout, hidden=torch.zeros(1)) for rollout in rollouts]


def test_the_same_tokens_of_present_weights_raise_the_budget(engine):
    alpha = torch.full((30,), 0.1)
    monitor = Monitor(watch(12), SELECTING, lambda rollouts: [alpha] * len(rollouts), LONGEST, control())
    rollouts = rollouts_of(engine, monitor, n=1)
    assert any(monitor.step(rollouts_with_hidden(rollouts)).events for _ in range(5))


@pytest.mark.slow
def test_dense_and_stop(engine):
    dense = Monitor(watch(12), SELECTING, engine.acceptance, LONGEST, control(on_violation="dense"))
    stop = Monitor(watch(12), SELECTING, engine.acceptance, LONGEST, control(on_violation="stop"))
    warn = Monitor(watch(12), SELECTING, engine.acceptance, LONGEST, control(on_violation="warn"))
    told = []
    for seed in range(3):
        for monitor in (dense, stop, warn):
            told += monitor.step(rollouts_of(engine, monitor, seed, n=1)).events
    assert dense.recommended.select.budget.budgets[-1] >= LONGEST
    assert stop.stopped
    assert not dense.stopped
    assert not warn.stopped
    assert warn.recommended.select.budget.budgets == SCHEDULE.budgets
    for words in ("dense from here on", "the run stops", "stays as it is"):
        assert any(words in event for event in told)


@pytest.mark.slow
def test_a_restored_monitor_continues_exactly(engine):
    one = Monitor(watch(12), SELECTING, engine.acceptance, LONGEST, control())
    for seed in range(2):
        one.step(rollouts_of(engine, one, seed, n=1))
    two = Monitor(watch(12), SELECTING, engine.acceptance, LONGEST, control())
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert two.recommended == one.recommended
    for seed in range(2, 5):
        a, b = (m.step(rollouts_of(engine, m, seed, n=1)) for m in (one, two))
        assert a == b
        assert one.recommended == two.recommended
    assert json.dumps(one.state_dict()) == json.dumps(two.state_dict())


def test_a_run_stopped_by_the_controller_continues_only_with_another_setting(engine):
    stopped = Monitor(watch(12), SELECTING, engine.acceptance, LONGEST, control(on_violation="stop"))
    while not stopped.stopped:
        stopped.step(rollouts_of(engine, stopped, 1, n=1))
    for mode in ("stop", "adapt"):
        again = Monitor(watch(12), SELECTING, engine.acceptance, LONGEST, control(on_violation=mode))
        again.load_state_dict(stopped.state_dict())
        assert again.stopped == (mode == "stop")


def test_ranks_see_each_others_tokens(engine):
    """Two ranks with half of the rollouts each reach the state of one rank with all, bit for bit."""
    whole = Monitor(watch(12), SELECTING, engine.acceptance, LONGEST, control())
    parts = [Monitor(watch(12), SELECTING, engine.acceptance, LONGEST, control()) for _ in range(2)]
    assert [sum(monitor.keep_hidden(range(16)[rank::2])) for rank, monitor in enumerate(parts)] == [6, 6]
    rollouts = rollouts_of(engine, whole, 0, n=1)
    halves = [monitor._tokens(rollouts[rank::2]) for rank, monitor in enumerate(parts)]
    for monitor in parts:
        monitor.gather = lambda mine: halves
    expected = whole.step(rollouts)
    for monitor in parts:
        found = monitor.step([])
        assert found.metrics == pytest.approx(expected.metrics)
        assert monitor.controller.low.log_m.tolist() == whole.controller.low.log_m.tolist()


def test_which_budget_is_watched():
    evict, select = EVICTING.evict, SELECTING.select
    growing = Sparsity(Evict("streaming", Schedule((8, 12), 12), window=2, sinks=1), Select("quest", 12, 4, 0))
    assert controlled(EVICTING) == "evict"
    assert controlled(Sparsity(evict, select)) == "select"
    assert controlled(growing) == "evict"
    assert schedule_of(20, None, 100) == Schedule((20,) * 8, 13, "fixed-20")
    assert schedule_of(20, 50, 100).budgets == (20, 20)
    assert schedule_of(SCHEDULE, 50, 100) is SCHEDULE


def test_the_default_ladder_has_only_valid_budgets():
    """Going down it must not end a run."""
    control = ControlSettings(enabled=True, tau=0.9)
    for text in ("h2o:2048+128,window=1024", "block-topk:512,block=128", "rkv:64+16,window=32,sinks=4"):
        sparsity = Sparsity.parse(text)
        ladder = resolve_control(control, sparsity, 8192).ladder
        assert len(ladder) > 3
        for rung in ladder:
            sparsity.with_budget(controlled(sparsity), rung)


def test_settings_of_the_controller(engine):
    assert Monitor(MonitorSettings(), SELECTING, engine.acceptance, 4000, ControlSettings()).controller is None, (
        "off by default"
    )
    built = resolve_control(ControlSettings(enabled=True), SELECTING, 4000)
    assert built.tau == 0.7, "the schedule's own"
    grid = (512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584)
    assert built.ladder[:6] == (12, 16, 20, 28, 36, 48), "a quarter apart, in blocks of 4"
    assert built.ladder[-10:] == (*grid, 4000)
    assert default_ladder(512, 4000) == (*grid, 4000)
    assert default_ladder(1000, 600) == (512, 608), "nothing beyond what is dense"
    assert default_ladder(300, 2000) == (300, 375, 468, 512, 768, 1024, 1280, 1536, 2000)
    with pytest.raises(SettingError, match=r"needs control\.tau"):
        resolve_control(ControlSettings(enabled=True), EVICTING, 4000)
    with pytest.raises(SettingError, match="the rollouts are dense"):
        resolve_control(ControlSettings(enabled=True), DENSE, 4000)
    with pytest.raises(SettingError, match=r"monitor\.rollouts=0"):
        Monitor(watch(0), SELECTING, engine.acceptance, LONGEST, control())
    both = replace(SELECTING, evict=EVICTING.evict)
    with pytest.raises(SettingError, match="the other part would stay sparse"):
        Monitor(watch(8), both, engine.acceptance, LONGEST, control(on_violation="dense"))
    with pytest.raises(SettingError, match=r"control\.ladder=.* at least 12"):
        Monitor(watch(8), SELECTING, engine.acceptance, LONGEST, control(ladder=(8, 16)))
