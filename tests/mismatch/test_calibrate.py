"""Calibration, verification and budget search with a real engine on tiny models."""

import copy
import json
import math
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from alula import Engine, Evict, Sampling, Schedule, Select, Sparsity
from alula.cli.calibrate import parse_numbers, short_enough
from alula.cli.find_budget import remarks
from alula.cli.find_budget import verdict as vetoed_verdict
from alula.cli.tails import default_budgets, write
from alula.cli.verify import undecided, verdict
from alula.data.dataset import Dataset, Example
from alula.data.load_tokenizer import attach_tokenizer
from alula.data.tasks import build
from alula.data.tasks.tokenizer import task_tokenizer
from alula.errors import RunFailed, SettingError
from alula.mismatch.calibrate import calibrate as calibrating
from alula.mismatch.calibrate.cache import CalibrationCache
from alula.mismatch.calibrate.calibrate import Grid, MeasureBin, TextSettings, calibrate
from alula.mismatch.calibrate.file import Calibration, MeasuredPolicy, tail_to_dict
from alula.mismatch.calibrate.find_budget import BudgetSearch, below_limit, budgets_to_try, find_budget
from alula.mismatch.calibrate.search import next_budgets, spread
from alula.mismatch.calibrate.verify import Verification, parse_target, policy_of, verify
from alula.mismatch.measure import Bins, cut_to_bin, measure_tails, policies_per_batch, rollouts_with_acceptance
from alula.mismatch.plan.cost import AnalyticCost, Hardware, load_cost, timing_record
from alula.mismatch.plan.plan import Workload, plan
from alula.mismatch.savings import Savings
from alula.mismatch.tail import MIN_PROMPTS, Tail
from alula.models.geometry import Geometry
from alula.models.load import load_model
from alula.models.lora import attach, init_adapter
from alula.objective.veto import Share
from alula.sparsity.evict.query_statistics import QueryStatistics
from alula.sparsity.family import PolicyFamily, parse_families
from alula.sparsity.policy import DENSE
from command_line import alula

PAGE = 4
PROMPTS = tuple(tuple(int(t) for t in row) for row in np.random.default_rng(0).integers(2, 96, (32, 6)))
TEXT = TextSettings(PROMPTS, length=36, seed=3)
BINS = Bins(width=12, count=3, resamples=100)
SELECT = PolicyFamily(Sparsity(select=Select("block-topk", 64, PAGE, dense_layers=0)))
EVICT = PolicyFamily(Sparsity(evict=Evict("streaming", 64, buffer=2, window=2, sinks=1)))


@pytest.fixture(scope="module")
def loaded():
    return oracle.custom_model(3, layers=2)


@pytest.fixture(scope="module")
def engine(loaded):
    return Engine(loaded, page=PAGE, kv_memory="8MiB", max_rows=96, lookahead=4)


@pytest.fixture(scope="module")
def text(engine):
    return rollouts_with_acceptance(engine, PROMPTS, TEXT.sampling, DENSE)[0]


def literal_tails(rollouts, alphas, width: int, bins: int) -> list[float]:
    """The 5th percentile by a sort per bin: the smallest value with 5 % of the tokens at or below it."""
    by_bin: list[list[float]] = [[] for _ in range(bins)]
    for rollout, alpha in zip(rollouts, alphas):
        for i, value in enumerate(alpha.tolist()):
            by_bin[min((len(rollout.prompt_ids) + i) // width, bins - 1)].append(value)
    return [sorted(v)[max(0, int(np.ceil(0.05 * len(v))) - 1)] if v else float("nan") for v in by_bin]


def literal_savings(engine, text, policy) -> Savings:
    """KV savings counted step by step: tokens of the dense policy, tokens held, tokens read by each layer."""
    held, read, dense, evictions, sparse, layers = 0.0, 0.0, 0.0, 0, 0, engine.geometry.layers
    for rollout in text:
        cached, here, steps = len(rollout.prompt_ids), [], len(rollout) - 1
        evicted = 0
        for i in range(steps):
            if policy.evict and cached >= policy.evict.budget + policy.evict.buffer:
                cached, evicted = policy.evict.budget, evicted + 1
            cached += 1
            chosen = cached
            if policy.select and -(-cached // PAGE) > -(-policy.select.budget // PAGE):
                chosen = policy.select.budget - PAGE + (cached - 1) % PAGE + 1  # the last page may not be full
            by_layer = [cached if policy.select and j < policy.select.dense_layers else chosen for j in range(layers)]
            here.append((cached, sum(by_layer) / layers, len(rollout.prompt_ids) + i + 1))
        held, read, dense = (x + len(rollout) * y for x, y in zip((held, read, dense), np.mean(here, 0)))
        evictions += evicted
        sparse += evicted > 0 or any(chosen < cached for cached, chosen, _ in here)
    longest = max(len(r.prompt_ids) + len(r) for r in text)
    open_layers = layers - (policy.select.dense_layers if policy.select else 0)
    return Savings(
        pytest.approx(1 - held / dense),
        pytest.approx(1 - read / dense),
        evictions,
        sparse,
        len(text),
        longest,
        open_layers,
    )


@pytest.mark.slow
def test_tails_of_several_policies_in_one_batch(engine, text):
    policies = [SELECT.policy(12), SELECT.policy(20), EVICT.policy(8), DENSE]
    results = {}
    tails = measure_tails(engine, text, policies, BINS, done=lambda i, *result: results.__setitem__(i, result))
    for policy, tail in zip(policies, tails):
        alphas = engine.acceptance(text, policy)
        np.testing.assert_allclose(tail.value, literal_tails(text, alphas, 12, 3), atol=2e-5)
        assert tail.tokens.sum() == sum(map(len, text))
        assert tail.prompts.max() == len(PROMPTS)
    assert list(results) == sorted(results), "policies finish in order, so a kill loses little"
    assert [results[i][0] for i in range(4)] == tails
    for policy, (_, kv) in zip(policies, results.values()):
        assert kv == literal_savings(engine, text, policy)
    assert results[0][1].sparse > results[1][1].sparse > results[3][1].sparse == 0
    half = Sparsity(select=Select("block-topk", 12, PAGE, dense_layers=1))
    measure_tails(engine, text, [half], BINS, done=lambda i, *result: results.__setitem__("half", result))
    assert results["half"][1] == literal_savings(engine, text, half)
    assert results["half"][1].not_read == pytest.approx(results[0][1].not_read / 2), (
        "one of two layers reads everything"
    )
    assert tails[3].value.min() > 1 - 1e-5
    assert tails[0].overall < tails[1].overall < 0.99


def test_acceptance_of_sampled_rollouts_equals_decoding_them_again(engine):
    policy, sampling = EVICT.policy(8), Sampling(n=2, max_new_tokens=30, seed=5)
    sampled = BINS.tail(*rollouts_with_acceptance(engine, PROMPTS, sampling, policy)[:2])
    rollouts = engine.generate([list(p) for p in PROMPTS], sampling, policy)
    expected = BINS.tail(rollouts, engine.acceptance(rollouts, policy))
    assert sampled.tokens.tolist() == expected.tokens.tolist()
    assert sampled.prompts.tolist() == expected.prompts.tolist()
    for name in ("value", "lower", "upper"):
        np.testing.assert_allclose(getattr(sampled, name), getattr(expected, name), atol=1e-4)


def test_policies_per_batch(engine, text):
    assert policies_per_batch(engine, text, evicts=True) == 96 // 32
    small = Engine(oracle.custom_model(3), page=PAGE, kv_memory="1MiB", max_rows=96)
    held = sum(len(r.prompt_ids) + len(r) for r in text)
    assert policies_per_batch(small, text, evicts=False) == max(1, small.pool.usable * PAGE // held)
    assert policies_per_batch(engine, [*text] * 50, evicts=True) == 1


def test_cut_to_bin_keeps_the_tokens_before_its_end(text):
    for rollout, original in zip(cut_to_bin(text, 12, 24), [r for r in text if len(r.prompt_ids) + len(r) > 12]):
        assert rollout.token_ids == original.token_ids[: 24 - len(original.prompt_ids)]
        assert len(rollout.prompt_ids) + len(rollout) <= 24
    assert cut_to_bin(text, 36, 48) == []


# -- search -------------------------------------------------------------------------------------------------


def made_tail(lower) -> Tail:
    low = np.asarray(lower, float)
    counts = np.full(len(low), MIN_PROMPTS)
    return Tail(low, low, low, counts, counts, float(low.mean()), 12)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3))
def test_search_finds_every_smallest_passing_budget(seed, rungs, bins, together, targets):
    rng = np.random.default_rng(seed)
    ladder = sorted(rng.choice(1000, rungs, replace=False).tolist())
    truth = {b: made_tail(row) for b, row in zip(ladder, np.sort(rng.random((rungs, bins)), 0))}
    taus, known = rng.random(targets).tolist(), {}
    while budgets := next_budgets(ladder, known, taus, together):
        assert len(budgets) <= together
        assert not set(budgets) & set(known)
        known |= {b: truth[b] for b in budgets}
    for j in range(bins):
        for tau in taus:
            smallest = min((b for b in ladder if truth[b].lower[j] >= tau), default=None)
            assert smallest is None or smallest in known
            assert min((b for b in known if known[b].lower[j] >= tau), default=None) == smallest


def test_search_measures_few_budgets_and_sweep_all():
    ladder = list(range(100, 132))
    truth = {b: made_tail([(b - 100) / 32]) for b in ladder}
    for sweep, most in ((False, 6), (True, 32)):
        known: dict[int, Tail] = {}
        while budgets := next_budgets(ladder, known, [0.4], 1, sweep=sweep):
            known |= {b: truth[b] for b in budgets}
        assert len(known) <= most
        assert len(known) == 32 or not sweep


def test_bins_without_enough_prompts_are_not_searched():
    few = replace(made_tail([0.1, 0.9]), prompts=np.array([3, MIN_PROMPTS]))
    assert next_budgets([1, 2, 3], {2: few}, [0.5], 9) == [1]


def test_spread():
    assert spread([1, 2, 3], 5) == [1, 2, 3]
    assert spread(list(range(9)), 1) == [4]
    assert spread(list(range(10)), 3) == [2, 5, 7]


# -- calibration --------------------------------------------------------------------------------------------


def run(engine, path, grid, text=TEXT, bins=BINS, **options):
    return calibrate(lambda page: engine, text, grid, bins, path, **options)


@pytest.mark.slow
def test_calibration_against_direct_measurement(engine, text, tmp_path):
    grid = Grid((SELECT,), (12, 16, 24, 36), sweep=True)
    calibration = run(engine, tmp_path / "work.json", grid)
    assert [m.budget for family in calibration.families().values() for m in family] == [12, 16, 24, 36]
    expected = measure_tails(engine, text, [SELECT.policy(b) for b in grid.budgets], BINS)
    for one, tail in zip(sorted(calibration.measured, key=lambda m: m.budget), expected):
        np.testing.assert_allclose(one.tail.value, tail.value, atol=1e-5)
    assert calibration.model == engine.name
    [floor] = measure_tails(engine, text, [DENSE], BINS)
    np.testing.assert_allclose(calibration.floor.value, floor.value, atol=1e-5)
    assert calibration.floor.overall > 1 - 1e-5
    assert calibration.notes["tokens"] == sum(map(len, text))
    assert Geometry(**calibration.notes["shape"]) == Geometry.of(engine.model)


@pytest.mark.slow
def test_calibration_on_own_rollouts(engine, text, tmp_path):
    """Each budget's tail and savings are those of what it samples itself."""
    own = replace(TEXT, own=True)
    grid = Grid((SELECT, EVICT), (12, 20), growing=False, sweep=True)
    calibration = run(engine, tmp_path / "work.json", grid, own)
    assert calibration.notes["text"] == "own"
    on_dense = measure_tails(engine, text, [one.policy for one in calibration.measured], BINS)
    assert len(on_dense) == 4
    for one, dense in zip(calibration.measured, on_dense):
        rollouts, alphas, _ = rollouts_with_acceptance(engine, PROMPTS, own.sampling, one.policy)
        np.testing.assert_allclose(one.tail.value, literal_tails(rollouts, alphas, 12, 3), atol=1e-5)
        assert one.kv == Savings.of(rollouts, [r.kv for r in rollouts], one.policy, 2)
        assert not np.allclose(one.tail.value, dense.value, atol=1e-3), "own rollouts are other text"
    assert same_numbers(calibration, run(engine, tmp_path / "work.json", grid, own))
    with pytest.raises(SettingError, match="text=own, not text=dense"):
        run(engine, tmp_path / "work.json", grid)


@pytest.mark.slow
def test_growing_schedule_on_own_rollouts(engine, tmp_path):
    """Its tails are those of rollouts under the whole schedule, though each bin was measured before the later budgets
    were known."""
    own = replace(TEXT, own=True)
    grid = Grid((EVICT,), (4, 8, 12, 20, 36), taus=(0.6,))
    [grown] = run(engine, tmp_path / "work.json", grid, own).growing
    assert len(set(grown.budgets)) > 1
    policy = EVICT.policy(Schedule(grown.budgets, 12))
    expected = literal_tails(*rollouts_with_acceptance(engine, PROMPTS, own.sampling, policy)[:2], 12, 3)
    assert [tail.value for tail in grown.tails] == pytest.approx(expected, abs=1e-5)


class Killed(Exception):
    pass


BOTH = Grid((SELECT, EVICT), (12, 20, 36), taus=(0.8,))


@pytest.fixture(scope="module")
def uninterrupted(engine, tmp_path_factory):
    return run(engine, tmp_path_factory.mktemp("uninterrupted") / "work.json", BOTH)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.slow
def test_a_killed_calibration_resumes(after, uninterrupted, engine, tmp_path, monkeypatch):
    """Killed at any write of the work file: the result is the same, and nothing is measured twice."""
    write, writes = CalibrationCache._write, 0

    def dying(self):
        nonlocal writes
        if writes == after:
            raise Killed
        writes += 1
        write(self)

    monkeypatch.setattr(CalibrationCache, "_write", dying)
    with pytest.raises(Killed):
        run(engine, tmp_path / "work.json", BOTH)
    monkeypatch.setattr(CalibrationCache, "_write", write)
    measured_before = set(CalibrationCache.open(tmp_path / "work.json", engine, TEXT, BINS).measured)
    again, real = [], calibrating.measure_tails

    def counted(engine, text, policies, bins, **options):
        again.extend(policies)
        return real(engine, text, policies, bins, **options)

    monkeypatch.setattr(calibrating, "measure_tails", counted)
    resumed = run(engine, tmp_path / "work.json", BOTH)
    assert not {family.policy(budget) for family, budget in measured_before} & set(again)
    assert same_numbers(resumed, uninterrupted)


def same_numbers(a: Calibration, b: Calibration) -> bool:
    """Equal up to rounding, which depends on batch composition."""

    def numbers_of(data):
        if isinstance(data, dict):
            return [x for name in sorted(data) for x in numbers_of(data[name])]
        if isinstance(data, list):
            return [x for item in data for x in numbers_of(item)]
        return [data]

    one, other = (numbers_of(x.to_dict()) for x in (a, b))
    return len(one) == len(other) and all(
        abs(x - y) < 1e-3 if isinstance(x, float) and isinstance(y, float) else x == y for x, y in zip(one, other)
    )


def test_further_budgets_are_added(engine, tmp_path, monkeypatch):
    path = tmp_path / "work.json"
    run(engine, path, Grid((SELECT,), (12, 24), sweep=True))
    new, real = [], calibrating.measure_tails
    monkeypatch.setattr(calibrating, "measure_tails", lambda e, t, p, b, **o: new.extend(p) or real(e, t, p, b, **o))
    calibration = run(engine, path, Grid((SELECT,), (12, 16, 24), sweep=True))
    assert new == [SELECT.policy(16)]
    assert len(calibration.measured) == 3


def test_work_file_of_another_calibration_raises(engine, tmp_path):
    path = tmp_path / "work.json"
    CalibrationCache.open(path, engine, TEXT, BINS).add_text([], made_tail([0.9]))
    with pytest.raises(SettingError, match="seed=3, not seed=4"):
        CalibrationCache.open(path, engine, replace(TEXT, seed=4, prompts=PROMPTS[::-1]), BINS)
    with pytest.raises(SettingError, match="bin=12"):
        CalibrationCache.open(path, engine, TEXT, replace(BINS, width=10))
    again = oracle.custom_model(3, layers=2)
    adapter = init_adapter(again.model, rank=2, alpha=4.0, targets=["all"], seed=0)
    adapter.weights["model.layers.0.self_attn.q_proj"][1].fill_(0.1)
    adapted = Engine(again, page=PAGE, kv_memory="1MiB", sparse_adapter=adapter)
    with pytest.raises(SettingError, match="adapter=none, not adapter="):
        CalibrationCache.open(path, adapted, TEXT, BINS)
    CalibrationCache.open(path, Engine(again, page=PAGE, kv_memory="1MiB"), TEXT, BINS)
    again.model.model.norm.weight.data.mul_(1.01)
    with pytest.raises(SettingError, match="weights="):
        CalibrationCache.open(path, Engine(again, page=PAGE, kv_memory="1MiB"), TEXT, BINS)
    for damaged in ("{", "[]", json.dumps({"settings": {}, "text": []}), "\xff"):
        path.write_text(damaged, encoding="latin-1")
        with pytest.raises(SettingError, match=f"work file {path}: "):
            CalibrationCache.open(path, engine, TEXT, BINS)


def test_work_file_of_another_residual_stream_raises(tmp_path):
    narrow, wide = (
        Engine.load("shape:tiny-llama", dtype="bfloat16", residual=residual, page=PAGE, kv_memory="1MiB")
        for residual in (None, "float32")
    )
    path = tmp_path / "work.json"
    CalibrationCache.open(path, narrow, TEXT, BINS).add_text([], made_tail([0.9]))
    CalibrationCache.open(path, narrow, TEXT, BINS)
    with pytest.raises(SettingError, match="residual=None, not residual=float32"):
        CalibrationCache.open(path, wide, TEXT, BINS)


@pytest.mark.slow
def test_growing_schedule_of_an_evictor(engine, text, tmp_path):
    """Each bin is measured under the budgets before it, its lower bound holds tau, and the planner can use it."""
    grid = Grid((EVICT,), (4, 8, 12, 20, 36), taus=(0.6,))
    calibration = run(engine, tmp_path / "work.json", grid)
    [grown] = calibration.growing
    assert len(set(grown.budgets)) > 1, "the schedule really grows"
    assert list(grown.budgets) == sorted(grown.budgets)
    for j, (budget, tail) in enumerate(zip(grown.budgets, grown.tails)):
        assert tail.lower >= 0.6
        last = 12 * (j + 1) if j < 2 else 99
        part, schedule = cut_to_bin(text, 12 * j, last), Schedule(grown.budgets[: j + 1], 12)
        alphas = engine.acceptance(part, EVICT.policy(schedule))
        assert tail.value == pytest.approx(literal_tails(part, alphas, 12, 3)[j], abs=1e-5)
        smaller = [b for b in grid.budgets if (grown.budgets[j - 1] if j else 0) <= b < budget]
        if smaller:
            cache = CalibrationCache.open(tmp_path / "other.json", engine, TEXT, BINS)
            cache.rollouts = text
            measured = MeasureBin(engine, EVICT, TEXT, grid.budgets, cache, BINS, False)
            assert measured(grown.budgets[:j], j, smaller[-1]).lower < 0.6, "one rung less is not enough"
    chosen = plan(
        calibration, AnalyticCost(Geometry(10**9, 2, 6, 2, 12), Hardware.named("h200")), Workload(30, batch=8), tau=0.6
    )
    assert chosen.schedule.budgets == grown.budgets
    assert chosen.family.kind == "evict"
    calibration.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json").to_dict() == calibration.to_dict()


@pytest.mark.slow
def test_an_evictor_with_a_selector(engine, text, tmp_path):
    """The selector's budget is searched with the evictor active, and the schedule is valid with that evictor only."""
    evict = Evict("streaming", 20, buffer=4, window=2, sinks=1)
    [family] = parse_families("streaming:budget=20:buffer=4:window=2:sinks=1&block-topk:dense_layers=0", (PAGE,))
    assert family.policy(12) == Sparsity(evict, Select("block-topk", 12, PAGE, 0))
    calibration = run(engine, tmp_path / "work.json", Grid((family, SELECT), (12, 16, 24, 36), sweep=True))
    for measured in calibration.families()[family]:
        expected = engine.acceptance(text, replace(SELECT.policy(measured.budget), evict=evict))
        np.testing.assert_allclose(measured.tail.value, literal_tails(text, expected, 12, 3), atol=2e-5)
    alone = calibration.families()[SELECT][-1].tail
    assert measured.tail.value[2] < alone.value[2], "the largest selection still lacks what was evicted"
    calibration.save(tmp_path / "calibration.json")
    only = [m for m in Calibration.load(tmp_path / "calibration.json").measured if m.family.evicts]
    tau = min(b.lower for b in measured.tail) - 1e-6
    cost, work = (
        AnalyticCost(Geometry.of(engine.model), Hardware.named("h200")),
        Workload(30, 6, kv_bytes=1 << 20),
    )
    chosen = plan(replace(calibration, measured=tuple(only)), cost, work, tau=tau)
    assert chosen.sparse.batch > chosen.dense.batch, "the memory that the evictor frees becomes rows"
    policy = policy_of(chosen.schedule)
    assert policy == Sparsity(evict, Select("block-topk", chosen.schedule, PAGE, 0))
    engine.check(policy)
    for other, name in ((None, "none"), (Evict("streaming", 24, buffer=4, window=2, sinks=1), "streaming:24")):
        with pytest.raises(SettingError, match=f"was planned for evict=streaming:20\\+4,.* not evict={name}"):
            engine.check(replace(policy, evict=other))
    assert "| 12-24 |" in verify(engine, chosen.schedule, policy, TEXT, tau).table()


def test_a_schedule_planned_for_one_part_raises_with_another(engine, tmp_path):
    calibration = run(engine, tmp_path / "work.json", Grid((SELECT, EVICT), (12, 36), growing=False))
    cost, work = AnalyticCost(Geometry.of(engine.model), Hardware.named("h200")), Workload(30, 6, 4)
    for kind, other in (("select", EVICT), ("evict", SELECT)):
        only = tuple(m for m in calibration.measured if m.family.kind == kind)
        policy = policy_of(plan(replace(calibration, measured=only), cost, work, tau=0.01).schedule)
        engine.check(policy)
        part = other.policy(12)
        both = Sparsity(policy.evict or part.evict, policy.select or part.select)
        with pytest.raises(
            SettingError, match=rf"was planned for {other.kind}=none, not {other.kind}={other.method}:12"
        ):
            engine.check(both)


def test_bad_settings():
    with pytest.raises(SettingError, match=r"prompts=5: .* 20 prompts"):
        TextSettings(PROMPTS[:5], 36)
    with pytest.raises(SettingError, match=r"length=6: .* 6 tokens"):
        TextSettings(PROMPTS, 6)
    with pytest.raises(SettingError, match="budget=8 "):
        Grid((SELECT,), (8, 16))
    with pytest.raises(SettingError, match="methods: "):
        Grid((), (8,))


def test_text_too_short_for_any_bin(engine, tmp_path):
    wide = Bins(width=12, count=40, resamples=20)
    cache = CalibrationCache.open(tmp_path / "work.json", engine, TEXT, wide)
    rollouts, alphas, _ = rollouts_with_acceptance(engine, PROMPTS[:3], TEXT.sampling, DENSE)
    cache.add_text(rollouts, wide.tail(rollouts, alphas))
    with pytest.raises(SettingError, match=r"bin=12: .* 20 prompts"):
        run(engine, tmp_path / "work.json", Grid((SELECT,), (12,)), bins=wide)


# -- command line pieces, files -----------------------------------------------------------------------------


def test_numbers_on_the_command_line():
    assert parse_numbers("budgets", "512, 1k") == (512, 1024)
    with pytest.raises(SettingError, match="--budgets 'a'"):
        parse_numbers("budgets", "a")
    assert parse_numbers("budgets", "1k, 64,1024,64") == (1024, 64), "each once"
    assert default_budgets(1200) == (512, 768, 1024)
    with pytest.raises(SettingError, match=r"--length 300.*512"):
        default_budgets(300)


def test_prompts_above_half_the_length_are_left_out():
    dataset = Dataset(tuple(Example("", prompt_ids=(1,) * n) for n in (5, 6, 7, 6)))
    assert [len(example.prompt_ids) for example in short_enough(dataset, 13, 3)] == [5, 6, 6]
    with pytest.raises(SettingError, match=r"^--prompts 4: only 3 of the 4 prompts .* 6 tokens, half of --length;"):
        short_enough(dataset, 13, 4)


KV = Savings(0.4, 0.5, evictions=60, sparse=30, rollouts=30, longest=36, sparse_layers=2)


def test_verification_of_a_schedule():
    notes = {"options": {"dense_layers": 1}, "tau": 0.8}
    schedule = Schedule((16, 32, 32), 12, "mine", None, "quest", 4, notes)
    assert policy_of(schedule) == Sparsity(select=Select("quest", schedule, 4, 1))
    evicting = Schedule((16, 32), 12, "mine", None, "rkv", None, {"options": {"buffer": 8}})
    assert policy_of(evicting) == Sparsity(Evict("rkv", evicting, buffer=8))
    with pytest.raises(SettingError, match=r"schedule 'schedule': .* method"):
        policy_of(Schedule((16,)))
    counts = np.array([30, 30, 5])
    tail = Tail(
        np.array([0.9, 0.7, 0.1]), np.array([0.81, 0.6, 0.0]), np.array([0.95, 0.79, 0.2]), counts, counts, 0.8, 12
    )
    result = Verification(schedule, 0.8, tail, Share(3, 30), KV)
    assert result.violated == [1], "bins with too few prompts are not tested"
    assert [result.verdict(t) for t in tail] == ["above tau", "below tau", "fewer than 20 prompts"]
    assert "| 12-24 | 32 | 0.7000 | 0.6000-0.7900 | 30 | 30 | below tau |" in result.table()
    assert result.to_dict()["tail"] == tail_to_dict(tail)
    assert not replace(result, tau=None).violated, "without tau nothing is tested"


def test_the_verdict_counts_only_tested_bins():
    schedule = Schedule((16, 32, 32), 12)

    def verdict_of(prompts, tau=0.8, upper=0.95):
        counts, numbers_ = np.array(prompts), [np.full(3, x) for x in (0.9, 0.85, upper)]
        return verdict(Verification(schedule, tau, Tail(*numbers_, counts, counts, 0.9, 12), Share(0, 30), KV))

    assert verdict_of([30, 30, 30]) == "tau 0.8000 holds."
    assert verdict_of([30, 5, 0]).startswith("tau 0.8000 holds in 1 of 3 bins;")
    assert re.fullmatch(r"tau 0\.8000 is not tested: all 3 bins .* --prompts\.", verdict_of([5, 5, 0]))
    assert verdict_of([30, 5, 30], tau=0.96) == "tau 0.9600 is violated at lengths 0-12, 24-36."
    assert verdict_of([30, 30, 30], tau=None).startswith("no tau")


def test_the_table_shows_the_worst_trusted_bin(tmp_path, capsys):
    tail = replace(made_tail([0.9, 0.8, 0.1]), prompts=np.array([MIN_PROMPTS, MIN_PROMPTS, 3]))
    write(Calibration("m", tail, (MeasuredPolicy(SELECT, 16, tail, KV),)), tmp_path / "c.json")
    head, _, row = capsys.readouterr().out.splitlines()[:3]
    assert "| worst trusted bin |" in head
    assert row.split(" | ")[3] == "0.8000"
    few = replace(tail, prompts=np.array([3, 3, 3]))  # on own rollouts, which end early
    measured = (MeasuredPolicy(SELECT, 16, tail, KV), MeasuredPolicy(SELECT, 32, few, KV))
    write(Calibration("m", tail, measured), tmp_path / "c.json")
    assert "| 32 | 0.6000 | none | | 40.0%" in capsys.readouterr().out


def test_the_table_lists_budgets_that_were_never_sparse(tmp_path, capsys):
    tail, dense = made_tail([0.9]), replace(KV, saved=0.0, not_read=0.0, evictions=0, sparse=0, longest=67)
    measured = [MeasuredPolicy(SELECT, b, tail, kv) for b, kv in ((16, KV), (512, dense), (768, dense))]
    path = tmp_path / "c.json"
    write(Calibration("m", tail, tuple(measured)), path)
    _, _, *rows, remark, _ = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[5:] for row in rows] == [["40.0%", "50.0%", "60 |"]] + 2 * [["0.0%", "0.0%", "0 |"]]
    assert re.search("budget 512, 768 was never sparse: .* 67 tokens", remark)
    assert "smaller budget" in remark
    assert "--length" in remark
    assert [m.kv for m in Calibration.load(path).measured] == [KV, dense, dense]
    with pytest.raises(RunFailed, match="nothing was sparse"):
        write(Calibration("m", tail, tuple(measured[1:])), path)
    assert "alula plan" not in capsys.readouterr().out


TINY = (
    "calibrate",
    "shape:tiny-llama",
    "--data",
    "task:copy-last",
    "--prompts",
    20,
    "--length",
    24,
    "--kv-memory",
    "8MiB",
    "--max-rows",
    40,
)
WIDTH = ("--bin", 12)
SEARCH = (*WIDTH, "--budgets", "12,24", "--pages", 4)


def test_the_command_creates_the_folder_of_its_output(tmp_path):
    out = tmp_path / "no" / "such" / "c.json"
    assert alula(*TINY, *SEARCH, "--out", out) == 0
    assert len(Calibration.load(out).measured) > 0


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("rkv:512+128", "no sequence exceeded the budget (the longest has 24 tokens)"),
        ("rkv:16+128", "no sequence exceeded the budget plus buffer=128 (the longest has 24 tokens)"),
    ],
)
@pytest.mark.slow
def test_a_policy_that_was_never_sparse_does_not_pass(tmp_path, capsys, policy, reason):
    out = tmp_path / "v.json"
    assert alula(*TINY, *WIDTH, "--verify", policy, "--tau", 0.5, "--out", out) == 1
    printed = capsys.readouterr().out
    assert "KV saved 0.0%, KV not read 0.0%, evictions 0; sparse in 0 of 20 rollouts." in printed
    assert f"{policy} was never sparse: {reason}, so nothing was tested; " in printed
    assert "holds" not in printed
    assert "larger budget" not in printed
    assert "above tau" not in printed
    assert json.loads(out.read_text())["kv"]["sparse"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        (*SEARCH, "--methods", "block-topk:dense_layers=9"),
        ("--verify", "block-topk:12,block=4,dense_layers=9"),
        (*SEARCH, "--vetoed", 0.5, "--methods", "block-topk:dense_layers=9"),
        ("--leaderboard", "--methods", "block-topk:dense_layers=9"),
    ],
)
def test_a_selector_without_layers_is_rejected_before_anything_is_generated(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.setattr("alula.cli.calibrate.Engines", None)
    assert alula(*TINY, *arguments, "--out", tmp_path / "c.json") == 2
    assert "dense_layers=9: covers all layers of the model (3)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    policy = "block-topk:12,block=4"
    message = replace(KV, sparse_layers=0).never_sparse(policy, Sparsity.parse(policy))
    assert "lower dense_layers" in message, "of a calibration from Python"


def test_verify_reports_kv_savings(tmp_path, capsys):
    out = tmp_path / "v.json"
    assert alula(*TINY, *WIDTH, "--verify", "streaming:8+2,window=2,sinks=1", "--tau", 0.01, "--out", out) in (0, 1)
    kv = json.loads(out.read_text())["kv"]
    assert kv["sparse"] > 0
    assert kv["evictions"] > 0
    assert 0 < kv["saved"] == kv["not_read"] < 1
    assert "never sparse" not in capsys.readouterr().out


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.slow
def test_several_policies_pass_only_if_all_hold(tmp_path, capsys, order):
    names = ["block-topk:12,block=4,dense_layers=0", "rkv:512+128"]
    policies = [names[i] for i in order]
    out = tmp_path / "v.json"
    assert alula(*TINY, *WIDTH, "--verify", policies[0], "--verify", policies[1], "--tau", 0.01, "--out", out) == 1
    records = json.loads(out.read_text())
    assert [one["policy"] for one in records] == policies
    assert [one["kv"]["sparse"] > 0 for one in records] == [name == names[0] for name in policies]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line in names] == policies
    assert alula(*TINY, *WIDTH, "--verify", names[0], "--verify", names[0], "--tau", 0.01, "--out", out) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tau", "1.5"], "--tau 1.5: must"),
        (["--tau", "0.9", "--tau", "0"], "--tau 0.0: must"),
        (["--tau", "0.9", "--tau", "0.8", "--verify", "rkv:64+8"], "--tau 0.9 --tau 0.8: --verify takes one."),
        (["--verify", "rkv:64+8", "--verify", "rvk:64+8"], "did you mean 'rkv'"),
        (["--vetoed", "1.5"], "--vetoed 1.5: must"),
        (["--vetoed", "0.1"], "without any veto the interval still reaches 16.1%; use --prompts 35 or more."),
        (["--vetoed", "0.1", "--verify", "rkv:64+8"], "--verify --vetoed: these are different measurements"),
        (["--vetoed", "0.2", "--methods", "rvk"], "did you mean 'rkv'"),
        (["--text", "both"], "--text both: write dense or own."),
        (["--text", "own", "--verify", "rkv:64+8"], "--text own: --verify does not use it; drop it."),
        (["--budgets", "64", "--verify", "rkv:64+8"], "--budgets: --verify does not use it; drop it."),
        (["--leaderboard", "--sweep"], "--sweep: --leaderboard does not use it; drop it."),
        (["--vetoed", "0.2", "--no-forward"], "--no-forward: --vetoed does not use it; drop it."),
        (["--no-timing"], "--no-timing: a calibration does not use it"),
        (["--timing", "--verify", "rkv:64+8"], "--timing: --verify does not use it"),
        (["--bin", "0"], "--bin 0: must be at least 1."),
        (["--length", "0"], "--length 0: must be at least 1."),
        (["--option", "symbols=x"], "task copy-last: symbols='x' must be a whole number."),
        (["--option", "symbols={"], "--option 'symbols={': not YAML"),
        (["--data", "none.jsonl", "--option", "symbols=4"], "data 'none.jsonl' does not exist"),
        (["--out", "c.svg"], "--out c.svg: the plot has this name"),
        (["--out", "/proc/none/c.json"], "--out /proc/none/c.json: cannot be written ("),
        (["--verify", "rkv:64+8", "--out", "/proc/none/v.json"], "--out /proc/none/v.json: cannot be written ("),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_raise_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("alula.models.load.load_model", lambda *_, **__: pytest.fail("the work has begun"))
    searches = not {"--verify", "--vetoed", "--leaderboard"} & {*arguments}
    assert alula(*TINY, *(SEARCH if searches else ()), *arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


@given(st.integers(1, 500), st.data())
def test_the_interval_of_a_share_is_the_inverted_score_test(of, data):
    """Wilson's bounds are the shares at which |count - n p| = z sqrt(n p (1 - p))."""
    share = Share(data.draw(st.integers(0, of)), of)
    for bound in share.interval:
        apart, deviation = abs(share.count - of * bound), math.sqrt(of * bound * (1 - bound))
        np.testing.assert_allclose(apart, 1.959964 * deviation, atol=1e-6)
    assert share.interval[0] - 1e-9 <= share.value <= share.interval[1] + 1e-9
    assert Share(4 * share.count, 4 * of, samples=4).interval == share.interval, "four equal samples count as one"


@given(st.integers(1, 400), st.integers(1, 4), st.floats(0.02, 0.5), st.data())
def test_prompts_needed_to_tell_a_share_from_a_limit(prompts, samples, limit, data):
    """With that many prompts the interval excludes the limit; with nine tenths of them it does not."""
    share = Share(data.draw(st.integers(0, prompts * samples)), prompts * samples, samples)
    needed = share.prompts_to_tell_from(limit)
    if needed is None or not 20 <= needed < 1e9:  # beyond, the two differ by less than float64 resolves
        return
    for count, excluded in ((needed + 1, True), (0.9 * needed, False)):
        lower, upper = Share(share.value * count * samples, count * samples, samples).interval
        assert (limit < lower or limit > upper) == excluded


def test_hint_for_a_share_that_may_be_too_large():
    assert re.fullmatch(r"256 prompts .* 15%.* --prompts 2800.* larger budget\.", undecided(Share(35, 256)))
    assert "--prompts 200," in undecided(Share(6, 60))
    assert undecided(Share(24, 240, samples=4)) == undecided(Share(6, 60)), "rollouts of one prompt count as one"
    for count in (9, 12):  # the limit itself, and more: further prompts would not help
        assert "--prompts" not in undecided(Share(count, 60))
        assert "larger budget" in undecided(Share(count, 60))


def test_verify_counts_vetoed_rollouts(loaded):
    sharp = copy.deepcopy(loaded)
    with torch.no_grad():
        sharp.model.base_model.norm.weight.mul_(12)  # sharp distributions: a sparse policy's tokens are often vetoed
    engine = Engine(sharp, page=PAGE, kv_memory="8MiB", max_rows=96, lookahead=4)
    schedule, policy = parse_target("streaming:6+2,window=2,sinks=1", 12, 36)
    assert (schedule.budgets, schedule.width, policy.evict.budget) == ((6, 6, 6), 12, 6)
    sparse = verify(engine, schedule, policy, TEXT, None)
    rollouts = engine.generate([list(p) for p in PROMPTS], TEXT.sampling, policy)
    by_hand = 0
    for rollout, scores in zip(rollouts, engine.score(rollouts)):
        by_hand += any(math.exp(a - b) < 1e-4 for a, b in zip(scores.logprobs.tolist(), rollout.logprobs.tolist()))
    assert sparse.vetoed == Share(by_hand, len(PROMPTS))
    assert sparse.too_many_vetoed
    dense = verify(engine, *parse_target("streaming:40+2,window=2,sinks=1", 12, 36), TEXT, None)
    assert dense.vetoed.count == 0
    assert not dense.too_many_vetoed


# -- the smallest budget by vetoes --------------------------------------------------------------------------


def made_verification(vetoed: int, of: int = 100, sparse: int = 30) -> Verification:
    return Verification(Schedule((16,), 12), None, made_tail([0.9]), Share(vetoed, of), replace(KV, sparse=sparse))


def searched(counts: dict[int, int], limit=0.1, sweep=False, dense=()) -> BudgetSearch:
    measured_budgets = []

    def measured(budget):
        measured_budgets.append(budget)
        return made_verification(counts[budget], sparse=0 if budget in dense else 30)

    result = find_budget(EVICT, sorted(counts), limit, measured, sweep=sweep)
    assert sorted(measured_budgets) == sorted(result.tried), "nothing is measured twice"
    return result


@given(st.integers(1, 40), st.integers(0, 40))
def test_the_smallest_budget_is_bisected(rungs_, holding):
    """If vetoes fall with the budget, the result is exact, and the next smaller budget was measured too."""
    counts = {10 + i: 0 if i >= holding else 50 for i in range(rungs_)}
    result = searched(counts)
    expected = 10 + holding if holding < rungs_ else None
    assert result.budget == expected
    assert len(result.tried) <= math.ceil(math.log2(rungs_ + 1))
    if expected is not None and holding > 0:
        assert not below_limit(result.tried[expected - 1], 0.1)
    assert searched(counts, sweep=True).budget == expected


def test_the_result_is_measured_confident_and_sparse():
    counts = {8: 50, 12: 0, 16: 40, 20: 0, 24: 0}  # vetoes that do not fall with the budget
    assert searched(counts).budget == 20
    assert searched(counts, sweep=True).budget == 12
    assert searched({8: 5}).budget is None, "5 of 100 may be 11 %"
    assert searched({8: 2}).budget == 8
    none = searched({8: 50, 12: 0, 16: 0}, dense=(12, 16))
    assert none.budget is None
    family = "streaming:buffer=2:window=2:sinks=1: "
    [remark] = remarks(none)
    assert remark.startswith(f"{family}budget 8 is not shown to hold and 12 was never sparse;")
    assert "--budgets" in remark
    assert "--length" in remark
    assert "budget 8 was never sparse: " in remarks(searched({8: 0}, dense=(8,)))[0]
    assert "8 is not shown to hold, the largest one tried; set larger --budgets" in remarks(searched({8: 50}))[0]
    [remark] = remarks(searched({8: 5, 12: 0}))
    assert remark.startswith(f"{family}the next smaller budget")
    assert "--prompts 139 " in remark
    for count in (9, 50):
        assert remarks(searched({8: count, 12: 0})) == [], "too close to the limit, and above it"
    assert "8 is the smallest budget tried" in remarks(searched({8: 0}))[0]


def test_budgets_that_were_never_sparse_do_not_hold(tmp_path, capsys):
    out = tmp_path / "v.json"
    assert alula(*TINY, *SEARCH, "--methods", "rkv", "--vetoed", 0.2, "--sweep", "--out", out) == 1
    printed = capsys.readouterr().out
    assert printed.count("0.0% (0.0% to 16.1%), never sparse. KV saved 0.0%") == 2
    assert "below" not in printed
    assert re.search("budget 12 was never sparse: .* buffer=128", printed)
    assert "use a smaller budget or buffer" in printed
    assert f"{out}: no budget was sparse" in printed
    mixed = [searched({8: 50, 12: 0}, dense=(12,))]
    assert re.fullmatch("no sparse budget .* less than 10% .* vetoed.", vetoed_verdict(mixed))


def test_default_budgets_to_try():
    [select] = parse_families("block-topk", (16,))
    [evict] = parse_families("rkv", (16,))
    assert budgets_to_try(evict, 512) == (16, 32, 48, 64, 80, 112, 144, 192, 240, 304, 384, 480)
    assert budgets_to_try(select, 512)[0] == 48, "a selector reads at least three blocks"
    assert budgets_to_try(evict, 4096)[:4] == (128, 160, 208, 272)
    with pytest.raises(SettingError, match=r"length=40: .* block-topk"):
        budgets_to_try(select, 40)


@pytest.fixture(scope="module")
def sure_model(tmp_path_factory):
    """A model with sharp distributions, so that the share of vetoes depends on the budget."""
    folder = tmp_path_factory.mktemp("sure")
    tokenizer = task_tokenizer(build("copy-last"))
    sure = attach_tokenizer(load_model("shape:tiny-llama"), tokenizer, resize=True)
    with torch.no_grad():
        sure.model.base_model.norm.weight.mul_(12)
    sure.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_chosen_budget_gives_the_same_numbers_in_verify(sure_model, tmp_path, capsys):
    common = [
        sure_model,
        "--data",
        "task:copy-last",
        "--prompts",
        64,
        "--length",
        48,
        "--bin",
        12,
        "--seed",
        5,
        "--kv-memory",
        "8MiB",
    ]
    methods = ["--methods", "streaming:buffer=2:window=2:sinks=1,block-topk:dense_layers=0", "--pages", 4]
    out, again = tmp_path / "chosen.json", tmp_path / "again.json"
    ladder = ["--budgets", "12,16,20,24,28,32,36,40,44"]
    assert alula("calibrate", *common, *methods, *ladder, "--vetoed", 0.3, "--out", out) == 0
    printed = capsys.readouterr().out
    both = json.loads(out.read_text())
    assert [one["family"] for one in both] == [
        "streaming:buffer=2:window=2:sinks=1",
        "block-topk:block=4:dense_layers=0",
    ]
    for one in both:
        chosen = next(t for t in one["tried"] if t["budget"] == one["budget"])
        assert chosen["holds"]
        assert chosen["vetoed"]["upper"] < 0.3
        assert any(not t["holds"] and t["budget"] < one["budget"] for t in one["tried"]), "some budgets have too many"
        assert f"| {one['family']} | {one['budget']} | " in printed
        assert all(f"{t['policy']}: vetoed {t['vetoed']['rollouts']} of 64" in printed for t in one["tried"])
        assert alula("calibrate", *common, "--verify", chosen["policy"], "--out", again) in (0, 1)
        verified = json.loads(again.read_text())
        assert (verified["vetoed"], verified["kv"]) == (chosen["vetoed"], chosen["kv"])
    few = ["--vetoed", 0.3, "--budgets", "12,16", "--out", out]
    assert alula("calibrate", *common, "--methods", "streaming:buffer=2:window=2:sinks=1", *few) == 1


def test_parse_target(tmp_path):
    schedule = Schedule((16, 32), 12, "mine", None, "quest", 4, {"options": {"dense_layers": 1}})
    schedule.save(tmp_path / "mine.json")
    assert parse_target(str(tmp_path / "mine.json"), 5, 50) == (schedule, policy_of(schedule))
    both = parse_target("block-topk:24,block=4", 20, 50)
    assert both[0].budgets == (24, 24, 24)
    growing = tmp_path / "growing.json"
    Schedule((16, 32), 12, "growing").save(growing)
    both = parse_target(f"streaming:{growing},window=4,sinks=1 & block-topk:48,block=4", 20, 50)
    assert both[0].name == "growing", "the part with a schedule sets the bins"
    for text, message in (
        ("dense", "verify=dense: "),
        ("rkv", "has no budget"),
        ("rvk:24", "did you mean 'rkv'"),
        ("missing.json", "schedule file missing.json: "),
        (str(tmp_path), "not a schedule .*directory.*`alula plan` writes one"),
    ):
        with pytest.raises(SettingError, match=message):
            parse_target(text, 20, 50)


def test_timings_become_a_cost_model(tmp_path):
    geometry, other = Geometry(10**9, 8, 8, 4, 64), Geometry(10**8, 2, 2, 2, 8)
    truth = AnalyticCost(geometry, Hardware(100, 1))
    steps = []
    for batch in (1, 8, 32):
        for context in (512, 2048, 8192):
            for policy in (DENSE, Sparsity(select=Select("block-topk", 256))):
                record = timing_record(geometry, batch, context, policy, 1.0)
                ms = float(truth.step_ms(batch, record["kv_read"], record["pages_scored"]))
                steps.append({"kind": "decode step", "timing": record | {"ms": ms}})
    dense, sparse = (s["timing"] for s in steps[:2])
    assert (dense["kv_read"], dense["pages_scored"]) == (512, 0)
    assert (sparse["kv_read"], sparse["pages_scored"]) == (0.25 * 512 + 0.75 * 256, 0.75 * 32)
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"machine": {}, "steps": steps, "more": [timing_record(other, 1, 9, DENSE, 3.0)]}))
    fitted = load_cost(path, geometry)
    assert fitted.notes["timings"] == len(steps)
    assert fitted.notes["median_error"] < 0.02
    with pytest.raises(SettingError, match=r"bench\.json: no decode step .* 9 layers"):
        load_cost(path, replace(geometry, layers=9))
    with pytest.raises(SettingError, match=r"timings file .*none\.json"):
        load_cost(tmp_path / "none.json", geometry)
    assert asdict(geometry) == dense["shape"]


def test_the_dense_policy_has_no_adapter(loaded, text):
    """With a budget that covers everything, the adapter is the only difference between the two policies."""
    adapter = init_adapter(loaded.model, rank=2, alpha=4.0, targets=["all"], seed=0)
    for _, b in adapter.weights.values():
        b.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    engine = Engine(loaded, page=PAGE, kv_memory="8MiB", max_rows=32, sparse_adapter=adapter)
    changed = copy.deepcopy(loaded.model)
    attach(changed, adapter)
    alphas = engine.acceptance(text[:4], Sparsity(Evict("streaming", 64)))
    for rollout, alpha in zip(text[:4], alphas):
        ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
        with torch.no_grad():
            p, q = (
                model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].softmax(-1) for model in (loaded.model, changed)
            )
        torch.testing.assert_close(alpha, torch.minimum(p, q).sum(-1), rtol=0, atol=2e-5)
        assert alpha.min() < 0.95


def test_calibrate_measures_the_queries_once_and_reads_them_again(tmp_path, capsys):
    file, out = tmp_path / "queries.safetensors", tmp_path / "verified.json"
    common = ["shape:tiny-llama", "--data", "task:copy-last", "--length", 64, "--prompts", 20, "--device", "cpu"]
    policy = ["--verify", "triattention:24+8,window=4", "--statistics", file, "--out", out]
    alula("calibrate", *common, *policy)
    assert str(file) in capsys.readouterr().out
    first = out.read_text()
    alula("calibrate", *common, *policy)
    assert str(file) not in capsys.readouterr().out
    assert out.read_text() == first
    assert len(QueryStatistics.load(file).text) == 16
