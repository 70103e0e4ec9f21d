"""The controller in simulation: a drifting model, tokens clustered by prompt, thinning bins, delay."""

import json
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.errors import SettingError
from alula.mismatch.control.controller import BudgetController
from alula.mismatch.control.sequential_test import SequentialTest
from alula.settings import ControlSettings
from alula.sparsity.schedule import Schedule

BINS, WIDTH, PROMPTS = 10, 80, 32
TAU, MARGIN = 0.86, 0.03
LADDER = tuple(16 * p for p in (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256))
BAND = 0.03
"""What the controller is held to, with these few prompts per step: a true tail at most this far below tau."""


class World:
    """A policy whose true tail is known: tail[j] = ceiling − slope·log2(length/budget) − drift.

    Per prompt, and per prompt and bin, a Beta share of the tokens is touched, on average a quarter, and a touched
    token has α = 1 − Exp(d); with d = (1 − tail)/log 5 the pooled 5th percentile is the tail exactly. Fewer
    prompts reach the later bins.
    """

    def __init__(self, seed: int, forward: bool = False) -> None:
        self.rng, self.forward = np.random.default_rng(seed), forward
        self.reach = np.linspace(1.0, 0.35, BINS)

    def tails(self, budgets, drift=0.0) -> np.ndarray:
        ends = (np.arange(BINS) + 1) * 2000
        logs = np.log2(np.asarray(budgets, dtype=float))
        if self.forward:  # what was evicted earlier is missing later
            logs = 0.5 * logs + 0.5 * np.cumsum(logs) / np.arange(1, BINS + 1)
        return np.clip(0.955 - 0.025 * np.maximum(np.log2(ends) - logs, 0) - drift, 0.05, 0.99)

    def step(self, tails: np.ndarray):
        hard = self.rng.beta(0.75, 2.25, size=(PROMPTS, 1)).clip(1e-3, 1 - 1e-3)
        share = self.rng.beta(10 * hard, 10 * (1 - hard), size=(PROMPTS, BINS))
        touched = self.rng.random((PROMPTS, BINS, WIDTH)) < share[..., None]
        gap = self.rng.exponential(((1 - tails) / np.log(5))[None, :, None], size=touched.shape)
        alpha = np.where(touched, 1 - gap, 1.0)
        there = self.rng.random(PROMPTS)[:, None] < self.reach[None]
        kept = np.broadcast_to(there[..., None], alpha.shape)
        positions = np.broadcast_to(np.arange(BINS * WIDTH).reshape(1, BINS, WIDTH), alpha.shape)
        prompts = np.broadcast_to(np.arange(PROMPTS)[:, None, None], alpha.shape)
        return alpha[kept], positions[kept], prompts[kept]


LONGEST = BINS * WIDTH


def control(**changes) -> ControlSettings:
    base = {
        "tau": TAU,
        "enabled": True,
        "on_violation": "adapt",
        "margin": MARGIN,
        "ladder": LADDER,
    }
    return ControlSettings(**{**base, **changes})


def fitting(world: World, tau: float, drift: float = 0.0) -> Schedule:
    """The smallest schedule of the ladder whose true tail is at least tau in every bin."""
    budgets = [LADDER[0]] * BINS
    for j in range(BINS):
        budgets[j] = max(budgets[j], budgets[j - 1] if j else 0)
        while world.tails(budgets, drift)[j] < tau:
            budgets[j] = LADDER[LADDER.index(budgets[j]) + 1]
            budgets[j + 1 :] = [max(b, budgets[j]) for b in budgets[j + 1 :]]
    return Schedule(tuple(budgets), WIDTH, name="s")


def simulate(world: World, controller: BudgetController, drifts, delay: int = 2):
    """True tails and budgets at every step; the observation of a step arrives `delay` steps later."""
    pending, tails, budgets, events = deque(), [], [], []
    for drift in drifts:
        now = world.tails(controller.schedule.budgets, drift)
        pending.append((world.step(now), controller.version))
        if len(pending) > delay:
            (alpha, positions, prompts), version = pending.popleft()
            events.append(controller.observe(alpha, positions, prompts, version))
        tails.append(now)
        budgets.append(controller.schedule.budgets)
    return np.array(tails), np.array(budgets), events


def turns(budgets: np.ndarray) -> int:
    """The most changes of direction of any bin's budget."""
    most = 0
    for row in budgets.T:
        moves = np.sign(np.diff(row))
        moves = moves[moves != 0]
        most = max(most, int((np.diff(moves) != 0).sum()))
    return most


def test_the_simulated_tail_is_the_true_one():
    world = World(0)
    tails = world.tails([1024] * BINS)
    pooled = [world.step(tails) for _ in range(60)]
    alpha, positions = (np.concatenate([p[i] for p in pooled]) for i in (0, 1))
    found = [np.quantile(alpha[positions // WIDTH == j], 0.05) for j in range(BINS)]
    assert found == pytest.approx(tails, abs=0.01)


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.slow
def test_a_drifting_model_is_held_at_tau(forward):
    """The model gets worse by 0.06, then better again by 0.04; selectors and evictors alike."""
    world = World(1, forward)
    schedule = fitting(world, TAU)
    controller = BudgetController(schedule, control(), "evict" if forward else "select", LONGEST)
    drifts = np.concatenate(
        [np.zeros(40), np.linspace(0, 0.06, 240), np.full(100, 0.06), np.linspace(0.06, 0.02, 60), np.full(130, 0.02)]
    )
    tails, budgets, _ = simulate(world, controller, drifts)
    unheld = np.array([world.tails(schedule.budgets, drift) for drift in drifts])
    assert (unheld < TAU - BAND).mean() > 0.3
    assert (tails >= TAU - BAND).mean() >= 0.99
    assert tails.min() >= TAU - BAND - 0.01
    assert (np.diff(budgets, axis=1) >= 0).all()
    assert turns(budgets) <= 2


def test_a_budget_that_is_too_large_falls_and_rests():
    world = World(2)
    controller = BudgetController(Schedule((4096,) * BINS, WIDTH), control(), "select", LONGEST)
    tails, budgets, events = simulate(world, controller, np.zeros(500))
    assert budgets[-1][0] < 4096 / 4
    assert (tails >= TAU - BAND).mean() >= 0.995
    assert turns(budgets) <= 2
    changes = [i for i, found in enumerate(events) if found]
    assert sum(i >= 350 for i in changes) <= 5
    reference = fitting(world, TAU).budgets
    dearer = [LADDER.index(b) - LADDER.index(r) for b, r in zip(budgets[-1], reference)]
    assert max(dearer) <= 4


@pytest.mark.slow
def test_rungs_wider_than_the_margin_do_not_make_it_swing():
    """One rung is too small, the next so large that it invites a fall: ever rarer tries, not a cycle."""
    world, ladder = World(8), (256, 2048, 16384)
    controller = BudgetController(Schedule((2048,) * BINS, WIDTH), control(ladder=ladder), "select", LONGEST)
    _, budgets, events = simulate(world, controller, np.zeros(600))
    tries = [i for i, found in enumerate(events) if any(event.action == "fall" for event in found)]
    assert len(tries) >= 2
    assert turns(budgets) <= 7
    late = sum(i >= 300 for i in tries)
    assert late <= len(tries) - late


def test_an_evictors_budgets_fall_only_where_every_later_bin_agrees():
    world = World(3, forward=True)
    controller = BudgetController(Schedule((4096,) * BINS, WIDTH), control(), "evict", LONGEST)
    tails, budgets, _ = simulate(world, controller, np.zeros(400))
    assert budgets[-1].sum() < budgets[0].sum()
    assert (tails >= TAU - BAND).mean() >= 0.99
    assert (np.diff(budgets, axis=1) >= 0).all()


@pytest.mark.parametrize("rate", [30.0, 200.0])
@pytest.mark.slow
def test_false_alarms_are_as_rare_as_stated(rate):
    """The worst case that is no violation: every bin's tail exactly at tau. At most one alarm per `rate` steps."""
    steps, runs, alarms = 150, 8, 0
    for seed in range(runs):
        world = World(100 + seed)
        controller = BudgetController(
            Schedule((512,) * BINS, WIDTH), control(false_alarm_steps=rate, on_violation="warn"), "select", LONGEST
        )
        for _ in range(steps):
            alarms += bool(controller.observe(*world.step(np.full(BINS, TAU))))
    expected = steps * runs / rate
    assert alarms <= expected + 2 * np.sqrt(expected)


def test_a_clear_violation_is_found_at_once():
    world = World(5)
    controller = BudgetController(Schedule((512,) * BINS, WIDTH), control(on_violation="warn"), "select", LONGEST)
    first = next(i for i in range(50) if controller.observe(*world.step(np.full(BINS, TAU - 0.05))))
    assert first <= 5


def test_tokens_as_if_independent_would_ring_falsely():
    """The reason for betting per prompt: a one-sided binomial test over tokens, at a rate of 1 in 1000."""
    world, rings = World(6), 0
    for _ in range(100):
        alpha, positions, _ = world.step(np.full(BINS, TAU))
        inside = alpha[positions // WIDTH == 3]
        rings += (inside < TAU).sum() > 0.05 * len(inside) + 3.09 * np.sqrt(0.05 * 0.95 * len(inside))
    assert rings >= 5


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
@pytest.mark.slow
def test_budgets_stay_monotone_and_bounded_whatever_is_observed(seed, forward):
    rng = np.random.default_rng(seed)
    start = tuple(sorted(rng.choice(LADDER, BINS).tolist()))
    controller = BudgetController(
        Schedule(start, WIDTH), control(false_alarm_steps=1, patience=1), "evict" if forward else "select", LONGEST
    )
    world = World(seed)
    for _ in range(12):
        before = controller.schedule.budgets
        controller.observe(*world.step(rng.uniform(0.6, 0.98, BINS)))
        after = controller.schedule.budgets
        assert list(after) == sorted(after)
        assert min(after) >= LADDER[0]
        assert max(after) <= LADDER[-1]
        for old, new in zip(before, after):
            assert new >= old or LADDER.index(old) - LADDER.index(new) == 1


def bad_bin(controller: BudgetController, bad: int, prompts: int = 64, version=None):
    """Every token of one bin is below tau, every other token is at 1."""
    positions = np.tile(np.arange(BINS * WIDTH), prompts)
    alpha = np.where(positions // WIDTH == bad, 0.5, 1.0)
    return controller.observe(alpha, positions, np.repeat(np.arange(prompts), BINS * WIDTH), version)


def test_a_selector_raises_the_bin_an_evictor_the_earlier_ones_too():
    budgets = (128,) * 4 + (512,) * 6
    selector = BudgetController(Schedule(budgets, WIDTH), control(), "select", LONGEST)
    bad_bin(selector, 2)
    assert selector.schedule.budgets == (128, 128, 192, 192, *budgets[4:])
    evictor = BudgetController(Schedule(budgets, WIDTH), control(), "evict", LONGEST)
    bad_bin(evictor, 2)
    assert evictor.schedule.budgets == (192, 192, 192, 192, *budgets[4:])


def test_observations_of_an_older_budget_do_not_count():
    controller = BudgetController(Schedule((128,) * BINS, WIDTH), control(), "select", LONGEST)
    bad_bin(controller, 0)
    raised = controller.schedule.budgets
    for _ in range(5):
        bad_bin(controller, 0, version=0)
    assert controller.schedule.budgets == raised
    bad_bin(controller, 0, version=1)
    assert controller.schedule.budgets > raised


@pytest.mark.parametrize("kind", ["select", "evict"])
def test_lengths_that_no_answer_has_do_not_keep_budgets_up(kind):
    """Prompts are longer than the first three bins, so no token is ever sampled there."""
    controller = BudgetController(Schedule((512,) * BINS, WIDTH), control(patience=1), kind, LONGEST)
    positions = np.tile(np.arange(3 * WIDTH, LONGEST), 64)
    prompts = np.repeat(np.arange(64), 7 * WIDTH)
    fallen = set()
    for _ in range(200):
        fallen |= {event.bin for event in controller.observe(np.ones(len(positions)), positions, prompts)}
        assert list(controller.schedule.budgets) == sorted(controller.schedule.budgets)
    assert controller.schedule.budgets == (LADDER[0],) * BINS
    assert fallen == set(range(3, BINS)), "what nobody uses is not reported"


def test_the_top_of_the_ladder_is_reported():
    controller = BudgetController(Schedule((4096,) * BINS, WIDTH), control(), "select", LONGEST)
    event = bad_bin(controller, 4)[0]
    assert (event.action, event.bin) == ("saturated", 4)
    assert "cannot rise" in event.describe(controller.control, 0.05, WIDTH)


def test_off_by_default_and_the_other_reactions():
    def made(**changes) -> BudgetController:
        return BudgetController(Schedule((128,) * BINS, WIDTH, block=16), control(**changes), "select", LONGEST)

    off = BudgetController(Schedule((128,) * BINS, WIDTH), ControlSettings(tau=TAU), "select", LONGEST)
    assert bad_bin(off, 3) == []
    assert off.schedule.budgets == (128,) * BINS

    warned = made(on_violation="warn")
    (event,) = bad_bin(warned, 3)
    assert event.action == "warn"
    assert event.share == 1.0
    assert "100.0% of the tokens are below tau=0.860" in event.describe(warned.control, 0.05, WIDTH)
    assert warned.schedule.budgets == (128,) * BINS

    dense = made(on_violation="dense")
    assert {event.action for event in bad_bin(dense, 3)} == {"dense"}
    assert dense.schedule.budgets == (128,) * 3 + (BINS * WIDTH,) * 7
    evictor = BudgetController(Schedule((128,) * BINS, WIDTH), control(on_violation="dense"), "evict", LONGEST)
    bad_bin(evictor, 3)
    assert evictor.schedule.budgets == (BINS * WIDTH,) * BINS

    stopped = made(on_violation="stop")
    assert bad_bin(stopped, 3)[0].action == "stop"
    assert stopped.stopped


def test_the_schedule_in_force_keeps_its_purpose():
    schedule = Schedule((128,) * BINS, WIDTH, name="s", model="m", method="block-topk", block=16)
    controller = BudgetController(schedule, control(), "select", LONGEST)
    assert controller.schedule is schedule
    bad_bin(controller, 0)
    now = controller.schedule
    assert (now.name, now.model, now.method, now.block) == ("s@1", "m", "block-topk", 16)


def test_a_resumed_controller_continues_exactly():
    world = World(7)
    schedule = fitting(world, TAU)
    observations = [world.step(world.tails(schedule.budgets, 0.03)) for _ in range(30)]
    whole = BudgetController(schedule, control(), "select", LONGEST)
    first = BudgetController(schedule, control(), "select", LONGEST)
    for observation in observations[:13]:
        whole.observe(*observation)
        first.observe(*observation)
    second = BudgetController(schedule, control(), "select", LONGEST)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for observation in observations[13:]:
        assert whole.observe(*observation) == second.observe(*observation)
    assert whole.version > 0
    assert whole.state_dict() == second.state_dict()


@pytest.mark.parametrize("schedule", [Schedule((512,) * BINS, WIDTH), Schedule((64,) * BINS, 2 * WIDTH)])
def test_another_budget_or_other_bins_at_a_resume_start_afresh(schedule):
    old = BudgetController(Schedule((64,) * BINS, WIDTH), control(on_violation="stop"), "select", LONGEST)
    old.observe(*World(8).step(np.full(BINS, 0.5)))
    assert old.stopped
    new = BudgetController(schedule, control(on_violation="stop"), "select", LONGEST)
    fresh = new.state_dict()
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.schedule.budgets == schedule.budgets
    assert new.state_dict() == fresh


def test_invalid_settings_raise():
    with pytest.raises(SettingError, match=r"on_violation='adept': .*'adapt'"):
        control(on_violation="adept")
    with pytest.raises(SettingError, match="margin=0"):
        control(margin=0)
    with pytest.raises(SettingError, match="fall with length"):
        BudgetController(Schedule((256, 128), WIDTH), control(), "select", LONGEST)
    small = BudgetController(Schedule((128,) * BINS, WIDTH), control(), "select", LONGEST)
    with pytest.raises(SettingError, match="samples=1"):
        small.observe(np.ones(2 * WIDTH), np.tile(np.arange(WIDTH), 2), np.zeros(2 * WIDTH, dtype=int))


def test_evidence_is_the_average_product_of_bets():
    rng = np.random.default_rng(0)
    evidence = SequentialTest(2, 0.05, +1)
    expected = [[1.0] * len(evidence.stakes) for _ in range(2)]
    for _ in range(5):
        bins, tokens = rng.integers(0, 2, 20), rng.integers(1, 50, 20)
        below = rng.binomial(tokens, 0.1)
        evidence.add(bins, tokens, below, np.full(20, 50))
        for j in range(2):
            for s, stake in enumerate(evidence.stakes):
                wealth = max(expected[j][s], 1.0)
                for b, n, k in zip(bins, tokens, below):
                    if b == j:
                        wealth *= 1 + stake * (k - 0.05 * n) / 50
                expected[j][s] = wealth
    assert evidence.value() == pytest.approx([np.log(np.mean(row)) for row in expected])
