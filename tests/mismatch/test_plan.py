"""Planning: against brute force on synthetic calibrations; errors, growing schedules of evictors, files and charts."""

import math
import re
import shlex
from dataclasses import asdict, replace
from itertools import combinations_with_replacement
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.charts import COLOURS, DARK, LIGHT, Line, chart, ticks
from alula.errors import SettingError
from alula.mismatch.calibrate.file import Calibration, MeasuredPolicy
from alula.mismatch.plan.cost import AnalyticCost, FittedCost, Hardware, features, generation_cost
from alula.mismatch.plan.evictor_schedule import grow_schedule
from alula.mismatch.plan.plan import (
    GAP,
    Infeasible,
    Workload,
    cheapest_monotone,
    digits,
    inherit_from,
    plan,
    reachable_tau,
)
from alula.mismatch.plan.plot import plot_pareto, plot_tails
from alula.mismatch.plan.tradeoff import table, tradeoffs
from alula.mismatch.savings import Savings
from alula.mismatch.tail import BinTail, Tail
from alula.models.geometry import Geometry
from alula.sparsity.family import PolicyFamily, parse_families
from alula.sparsity.policy import DENSE, Evict, Select, Sparsity
from alula.sparsity.schedule import Schedule
from command_line import alula

GEOMETRY = Geometry(1_720_000_000, 28, 16, 8, 128)
COST = AnalyticCost(GEOMETRY, Hardware.named("h200"))
BUDGETS = (64, 128, 256, 512, 1024)
BINS, WIDTH = 6, 500
WORK = Workload(new_tokens=BINS * WIDTH, batch=64)


def make_tail(lower, prompts=50, spread=0.02) -> Tail:
    low = np.asarray(lower, dtype=float)
    counts = np.broadcast_to(np.asarray(prompts), low.shape).copy()
    return Tail(low + spread, low, low + 2 * spread, counts * 100, counts, float(low.mean() + spread), WIDTH)


def measured(family: PolicyFamily, budget: int, tail: Tail) -> MeasuredPolicy:
    return MeasuredPolicy(family, budget, tail, Savings(0.5, 0.5, 1, 1, 1, 1000, 28))


def select(block: int = 16) -> PolicyFamily:
    return PolicyFamily(Sparsity(select=Select("block-topk", 1024, block)))


EVICT = PolicyFamily(Sparsity(evict=Evict("streaming", 64, buffer=16, window=4)))


SELECT = select()


def calibration(lower, prompts=50, family=SELECT, budgets=BUDGETS) -> Calibration:
    """`lower` [budget, bin]: the lower bounds of the tails."""
    rows = [measured(family, b, make_tail(row, prompts)) for b, row in zip(budgets, lower)]
    return Calibration("some/model", make_tail(np.full(len(lower[0]), 0.93), prompts), tuple(rows))


def realistic(drop: float = 0.0) -> np.ndarray:
    """Tails that fall with length and rise with the budget."""
    ends = (np.arange(BINS) + 1) * WIDTH
    return 0.95 - drop - 0.10 * np.sqrt(np.maximum(0, np.log(ends[None] / np.array(BUDGETS)[:, None])) / 2)


def test_picks_the_cheapest_passing_budget_in_every_bin():
    lower = realistic()
    chosen = plan(calibration(lower), COST, WORK, tau=0.86)
    for j, planned in enumerate(chosen.bins):
        passing = [b for b, row in zip(BUDGETS, lower) if row[j] >= 0.86]
        assert planned.budget == min(passing)
        assert planned.tail.lower >= 0.86
    assert len(set(chosen.schedule.budgets)) > 2
    assert chosen.speedup > 1


def test_the_schedule_is_bound_to_its_settings():
    chosen = plan(calibration(realistic()), COST, WORK, tau=0.86, name="mine")
    schedule = chosen.schedule
    assert (schedule.name, schedule.model, schedule.method) == ("mine", "some/model", "block-topk")
    assert (schedule.block, schedule.width) == (16, WIDTH)
    assert schedule.notes["tau"] == 0.86
    with pytest.raises(SettingError, match="block=16"):
        schedule.check(method="block-topk", block=32)


def test_default_threshold_is_the_floor_minus_the_papers_gap():
    chosen = plan(calibration(realistic()), COST, WORK)
    assert chosen.tau == pytest.approx(0.95 - GAP)


def fastest_by_brute_force(cal: Calibration, tau: float) -> float:
    best = 0.0
    dense = generation_cost(COST, DENSE, batch=WORK.batch, prompt=0, new_tokens=WORK.new_tokens)
    for family in cal.families().values():
        for rungs in combinations_with_replacement(range(len(family)), BINS):
            if all(family[k].tail.lower[j] >= tau for j, k in enumerate(rungs)):
                schedule = Schedule(tuple(family[k].budget for k in rungs), WIDTH)
                policy = family[0].family.policy(schedule)
                sparse = generation_cost(COST, policy, batch=WORK.batch, prompt=0, new_tokens=WORK.new_tokens)
                best = max(best, sparse.tokens_per_second / dense.tokens_per_second)
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.80, 0.93))
def test_optimum_on_noisy_calibrations(seed, tau):
    """Never below tau, monotone, and as fast as the best of all monotone schedules; else truly out of reach."""
    rng = np.random.default_rng(seed)
    cal = calibration(realistic()[1:4] + 0.02 * rng.normal(size=(3, BINS)), budgets=BUDGETS[1:4])
    best = fastest_by_brute_force(cal, tau)
    if best == 0.0:
        with pytest.raises(Infeasible) as raised:
            plan(cal, COST, WORK, tau=tau)
        assert raised.value.reachable < tau
        plan(cal, COST, WORK, tau=raised.value.reachable)
        with pytest.raises(Infeasible):
            plan(cal, COST, WORK, tau=raised.value.reachable + 1e-9)
    else:
        chosen = plan(cal, COST, WORK, tau=tau)
        assert all(planned.tail.lower >= tau for planned in chosen.bins)
        assert list(chosen.schedule.budgets) == sorted(chosen.schedule.budgets)
        assert chosen.speedup == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4))
def test_cheapest_monotone_against_enumeration(seed, bins, choices):
    rng = np.random.default_rng(seed)
    cost = np.where(rng.random((bins, choices)) < 0.3, np.inf, rng.random((bins, choices)))
    every = combinations_with_replacement(range(choices), bins)
    best = min(sum(cost[j, k] for j, k in enumerate(path)) for path in every)
    chosen = cheapest_monotone(cost)
    if chosen is None:
        assert best == np.inf
    else:
        assert chosen == sorted(chosen)
        assert sum(cost[j, k] for j, k in enumerate(chosen)) == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4))
def test_reachable_against_enumeration(seed, bins, choices):
    lower = np.random.default_rng(seed).random((bins, choices))
    every = list(combinations_with_replacement(range(choices), bins))
    assert reachable_tau(lower, True) == max(min(lower[j, k] for j, k in enumerate(path)) for path in every)
    assert reachable_tau(lower, False) == max(min(lower[:, k]) for k in range(choices))


def test_out_of_reach_names_the_best_reachable_and_the_bin():
    lower = realistic(drop=0.05)
    with pytest.raises(Infeasible, match=r"tau=0\.950 .* best reachable is 0\.\d+.*2500-3000.*budget 1024") as raised:
        plan(calibration(lower), COST, WORK, tau=0.95)
    assert raised.value.reachable == pytest.approx(lower[-1, -1])
    with pytest.raises(SettingError, match=r"tau=1\.5"):
        plan(calibration(lower), COST, WORK, tau=1.5)


def test_an_empty_calibration_raises():
    empty = Calibration("m", make_tail(np.full(BINS, 0.9)), ())
    with pytest.raises(SettingError, match="no measured policy"):
        plan(empty, COST, WORK)


def with_savings(measured: MeasuredPolicy, sparse: int) -> MeasuredPolicy:
    return replace(measured, kv=replace(measured.kv, sparse=sparse, longest=210))


def test_policies_that_were_never_sparse_are_not_planned(tmp_path, capsys):
    cal = replace(calibration(realistic()), notes={"shape": asdict(GEOMETRY)})
    path, out = tmp_path / "c.json", tmp_path / "s.json"
    replace(cal, measured=tuple(with_savings(m, 0) for m in cal.measured)).save(path)
    assert alula("plan", path, "--out", out) == 2
    error = capsys.readouterr().err
    assert re.search(r"was never sparse: no sequence exceeded the budget \(the longest has 210 tokens\)", error)
    assert error.endswith("Otherwise train densely.\n")
    assert not out.exists()
    lower = np.full((3, BINS), 0.5)
    lower[2] = 0.99  # the largest budget alone holds the threshold, and it was never sparse
    cal = calibration(lower, budgets=(64, 128, 256))
    assert plan(cal, COST, WORK, tau=0.9).schedule.budgets == (256,) * BINS
    *sparse, dense = cal.measured
    with pytest.raises(Infeasible):
        plan(replace(cal, measured=(*sparse, with_savings(dense, 0))), COST, WORK, tau=0.9)


def test_thin_bins_inherit_the_neighbours_larger_budget():
    lower = realistic()
    prompts = np.array([5, 50, 10, 50, 50, 3])
    lower[:, [0, 2, 5]] = 0.0  # thin bins must not count
    chosen = plan(calibration(lower, prompts), COST, WORK, tau=0.86)
    budgets = chosen.schedule.budgets
    assert (budgets[0], budgets[2], budgets[5]) == (budgets[1], budgets[3], budgets[4])
    assert budgets[1] < budgets[3]
    assert [planned.tail is None for planned in chosen.bins] == [True, False, True, False, False, True]
    assert "lengths 0-500, 1000-1500: fewer than 20 prompts" in chosen.warnings[0]
    assert "lengths from 2500 on" in chosen.warnings[1]
    assert "untested" in chosen.warnings[1]
    assert chosen.schedule.notes["inherited_bins"] == [0, 2, 5]
    with pytest.raises(SettingError, match="more prompts"):
        plan(calibration(lower, 5), COST, WORK, tau=0.86)
    assert inherit_from(np.array([False, True, False, True, False])).tolist() == [1, 1, 3, 3, 3]


def test_lengths_past_the_calibration_give_a_warning():
    chosen = plan(calibration(realistic()), COST, Workload(new_tokens=4000, batch=8), tau=0.86)
    assert "3000-4000 were not measured" in chosen.warnings[0]


def test_the_fastest_family_wins_and_the_others_are_reported():
    better, worse = realistic(), realistic(drop=0.03)
    cal = calibration(better)
    more = [measured(select(64), b, make_tail(row)) for b, row in zip(BUDGETS, worse) if b > 200]
    more.append(measured(EVICT, 64, make_tail(realistic(drop=0.2)[0])))
    cal = replace(cal, measured=(*cal.measured, *more))
    chosen = plan(cal, COST, WORK, tau=0.86)
    assert chosen.family.block == 16
    assert len(chosen.alternatives) == 2
    assert "reaches 0." in dict(chosen.alternatives)["streaming:buffer=16:window=4"]


def test_selecting_costs_more_than_reading_where_the_cache_is_short():
    """With an expensive selection, the first bin reads everything, although a smaller budget would pass."""
    constants = dict.fromkeys(features(GEOMETRY, 1, 1, 1), 0.0) | {"fixed": 1.0, "kv_gb": 0.1, "select": 1.0}
    chosen = plan(calibration(np.full((5, BINS), 0.95)), FittedCost(GEOMETRY, constants), WORK, tau=0.9)
    assert min(chosen.schedule.budgets) >= 512
    cheap = plan(calibration(np.full((5, BINS), 0.95)), COST, WORK, tau=0.9)
    assert max(cheap.schedule.budgets) == 64


def test_an_evictor_measured_at_fixed_budgets_gets_a_fixed_budget():
    lower = realistic()
    chosen = plan(calibration(lower, family=EVICT), COST, WORK, tau=0.86)
    assert set(chosen.schedule.budgets) == {min(b for b, row in zip(BUDGETS, lower) if row.min() >= 0.86)}
    assert chosen.schedule.block is None
    assert chosen.sparse.peak_kv_bytes < chosen.dense.peak_kv_bytes


def test_memory_that_an_evictor_frees_becomes_rows():
    work = Workload(new_tokens=BINS * WIDTH, kv_bytes=8e9)
    chosen = plan(calibration(np.full((5, BINS), 0.95), family=EVICT), COST, work, tau=0.9)
    assert chosen.sparse.batch > 20 * chosen.dense.batch
    with pytest.raises(SettingError, match="either batch or kv_bytes"):
        Workload(new_tokens=10)


# Growing schedules


class Evictor:
    """A tail that also depends on the smallest earlier budget: early evictions hurt later."""

    def __init__(self, prompts=50, memory: float = 0.5) -> None:
        self.prompts, self.memory, self.calls = prompts, memory, 0

    def __call__(self, before: tuple[int, ...], j: int, budget: int) -> BinTail:
        self.calls += 1
        assert len(before) == j
        assert [*before, budget] == sorted((*before, budget))
        past = np.mean([np.log2(b) for b in before]) if before else np.log2(budget)
        effective = (1 - self.memory) * np.log2(budget) + self.memory * past
        value = 0.90 - 0.03 * np.log2(j + 1) + 0.02 * (effective - 7)
        prompts = self.prompts[j] if isinstance(self.prompts, list) else self.prompts
        return BinTail(value, value - 0.01, value + 0.01, 1000, prompts)


def sweep(measure: Evictor, tau: float) -> list[int]:
    """Smallest passing budget bin by bin, by trying them all."""
    budgets: list[int] = []
    for j in range(BINS):
        floor = budgets[-1] if budgets else 0
        budgets.append(next(b for b in BUDGETS if b >= floor and measure(tuple(budgets), j, b).lower >= tau))
    return budgets


def test_a_growing_schedule_equals_a_sweep_with_fewer_measurements():
    searched, swept = Evictor(), Evictor()
    planned_bins = grow_schedule(searched, BUDGETS, bins=BINS, width=WIDTH, tau=0.84)
    assert [planned.budget for planned in planned_bins] == sweep(swept, 0.84)
    assert len({planned.budget for planned in planned_bins}) > 1
    assert all(planned.tail.lower >= 0.84 for planned in planned_bins)
    assert searched.calls <= 3 * BINS


def test_earlier_bins_are_raised_if_one_bin_is_not_enough():
    measure, tau = Evictor(memory=0.9), 0.84
    chosen = grow_schedule(measure, BUDGETS, bins=BINS, width=WIDTH, tau=tau)
    budgets = [planned.budget for planned in chosen]
    assert budgets == sorted(budgets)
    for j, b in enumerate(budgets):
        under = measure(tuple(budgets[:j]), j, b)
        assert under.lower >= tau
        assert chosen[j].tail == under, "the reported tail was measured under the resulting schedule"
        smaller = [c for c in BUDGETS if (budgets[j - 1] if j else 0) <= c < b]
        if smaller and j == BINS - 1:
            assert measure(tuple(budgets[:j]), j, smaller[-1]).lower < tau, "one rung less is not enough"
    with pytest.raises(StopIteration):
        sweep(Evictor(memory=0.9), tau)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.3, 0.9), st.floats(0, 0.3))
def test_a_growing_schedule_holds_tau_under_noise(seed, tau, noise):
    """Noise violates the assumption that tails grow with budgets; the result still holds tau in every bin."""
    plain = Evictor(memory=0.9)

    def noisy(before: tuple[int, ...], j: int, budget: int) -> BinTail:
        rng = np.random.default_rng([seed, j, *before, budget])
        lower = plain(before, j, budget).lower + noise * rng.standard_normal()
        return BinTail(lower, lower, lower, 1000, 50)

    try:
        chosen = grow_schedule(noisy, BUDGETS, bins=BINS, width=WIDTH, tau=tau)
    except Infeasible:
        return
    budgets = tuple(planned.budget for planned in chosen)
    assert list(budgets) == sorted(budgets)
    for j, planned in enumerate(chosen):
        assert planned.tail == noisy(budgets[:j], j, budgets[j])
        assert planned.tail.lower >= tau


def test_a_growing_schedule_out_of_reach():
    with pytest.raises(Infeasible, match=r"tau=0\.\d+ .* lengths") as raised:
        grow_schedule(Evictor(), BUDGETS, bins=BINS, width=WIDTH, tau=0.95)
    assert raised.value.reachable < 0.95


def test_thin_bins_of_a_growing_schedule_inherit():
    measure = Evictor(prompts=[5, 50, 50, 5, 50, 5])
    planned_bins = grow_schedule(measure, BUDGETS, bins=BINS, width=WIDTH, tau=0.84)
    budgets = [planned.budget for planned in planned_bins]
    assert (budgets[0], budgets[3], budgets[5]) == (budgets[1], budgets[4], budgets[4])
    assert [planned.tail is None for planned in planned_bins] == [True, False, False, True, False, True]


# Files, tables, plots


def test_calibration_file(tmp_path):
    cal = calibration(realistic(), np.array([50, 50, 50, 50, 5, 0]))
    cal.measured[0].tail.value[-1] = np.nan
    cal = replace(cal, measured=(*cal.measured, measured(EVICT, 64, make_tail(realistic()[0]))))
    cal.save(tmp_path / "c.json")
    again = Calibration.load(tmp_path / "c.json")
    assert again.to_dict() == cal.to_dict()
    assert [(m.family, m.budget) for m in again.measured] == [(m.family, m.budget) for m in cal.measured]
    assert np.isnan(again.measured[0].tail.value[-1])
    assert again.measured[0].tail.prompts.dtype == np.int64
    assert list(tmp_path.iterdir()) == [tmp_path / "c.json"]


def test_bad_calibration_files_raise(tmp_path):
    with pytest.raises(SettingError, match="alula calibrate"):
        Calibration.load(tmp_path / "none.json")
    for text in ("{", '{"version": 0}', '{"version": 1}', '{"version": 1, "measured": [{"kind": "x"}]}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(SettingError, match="calibration file"):
            Calibration.load(tmp_path / "bad.json")
    with pytest.raises(SettingError, match="the floor has"):
        Calibration("m", make_tail(np.ones(3)), (measured(select(), 64, make_tail(np.ones(4))),))


@pytest.fixture
def calibration_file(tmp_path):
    path = tmp_path / "calibration.json"
    replace(calibration(realistic()), notes={"shape": asdict(GEOMETRY)}).save(path)
    return path


def test_the_command_creates_the_folder_of_its_output(calibration_file, tmp_path):
    out = tmp_path / "no" / "such" / "s.json"
    assert alula("plan", calibration_file, "--out", out) == 0
    assert Schedule.load(out).name == "s"


def test_a_prompt_beyond_the_calibrated_lengths_raises(calibration_file, capsys):
    assert alula("plan", calibration_file, "--prompt", 10**6) == 2
    assert "--prompt 1000000: the calibration ends at" in capsys.readouterr().err


def test_a_low_dense_floor_can_be_planned(tmp_path, capsys):
    file, floor = tmp_path / "calibration.json", make_tail(np.full(BINS, 0.10))
    low = replace(calibration(realistic(drop=0.5)), floor=floor, notes={"shape": asdict(GEOMETRY)})
    low.save(file)
    assert alula("plan", file, "--tau", "0.05", "--out", tmp_path / "s.json") == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| 0.")]
    assert rows == ["0.100", "0.080", "0.060", "0.050", "0.035", "0.010"]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (PolicyFamily(Sparsity(select=Select("block-topk", 64, 4, 0))), "block-topk:{out},block=4,dense_layers=0"),
        (
            PolicyFamily(Sparsity(Evict("streaming", 2048), Select("block-topk", 64))),
            "streaming:2048+128 & block-topk:{out}",
        ),
        (EVICT, "streaming:{out}+16,window=4"),
    ],
)
def test_the_last_line_is_the_policy_to_train_with(tmp_path, capsys, family, text):
    file, out = tmp_path / "calibration.json", tmp_path / "s.json"
    replace(calibration(realistic(), family=family), notes={"shape": asdict(GEOMETRY)}).save(file)
    assert alula("plan", file, "--tau", "0.7", "--out", out) == 0
    (setting,) = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("train with: "))
    assert setting == f"sparsity={text.format(out=out)}"
    assert Sparsity.parse(setting.removeprefix("sparsity=")) == family.policy(Schedule.load(out))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch 0: must be at least 1."),
        (["--new-tokens", "0"], "--new-tokens 0: must be at least 1."),
        (["--prompt", "-1"], "--prompt -1: must be at least 0."),
        (["--batch", "4", "--kv-memory", "1GiB"], "--batch 4 and --kv-memory 1GiB: "),
        (["--out", "/proc/none/s.json"], "--out /proc/none/s.json: cannot be written ("),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_give_one_line(calibration_file, capsys, arguments, message):
    assert alula("plan", calibration_file, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "", "before the work"
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_stricter_threshold_costs_speed():
    rows = tradeoffs(calibration(realistic()), COST, WORK, taus=[0.80, 0.86, 0.87, 0.99])
    assert [row.tau for row in rows] == [0.99, 0.87, 0.86, 0.80]
    assert rows[0].plan is None
    speeds = [row.plan.speedup for row in rows[1:]]
    assert speeds == sorted(speeds)
    text = table(rows)
    assert "out of reach" in text.splitlines()[2]
    assert f"{speeds[0]:.2f}x" in text.splitlines()[3]
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_thresholds_have_as_many_digits_as_tell_them_apart():
    cal = calibration(np.full((len(BUDGETS), BINS), 0.9999996))
    with pytest.raises(Infeasible, match=r"tau=0\.9999999 is .* best reachable is 0\.9999996, .* bound 0\.9999996 "):
        plan(cal, COST, WORK, tau=0.9999999)
    lines = table(tradeoffs(cal, COST, WORK, taus=[0.86, 0.9999996, 0.9999999])).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["0.9999999", "0.9999996", "0.860"]
    assert "best reachable 0.9999996" in lines[0]


def test_charts_are_valid_svg():
    cal = calibration(realistic(), np.array([50, 50, 50, 50, 50, 5]))
    chosen = plan(cal, COST, WORK, tau=0.86)
    tails = ElementTree.fromstring(plot_tails(cal, chosen))
    space = {"s": "http://www.w3.org/2000/svg"}
    assert len(tails.findall("s:polyline", space)) == len(BUDGETS) + 3  # the floor, tau and the plan
    assert len(tails.findall("s:circle", space)) == 5  # the thin bin has no tail
    assert len(tails.findall("s:polygon", space)) == 1
    pareto = ElementTree.fromstring(plot_pareto(tradeoffs(cal, COST, WORK, taus=[0.8, 0.86])))
    assert len(pareto.findall("s:circle", space)) == 2


def drawn_strokes(svg: str) -> tuple[ElementTree.Element, list[tuple[str, str | None]]]:
    root = ElementTree.fromstring(svg)
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    return root, [(line.get("stroke"), line.get("stroke-dasharray")) for line in lines]


def test_the_legend_of_many_long_policies_fits_and_is_distinct():
    methods = "rkv:buffer=64:window=16:sinks=2:mix=0.25,snapkv:budget=2k:window=16:protect_prompt=true&block-topk"
    tail = calibration(realistic(), np.full(6, 50)).floor
    curves = [
        measured(family, budget, tail)
        for family in parse_families(methods, (16, 32))
        for budget in range(512, 512 + 16 * 18, 16)
    ]
    root, strokes = drawn_strokes(plot_tails(Calibration("m", tail, tuple(curves))))
    assert len(set(strokes)) == len(curves) + 1
    *_, width, height = map(float, root.get("viewBox").split())
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    for text in texts:
        if text.get("text-anchor") == "start":
            assert float(text.get("x")) + 6.8 * len(text.text) < width, "a wide font has 6.8 units a letter"
            assert float(text.get("y")) < height
    positions = [(t.get("x"), t.get("y")) for t in texts]
    assert len(set(positions)) == len(positions)
    words = [t.text for t in texts]
    assert words.count("512") == 3, "one in each family"
    assert words[words.index("512") - 2 : words.index("512")] == ["rkv:buffer=64:window=16:sinks=2:", "mix=0.25"]


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("background", [LIGHT, DARK])
def test_curves_are_seen_on_light_and_dark_backgrounds(colour, background):
    lower, higher = sorted((luminance(colour), luminance(background)))
    assert (higher + 0.05) / (lower + 0.05) >= 3


def test_a_chart_follows_the_colour_scheme_and_no_band_covers_a_curve():
    lines = [Line(name, [0, 1], [1, 2], [0, 1], [2, 3]) for name in "ab"]
    svg = chart("t", "x", "y", lines)
    assert "prefers-color-scheme: dark" in svg
    assert 'fill="white"' not in svg
    assert svg.rindex("<polygon") < svg.index("<polyline")


def test_an_axis_of_names():
    drawn = ElementTree.fromstring(chart("t", "", "y", [Line("a", [0, 2], [0.1, 0.3])], x_names=["p", "q & r", "s"]))
    names = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [name for name in names if name in ("p", "q & r", "s")] == ["p", "q & r", "s"]
    assert "1.5" not in names, "no numbers on the axis"


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e4, 1e4), st.floats(0, 1e4))
def test_ticks_enclose(low, span):
    marks = ticks(low, low + span)
    assert marks[0] <= low + 1e-6 * max(1, abs(low))
    assert marks[-1] >= low + span - 1e-6 * max(1, abs(low) + span)
    assert 2 <= len(marks) <= 13


def test_decimals_tell_thresholds_apart():
    assert digits(0.86, [0.85]) == 3
    assert digits(0.86, [0.86 - 5e-5]) == 5
    assert digits(0.86, [-math.inf]) == 3, "no budget was measured in some bin"
    assert digits(0.86, [0.86]) == 3
