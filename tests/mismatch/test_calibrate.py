"""Calibration with a real engine on tiny models: what is measured, what is skipped, what survives a kill."""

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
from alula.cli.calibrate import default_budgets, numbers, write
from alula.cli.find_budget import remarks
from alula.cli.find_budget import verdict as vetoed_verdict
from alula.cli.main import app
from alula.cli.verify import undecided, verdict
from alula.data.load_tokenizer import attach_tokenizer
from alula.data.tasks import build
from alula.data.tasks.tokenizer import task_tokenizer
from alula.errors import SettingError
from alula.mismatch.calibrate import calibrate as calibrating
from alula.mismatch.calibrate.cache import Work
from alula.mismatch.calibrate.calibrate import ForwardMeasure, Grid, Text, calibrate
from alula.mismatch.calibrate.file import Calibration, Measured, tail_to_dict
from alula.mismatch.calibrate.find_budget import Smallest, below, rungs, smallest
from alula.mismatch.calibrate.search import next_budgets, spread
from alula.mismatch.calibrate.verify import Verification, named, policy_of, verify
from alula.mismatch.measure import Bins, cut, measure, own_rollouts, side_by_side
from alula.mismatch.plan.cost import AnalyticCost, FittedCost, Hardware
from alula.mismatch.plan.plan import Workload, plan
from alula.mismatch.plan.timings import load_cost, timing_record
from alula.mismatch.savings import Savings
from alula.mismatch.tail import MIN_PROMPTS, Tail
from alula.models.geometry import Geometry
from alula.models.load import load_model
from alula.models.lora import attach, init_adapter
from alula.objective.veto import Share
from alula.sparsity.family import PolicyFamily, parse_families
from alula.sparsity.policy import DENSE

PAGE = 4
PROMPTS = tuple(tuple(int(t) for t in row) for row in np.random.default_rng(0).integers(2, 96, (32, 6)))
TEXT = Text(PROMPTS, length=36, seed=3)
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
    return own_rollouts(engine, PROMPTS, TEXT.sampling, DENSE)[0]


def literal_tails(rollouts, alphas, width: int, bins: int) -> list[float]:
    """The 5th percentile by a sort per bin: the smallest value with 5 % of the tokens at or below it."""
    found: list[list[float]] = [[] for _ in range(bins)]
    for rollout, alpha in zip(rollouts, alphas):
        for i, value in enumerate(alpha.tolist()):
            found[min((len(rollout.prompt_ids) + i) // width, bins - 1)].append(value)
    return [sorted(v)[max(0, int(np.ceil(0.05 * len(v))) - 1)] if v else float("nan") for v in found]


def literal_savings(engine, text, policy) -> Savings:
    """Step by step: what the dense policy would hold, what is held, what each layer reads."""
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


def test_tails_of_policies_side_by_side(engine, text):
    policies = [SELECT.policy(12), SELECT.policy(20), EVICT.policy(8), DENSE]
    told = {}
    tails = measure(engine, text, policies, BINS, done=lambda i, *found: told.__setitem__(i, found))
    for policy, tail in zip(policies, tails):
        alphas = engine.acceptance(text, policy)
        np.testing.assert_allclose(tail.value, literal_tails(text, alphas, 12, 3), atol=2e-5)
        assert tail.tokens.sum() == sum(map(len, text))
        assert tail.prompts.max() == len(PROMPTS)
    assert list(told) == sorted(told), "policies are done in their order, so that little is lost by a kill"
    assert [told[i][0] for i in range(4)] == tails
    for policy, (_, kv) in zip(policies, told.values()):
        assert kv == literal_savings(engine, text, policy)
    assert told[0][1].sparse > told[1][1].sparse > told[3][1].sparse == 0
    half = Sparsity(select=Select("block-topk", 12, PAGE, dense_layers=1))
    measure(engine, text, [half], BINS, done=lambda i, *found: told.__setitem__("half", found))
    assert told["half"][1] == literal_savings(engine, text, half)
    assert told["half"][1].not_read == pytest.approx(told[0][1].not_read / 2), "one of two layers reads everything"
    assert tails[3].value.min() > 1 - 1e-5
    assert tails[0].overall < tails[1].overall < 0.99


def test_a_policy_on_its_own_rollouts(engine):
    policy, sampling = EVICT.policy(8), Sampling(n=2, max_new_tokens=30, seed=5)
    own = BINS.tail(*own_rollouts(engine, PROMPTS, sampling, policy))
    rollouts = engine.generate([list(p) for p in PROMPTS], sampling, policy)
    expected = BINS.tail(rollouts, engine.acceptance(rollouts, policy))
    assert own.tokens.tolist() == expected.tokens.tolist()
    assert own.prompts.tolist() == expected.prompts.tolist()
    for name in ("value", "lower", "upper"):
        np.testing.assert_allclose(getattr(own, name), getattr(expected, name), atol=1e-4)


def test_how_many_fit_side_by_side(engine, text):
    assert side_by_side(engine, text, evicts=True) == 96 // 32
    small = Engine(oracle.custom_model(3), page=PAGE, kv_memory="1MiB", max_rows=96)
    held = sum(len(r.prompt_ids) + len(r) for r in text)
    assert side_by_side(small, text, evicts=False) == max(1, small.pool.usable * PAGE // held)
    assert side_by_side(engine, [*text] * 50, evicts=True) == 1


def test_cut_text_keeps_what_lies_before_the_end(text):
    for rollout, whole in zip(cut(text, 12, 24), [r for r in text if len(r.prompt_ids) + len(r) > 12]):
        assert rollout.token_ids == whole.token_ids[: 24 - len(whole.prompt_ids)]
        assert len(rollout.prompt_ids) + len(rollout) <= 24
    assert cut(text, 36, 48) == []


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


def test_search_skips_what_cannot_matter_and_sweep_does_not():
    ladder = list(range(100, 132))
    truth = {b: made_tail([(b - 100) / 32]) for b in ladder}
    for sweep, most in ((False, 6), (True, 32)):
        known: dict[int, Tail] = {}
        while budgets := next_budgets(ladder, known, [0.4], 1, sweep=sweep):
            known |= {b: truth[b] for b in budgets}
        assert len(known) <= most
        assert len(known) == 32 or not sweep


def test_bins_without_enough_prompts_ask_for_nothing():
    few = replace(made_tail([0.1, 0.9]), prompts=np.array([3, MIN_PROMPTS]))
    assert next_budgets([1, 2, 3], {2: few}, [0.5], 9) == [1]


def test_spread():
    assert spread([1, 2, 3], 5) == [1, 2, 3]
    assert spread(list(range(9)), 1) == [4]
    assert spread(list(range(10)), 3) == [2, 5, 7]


# -- a whole calibration ------------------------------------------------------------------------------------


def run(engine, path, grid, text=TEXT, bins=BINS, **options):
    return calibrate(lambda page: engine, text, grid, bins, path, **options)


def test_calibration_against_direct_measurement(engine, text, tmp_path):
    grid = Grid((SELECT,), (12, 16, 24, 36), sweep=True)
    found = run(engine, tmp_path / "work.json", grid)
    assert [m.budget for family in found.families().values() for m in family] == [12, 16, 24, 36]
    expected = measure(engine, text, [SELECT.policy(b) for b in grid.budgets], BINS)
    for one, tail in zip(sorted(found.measured, key=lambda m: m.budget), expected):
        np.testing.assert_allclose(one.tail.value, tail.value, atol=1e-5)
    assert found.model == engine.name
    [floor] = measure(engine, text, [DENSE], BINS)
    np.testing.assert_allclose(found.floor.value, floor.value, atol=1e-5)
    assert found.floor.overall > 1 - 1e-5
    assert found.notes["tokens"] == sum(map(len, text))
    assert Geometry(**found.notes["shape"]) == Geometry.of(engine.model)


class Killed(Exception):
    pass


BOTH = Grid((SELECT, EVICT), (12, 20, 36), taus=(0.8,))


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory):
    return run(engine, tmp_path_factory.mktemp("whole") / "work.json", BOTH)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_killed_calibration_goes_on_where_it_was(after, whole, engine, tmp_path, monkeypatch):
    """Killed at any write of the work file: the end is the same, and nothing is measured twice."""
    write, writes = Work._write, 0

    def dying(self):
        nonlocal writes
        if writes == after:
            raise Killed
        writes += 1
        write(self)

    monkeypatch.setattr(Work, "_write", dying)
    with pytest.raises(Killed):
        run(engine, tmp_path / "work.json", BOTH)
    monkeypatch.setattr(Work, "_write", write)
    measured_before = set(Work.open(tmp_path / "work.json", engine, TEXT, BINS).measured)
    again, real = [], calibrating.measure

    def counted(engine, text, policies, bins, **options):
        again.extend(policies)
        return real(engine, text, policies, bins, **options)

    monkeypatch.setattr(calibrating, "measure", counted)
    resumed = run(engine, tmp_path / "work.json", BOTH)
    assert not {family.policy(budget) for family, budget in measured_before} & set(again)
    assert same_numbers(resumed, whole)


def same_numbers(a: Calibration, b: Calibration) -> bool:
    """Equal up to the rounding that another company in the batch brings."""

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


def test_further_budgets_are_added_to_what_is_there(engine, tmp_path, monkeypatch):
    path = tmp_path / "work.json"
    run(engine, path, Grid((SELECT,), (12, 24), sweep=True))
    asked, real = [], calibrating.measure
    monkeypatch.setattr(calibrating, "measure", lambda e, t, p, b, **o: asked.extend(p) or real(e, t, p, b, **o))
    found = run(engine, path, Grid((SELECT,), (12, 16, 24), sweep=True))
    assert asked == [SELECT.policy(16)]
    assert len(found.measured) == 3


def test_work_of_another_calibration_is_refused(engine, tmp_path):
    path = tmp_path / "work.json"
    Work.open(path, engine, TEXT, BINS).keep_text([], made_tail([0.9]))
    with pytest.raises(SettingError, match="seed=3, not seed=4"):
        Work.open(path, engine, replace(TEXT, seed=4), BINS)
    with pytest.raises(SettingError, match="bin=12"):
        Work.open(path, engine, TEXT, replace(BINS, width=10))
    again = oracle.custom_model(3, layers=2)
    adapter = init_adapter(again.model, rank=2, alpha=4.0, targets=["all"], seed=0)
    adapter.weights["model.layers.0.self_attn.q_proj"][1].fill_(0.1)
    adapted = Engine(again, page=PAGE, kv_memory="1MiB", sparse_adapter=adapter)
    with pytest.raises(SettingError, match="adapter=none, not adapter="):
        Work.open(path, adapted, TEXT, BINS)
    Work.open(path, Engine(again, page=PAGE, kv_memory="1MiB"), TEXT, BINS)
    again.model.model.norm.weight.data.mul_(1.01)
    with pytest.raises(SettingError, match="weights="):
        Work.open(path, Engine(again, page=PAGE, kv_memory="1MiB"), TEXT, BINS)
    path.write_text("{")
    with pytest.raises(SettingError, match="not one of a calibration"):
        Work.open(path, engine, TEXT, BINS)


def test_work_of_another_residual_stream_is_refused(tmp_path):
    narrow, wide = (
        Engine.load("shape:tiny-llama", dtype="bfloat16", residual=residual, page=PAGE, kv_memory="1MiB")
        for residual in (None, "float32")
    )
    path = tmp_path / "work.json"
    Work.open(path, narrow, TEXT, BINS).keep_text([], made_tail([0.9]))
    Work.open(path, narrow, TEXT, BINS)
    with pytest.raises(SettingError, match="residual=None, not residual=float32"):
        Work.open(path, wide, TEXT, BINS)


def test_growing_schedule_of_an_evictor(engine, text, tmp_path):
    """Each bin is measured under the budgets before it, its lower bound holds tau, and the planner can use it."""
    grid = Grid((EVICT,), (4, 8, 12, 20, 36), taus=(0.6,))
    found = run(engine, tmp_path / "work.json", grid)
    [grown] = found.forward
    assert len(set(grown.budgets)) > 1, "the schedule really grows"
    assert list(grown.budgets) == sorted(grown.budgets)
    for j, (budget, tail) in enumerate(zip(grown.budgets, grown.tails)):
        assert tail.lower >= 0.6
        last = 12 * (j + 1) if j < 2 else 99
        part, schedule = cut(text, 12 * j, last), Schedule(grown.budgets[: j + 1], 12)
        alphas = engine.acceptance(part, EVICT.policy(schedule))
        assert tail.value == pytest.approx(literal_tails(part, alphas, 12, 3)[j], abs=1e-5)
        smaller = [b for b in grid.budgets if (grown.budgets[j - 1] if j else 0) <= b < budget]
        if smaller:
            work = Work.open(tmp_path / "other.json", engine, TEXT, BINS)
            work.rollouts = text
            measured = ForwardMeasure(engine, EVICT, grid.budgets, work, BINS, False)
            assert measured(grown.budgets[:j], j, smaller[-1]).lower < 0.6, "one rung less would not do"
    made = plan(
        found, AnalyticCost(Geometry(10**9, 2, 6, 2, 12), Hardware.named("h200")), Workload(30, batch=8), tau=0.6
    )
    assert made.schedule.budgets == grown.budgets
    assert made.family.kind == "evict"
    found.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json").to_dict() == found.to_dict()


def test_an_evictor_beside_a_selector(engine, text, tmp_path):
    """The selector's budget is searched with the evictor at work, and the schedule holds beside that evictor only."""
    evict = Evict("streaming", 20, buffer=4, window=2, sinks=1)
    [family] = parse_families("streaming:budget=20:buffer=4:window=2:sinks=1&block-topk:dense_layers=0", (PAGE,))
    assert family.policy(12) == Sparsity(evict, Select("block-topk", 12, PAGE, 0))
    found = run(engine, tmp_path / "work.json", Grid((family, SELECT), (12, 16, 24, 36), sweep=True))
    for measured in found.families()[family]:
        expected = engine.acceptance(text, replace(SELECT.policy(measured.budget), evict=evict))
        np.testing.assert_allclose(measured.tail.value, literal_tails(text, expected, 12, 3), atol=2e-5)
    alone = found.families()[SELECT][-1].tail
    assert measured.tail.value[2] < alone.value[2], "the largest selection still lacks what was evicted"
    found.save(tmp_path / "calibration.json")
    only = [m for m in Calibration.load(tmp_path / "calibration.json").measured if m.family.evicts]
    tau = min(b.lower for b in measured.tail) - 1e-6
    cost, work = AnalyticCost(Geometry.of(engine.model), Hardware.named("h200")), Workload(30, 6, kv_bytes=1 << 20)
    made = plan(replace(found, measured=tuple(only)), cost, work, tau=tau)
    assert made.sparse.batch > made.dense.batch, "the memory that the evictor frees becomes rows"
    policy = policy_of(made.schedule)
    assert policy == Sparsity(evict, Select("block-topk", made.schedule, PAGE, 0))
    engine.check(policy)
    for other, name in ((None, "none"), (Evict("streaming", 24, buffer=4, window=2, sinks=1), "streaming:24")):
        with pytest.raises(SettingError, match=f"was made for evict=streaming:20\\+4,.* not evict={name}"):
            engine.check(replace(policy, evict=other))
    assert "| 12-24 |" in verify(engine, made.schedule, policy, TEXT, tau).table()


def test_a_schedule_made_for_one_part_alone_is_refused_beside_another(engine, tmp_path):
    found = run(engine, tmp_path / "work.json", Grid((SELECT, EVICT), (12, 36), forward=False))
    cost, work = AnalyticCost(Geometry.of(engine.model), Hardware.named("h200")), Workload(30, 6, 4)
    for kind, other in (("select", EVICT), ("evict", SELECT)):
        only = tuple(m for m in found.measured if m.family.kind == kind)
        policy = policy_of(plan(replace(found, measured=only), cost, work, tau=0.01).schedule)
        engine.check(policy)
        part = other.policy(12)
        both = Sparsity(policy.evict or part.evict, policy.select or part.select)
        with pytest.raises(SettingError, match=rf"was made for {other.kind}=none, not {other.kind}={other.method}:12"):
            engine.check(both)


def test_bad_settings():
    with pytest.raises(SettingError, match="trusted from 20 prompts"):
        Text(PROMPTS[:5], 36)
    with pytest.raises(SettingError, match="longest prompt alone has 6"):
        Text(PROMPTS, 6)
    with pytest.raises(SettingError, match="budget=8 is smaller than the three blocks"):
        Grid((SELECT,), (8, 16))
    with pytest.raises(SettingError, match="name at least one"):
        Grid((), (8,))


def test_text_too_short_for_any_bin(engine, tmp_path):
    wide = Bins(width=12, count=40, resamples=20)
    work = Work.open(tmp_path / "work.json", engine, TEXT, wide)
    rollouts, alphas = own_rollouts(engine, PROMPTS[:3], TEXT.sampling, DENSE)
    work.keep_text(rollouts, wide.tail(rollouts, alphas))
    with pytest.raises(SettingError, match="no bin of 12 tokens is reached by 20 prompts"):
        run(engine, tmp_path / "work.json", Grid((SELECT,), (12,)), bins=wide)


# -- command line pieces, files -----------------------------------------------------------------------------


def test_numbers_on_the_command_line():
    assert numbers("budgets", "512, 1k") == (512, 1024)
    with pytest.raises(SettingError, match="--budgets 'a'"):
        numbers("budgets", "a")
    assert default_budgets(1200) == (512, 768, 1024)
    with pytest.raises(SettingError, match=r"--length 300.*512"):
        default_budgets(300)


KV = Savings(0.4, 0.5, evictions=60, sparse=30, rollouts=30, longest=36, sparse_layers=2)


def test_verification_of_a_schedule():
    notes = {"options": {"dense_layers": 1}, "tau": 0.8}
    schedule = Schedule((16, 32, 32), 12, "mine", None, "quest", 4, notes)
    assert policy_of(schedule) == Sparsity(select=Select("quest", schedule, 4, 1))
    evicting = Schedule((16, 32), 12, "mine", None, "rkv", None, {"options": {"buffer": 8}})
    assert policy_of(evicting) == Sparsity(Evict("rkv", evicting, buffer=8))
    with pytest.raises(SettingError, match="names no method"):
        policy_of(Schedule((16,)))
    counts = np.array([30, 30, 5])
    tail = Tail(
        np.array([0.9, 0.7, 0.1]), np.array([0.81, 0.6, 0.0]), np.array([0.95, 0.79, 0.2]), counts, counts, 0.8, 12
    )
    found = Verification(schedule, 0.8, tail, Share(3, 30), KV)
    assert found.violated == [1], "too few prompts are no evidence"
    assert [found.verdict(t) for t in tail] == ["above tau", "below tau", "fewer than 20 prompts"]
    assert "| 12-24 | 32 | 0.7000 | 0.6000-0.7900 | 30 | 30 | below tau |" in found.table()
    assert found.to_dict()["tail"] == tail_to_dict(tail)
    assert not replace(found, tau=None).violated, "nothing to judge it by"


def test_the_verdict_counts_only_bins_that_are_judged():
    schedule = Schedule((16, 32, 32), 12)

    def said(prompts, tau=0.8, upper=0.95):
        counts, numbers_ = np.array(prompts), [np.full(3, x) for x in (0.9, 0.85, upper)]
        return verdict(Verification(schedule, tau, Tail(*numbers_, counts, counts, 0.9, 12), Share(0, 30), KV))

    assert said([30, 30, 30]) == "tau 0.8000 holds."
    assert said([30, 5, 0]).startswith("tau 0.8000 holds in 1 of 3 bins;")
    assert re.fullmatch(r"tau 0\.8000 is not tested: all 3 bins .* --prompts\.", said([5, 5, 0]))
    assert said([30, 5, 30], tau=0.96) == "tau 0.9600 is violated at lengths 0-12, 24-36."
    assert said([30, 30, 30], tau=None).startswith("no tau")


def test_the_table_says_that_only_trusted_bins_count(tmp_path, capsys):
    tail = replace(made_tail([0.9, 0.8, 0.1]), prompts=np.array([MIN_PROMPTS, MIN_PROMPTS, 3]))
    write(Calibration("m", tail, (Measured(SELECT, 16, tail, KV),)), tmp_path / "c.json")
    head, _, row = capsys.readouterr().out.splitlines()[:3]
    assert "| worst trusted bin |" in head
    assert row.split(" | ")[3] == "0.8000"


def test_the_table_names_budgets_that_measured_nothing(tmp_path, capsys):
    tail, dense = made_tail([0.9]), replace(KV, saved=0.0, not_read=0.0, evictions=0, sparse=0, longest=67)
    measured = [Measured(SELECT, b, tail, kv) for b, kv in ((16, KV), (512, dense), (768, dense))]
    path = tmp_path / "c.json"
    write(Calibration("m", tail, tuple(measured)), path)
    _, _, *rows, said, _ = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[5:] for row in rows] == [["40.0%", "50.0%", "60 |"]] + 2 * [["0.0%", "0.0%", "0 |"]]
    assert "with budget 512, 768 was never sparse: no sequence outgrew it (the longest has 67 tokens)" in said
    assert "use a smaller budget, or longer sequences (--length)" in said
    assert [m.kv for m in Calibration.load(path).measured] == [KV, dense, dense]


TINY = (
    "calibrate",
    "shape:tiny-llama",
    "--data",
    "task:copy-last",
    "--prompts",
    20,
    "--length",
    24,
    "--bin",
    12,
    "--budgets",
    "12,24",
    "--pages",
    4,
    "--kv-memory",
    "8MiB",
    "--max-rows",
    40,
)


def alula(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        app([*map(str, arguments)])
    return ended.value.code or 0


def test_the_command_makes_the_folder_of_its_output(tmp_path):
    out = tmp_path / "no" / "such" / "c.json"
    assert alula(*TINY, "--out", out) == 0
    assert len(Calibration.load(out).measured) > 0


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("rkv:512+128", "no sequence outgrew it (the longest has 24 tokens)"),
        ("rkv:16+128", "no sequence outgrew it and its buffer of 128 (the longest has 24 tokens)"),
        ("block-topk:12,block=4,dense_layers=9", "its dense_layers are all layers of the model"),
    ],
)
def test_a_policy_that_was_never_sparse_is_not_called_safe(tmp_path, capsys, policy, reason):
    out = tmp_path / "v.json"
    assert alula(*TINY, "--verify", policy, "--tau", 0.5, "--out", out) == 1
    said = capsys.readouterr().out
    assert "KV saved 0.0%, KV not read 0.0%, evictions 0; sparse in 0 of 20 rollouts." in said
    assert f"{policy} was never sparse: {reason}, so nothing was tested; use " in said
    assert "holds" not in said
    assert "larger budget" not in said
    assert "above tau" not in said
    assert json.loads(out.read_text())["kv"]["sparse"] == 0


def test_a_policy_that_was_sparse_says_how_much(tmp_path, capsys):
    out = tmp_path / "v.json"
    assert alula(*TINY, "--verify", "streaming:8+2,window=2,sinks=1", "--tau", 0.01, "--out", out) in (0, 1)
    kv = json.loads(out.read_text())["kv"]
    assert kv["sparse"] > 0
    assert kv["evictions"] > 0
    assert 0 < kv["saved"] == kv["not_read"] < 1
    assert "never sparse" not in capsys.readouterr().out


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_of_several_policies_is_judged_and_the_worst_decides(tmp_path, capsys, order):
    names = ["block-topk:12,block=4,dense_layers=0", "rkv:512+128"]
    asked = [names[i] for i in order]
    out = tmp_path / "v.json"
    assert alula(*TINY, "--verify", asked[0], "--verify", asked[1], "--tau", 0.01, "--out", out) == 1
    found = json.loads(out.read_text())
    assert [one["policy"] for one in found] == asked
    assert [one["kv"]["sparse"] > 0 for one in found] == [name == names[0] for name in asked]
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line in names] == asked
    assert alula(*TINY, "--verify", names[0], "--verify", names[0], "--tau", 0.01, "--out", out) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tau", "1.5"], "--tau 1.5: must"),
        (["--tau", "0.9", "--tau", "0"], "--tau 0.0: must"),
        (["--tau", "0.9", "--tau", "0.8", "--verify", "rkv:64+8"], "--tau 0.9 --tau 0.8: --verify takes one."),
        (["--verify", "rkv:64+8", "--verify", "rvk:64+8"], "did you mean 'rkv'"),
        (["--vetoed", "1.5"], "--vetoed 1.5: must lie between 0 and 1"),
        (["--vetoed", "0.1"], "of 20 prompts not one vetoed would still leave up to 16.1%; use --prompts 35 or more."),
        (["--vetoed", "0.1", "--verify", "rkv:64+8"], "drop --verify and --tau"),
        (["--vetoed", "0.2", "--methods", "rvk"], "did you mean 'rkv'"),
        (["--bin", "0"], "--bin 0: must be at least 1."),
        (["--length", "0"], "--length 0: must be at least 1."),
        (["--options", "{symbols: x}"], "task copy-last: symbols='x' must be a whole number."),
        (["--options", "{symbols"], "--options '{symbols': not YAML"),
        (["--data", "none.jsonl", "--options", "{symbols: 4}"], "data 'none.jsonl' does not exist"),
        (["--out", "/proc/none/c.json"], "--out /proc/none/c.json: cannot be written ("),
        (["--verify", "rkv:64+8", "--out", "/proc/none/v.json"], "--out /proc/none/v.json: cannot be written ("),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_refuses_in_one_sentence_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("alula.models.load.load_model", lambda *_, **__: pytest.fail("the work has begun"))
    assert alula(*TINY, *arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


@given(st.integers(1, 500), st.data())
def test_the_interval_of_a_share_holds_what_a_score_test_accepts(of, data):
    """Wilson's bounds are the shares at which |count - n p| = z sqrt(n p (1 - p))."""
    share = Share(data.draw(st.integers(0, of)), of)
    for bound in share.interval:
        apart, deviation = abs(share.count - of * bound), math.sqrt(of * bound * (1 - bound))
        np.testing.assert_allclose(apart, 1.959964 * deviation, atol=1e-6)
    assert share.interval[0] - 1e-9 <= share.value <= share.interval[1] + 1e-9
    assert Share(4 * share.count, 4 * of, samples=4).interval == share.interval, "four alike are worth one"


@given(st.integers(1, 400), st.integers(1, 4), st.floats(0.02, 0.5), st.data())
def test_so_many_prompts_tell_a_share_from_a_limit(prompts, samples, limit, data):
    """At that many the same share's interval leaves the limit out, at nine tenths of them it does not."""
    share = Share(data.draw(st.integers(0, prompts * samples)), prompts * samples, samples)
    needed = share.prompts_to_tell_from(limit)
    if needed is None or not 20 <= needed < 1e9:  # beyond, the two differ by less than float64 resolves
        return
    for count, told in ((needed + 1, True), (0.9 * needed, False)):
        lower, upper = Share(share.value * count * samples, count * samples, samples).interval
        assert (limit < lower or limit > upper) == told


def test_a_share_that_may_be_too_large_says_what_to_do():
    assert re.fullmatch(r"256 prompts .* 15%.* --prompts 2800.* larger budget\.", undecided(Share(35, 256)))
    assert "--prompts 200," in undecided(Share(6, 60))
    assert undecided(Share(24, 240, samples=4)) == undecided(Share(6, 60)), "rollouts of one prompt are worth one"
    for count in (9, 12):  # the limit itself, and more: further prompts would not help
        assert "--prompts" not in undecided(Share(count, 60))
        assert "larger budget" in undecided(Share(count, 60))


def test_vetoed_rollouts_are_counted_on_its_own_rollouts(loaded):
    sharp = copy.deepcopy(loaded)
    with torch.no_grad():
        sharp.model.base_model.norm.weight.mul_(12)  # a policy that is sure of every token is often surely wrong
    engine = Engine(sharp, page=PAGE, kv_memory="8MiB", max_rows=96, lookahead=4)
    schedule, policy = named("streaming:6+2,window=2,sinks=1", 12, 36)
    assert (schedule.budgets, schedule.width, policy.evict.budget) == ((6, 6, 6), 12, 6)
    found = verify(engine, schedule, policy, TEXT, None)
    rollouts = engine.generate([list(p) for p in PROMPTS], TEXT.sampling, policy)
    by_hand = 0
    for rollout, scores in zip(rollouts, engine.score(rollouts)):
        by_hand += any(math.exp(a - b) < 1e-4 for a, b in zip(scores.logprobs.tolist(), rollout.logprobs.tolist()))
    assert found.vetoed == Share(by_hand, len(PROMPTS))
    assert found.too_many_vetoed
    whole = verify(engine, *named("streaming:40+2,window=2,sinks=1", 12, 36), TEXT, None)
    assert whole.vetoed.count == 0
    assert not whole.too_many_vetoed


# -- the smallest budget by vetoes --------------------------------------------------------------------------


def made_verification(vetoed: int, of: int = 100, sparse: int = 30) -> Verification:
    return Verification(Schedule((16,), 12), None, made_tail([0.9]), Share(vetoed, of), replace(KV, sparse=sparse))


def found_in(counts: dict[int, int], limit=0.1, sweep=False, dense=()) -> Smallest:
    asked = []

    def measured(budget):
        asked.append(budget)
        return made_verification(counts[budget], sparse=0 if budget in dense else 30)

    found = smallest(EVICT, sorted(counts), limit, measured, sweep=sweep)
    assert sorted(asked) == sorted(found.tried), "nothing is measured twice"
    return found


@given(st.integers(1, 40), st.integers(0, 40))
def test_the_smallest_budget_is_bisected(rungs_, holding):
    """Where vetoes fall with the budget the answer is exact, and the one below it was measured too."""
    counts = {10 + i: 0 if i >= holding else 50 for i in range(rungs_)}
    found = found_in(counts)
    expected = 10 + holding if holding < rungs_ else None
    assert found.budget == expected
    assert len(found.tried) <= math.ceil(math.log2(rungs_ + 1))
    if expected is not None and holding > 0:
        assert not below(found.tried[expected - 1], 0.1)
    assert found_in(counts, sweep=True).budget == expected


def test_what_holds_is_measured_confident_and_sparse():
    counts = {8: 50, 12: 0, 16: 40, 20: 0, 24: 0}  # vetoes that do not fall with the budget
    assert found_in(counts).budget == 20
    assert found_in(counts, sweep=True).budget == 12
    assert found_in({8: 5}).budget is None, "5 of 100 may be 11 %"
    assert found_in({8: 2}).budget == 8
    none = found_in({8: 50, 12: 0, 16: 0}, dense=(12, 16))
    assert none.budget is None
    family = "streaming:buffer=2:window=2:sinks=1: "
    [remark] = remarks(none)
    assert remark.startswith(f"{family}budget 8 is not shown to hold and 12 was never sparse;")
    assert "--budgets" in remark
    assert "--length" in remark
    assert "budget 8 was never sparse: no sequence outgrew it" in remarks(found_in({8: 0}, dense=(8,)))[0]
    assert "8 is not shown to hold, the largest one tried; set larger --budgets" in remarks(found_in({8: 50}))[0]
    [remark] = remarks(found_in({8: 5, 12: 0}))
    assert remark.startswith(f"{family}the next smaller budget")
    assert "--prompts 139 " in remark
    for count in (9, 50):
        assert remarks(found_in({8: count, 12: 0})) == [], "a hair from the limit, and above it"
    assert "8 is the smallest budget tried" in remarks(found_in({8: 0}))[0]


def test_budgets_that_were_never_sparse_are_not_said_to_hold(tmp_path, capsys):
    out = tmp_path / "v.json"
    assert alula(*TINY, "--methods", "rkv", "--vetoed", 0.2, "--sweep", "--out", out) == 1
    said = capsys.readouterr().out
    assert said.count("0.0% (0.0% to 16.1%), never sparse. KV saved 0.0%") == 2
    assert "below" not in said
    assert "budget 12 was never sparse: no sequence outgrew it and its buffer of 128" in said
    assert "use a smaller budget or buffer" in said
    assert f"{out}: no budget was sparse" in said
    mixed = [found_in({8: 50, 12: 0}, dense=(12,))]
    assert re.fullmatch("no sparse budget .* less than 10% .* vetoed.", vetoed_verdict(mixed))


def test_budgets_to_try_where_none_are_named():
    [select] = parse_families("block-topk", (16,))
    [evict] = parse_families("rkv", (16,))
    assert rungs(evict, 512) == (16, 32, 48, 64, 80, 112, 144, 192, 240, 304, 384, 480)
    assert rungs(select, 512)[0] == 48, "a selector has three blocks at least"
    assert rungs(evict, 4096)[:4] == (128, 160, 208, 272)
    with pytest.raises(SettingError, match="a length of 40 leaves none for block-topk"):
        rungs(select, 40)


@pytest.fixture(scope="module")
def sure_model(tmp_path_factory):
    """A policy that is sure of every token is often surely wrong: its vetoes depend on the budget."""
    folder = tmp_path_factory.mktemp("sure")
    tokenizer = task_tokenizer(build("copy-last"))
    sure = attach_tokenizer(load_model("shape:tiny-llama"), tokenizer, resize=True)
    with torch.no_grad():
        sure.model.base_model.norm.weight.mul_(12)
    sure.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_budget_that_is_found_says_the_same_when_it_is_verified(sure_model, tmp_path, capsys):
    asked = [
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
    out, again = tmp_path / "found.json", tmp_path / "again.json"
    ladder = ["--budgets", "12,16,20,24,28,32,36,40,44"]
    assert alula("calibrate", *asked, *methods, *ladder, "--vetoed", 0.3, "--out", out) == 0
    said = capsys.readouterr().out
    both = json.loads(out.read_text())
    assert [one["family"] for one in both] == [
        "streaming:buffer=2:window=2:sinks=1",
        "block-topk:block=4:dense_layers=0",
    ]
    for one in both:
        chosen = next(t for t in one["tried"] if t["budget"] == one["budget"])
        assert chosen["holds"]
        assert chosen["vetoed"]["upper"] < 0.3
        assert any(not t["holds"] and t["budget"] < one["budget"] for t in one["tried"]), "some have too many"
        assert f"| {one['family']} | {one['budget']} | " in said
        assert all(f"{t['policy']}: vetoed {t['vetoed']['rollouts']} of 64" in said for t in one["tried"])
        assert alula("calibrate", *asked, "--verify", chosen["policy"], "--out", again) in (0, 1)
        verified = json.loads(again.read_text())
        assert (verified["vetoed"], verified["kv"]) == (chosen["vetoed"], chosen["kv"])
    few = ["--vetoed", 0.3, "--budgets", "12,16", "--out", out]
    assert alula("calibrate", *asked, "--methods", "streaming:buffer=2:window=2:sinks=1", *few) == 1


def test_what_to_verify(tmp_path):
    schedule = Schedule((16, 32), 12, "mine", None, "quest", 4, {"options": {"dense_layers": 1}})
    schedule.save(tmp_path / "mine.json")
    assert named(str(tmp_path / "mine.json"), 5, 50) == (schedule, policy_of(schedule))
    both = named("block-topk:24,block=4", 20, 50)
    assert both[0].budgets == (24, 24, 24)
    growing = tmp_path / "growing.json"
    Schedule((16, 32), 12, "growing").save(growing)
    both = named(f"streaming:{growing},window=4,sinks=1 & block-topk:48,block=4", 20, 50)
    assert both[0].name == "growing", "of two parts the one with a schedule says the bins"
    for text, message in (
        ("dense", "verify=dense: it is what others are measured against"),
        ("rkv", "has no budget"),
        ("rvk:24", "did you mean 'rkv'"),
        ("missing.json", "schedule file missing.json: there is no such file"),
        (str(tmp_path), "not a schedule .*directory.*`alula plan` writes one"),
    ):
        with pytest.raises(SettingError, match=message):
            named(text, 20, 50)


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
    fitted.save(tmp_path / "cost.json")
    assert load_cost(tmp_path / "cost.json", geometry) == FittedCost(geometry, fitted.constants)
    with pytest.raises(SettingError, match="no decode step of a model"):
        load_cost(path, replace(geometry, layers=9))
    with pytest.raises(SettingError, match="there is none"):
        load_cost(tmp_path / "none.json", geometry)
    assert asdict(geometry) == dense["shape"]


def test_the_dense_side_is_the_plain_model_where_the_sparse_policy_has_an_adapter(loaded, text):
    """A budget that covers everything leaves the adapter as the only difference between the two policies."""
    adapter = init_adapter(loaded.model, rank=2, alpha=4.0, targets=["all"], seed=0)
    for _, b in adapter.weights.values():
        b.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    engine = Engine(loaded, page=PAGE, kv_memory="8MiB", max_rows=32, sparse_adapter=adapter)
    changed = copy.deepcopy(loaded.model)
    attach(changed, adapter)
    found = engine.acceptance(text[:4], Sparsity(Evict("streaming", 64)))
    for rollout, alpha in zip(text[:4], found):
        ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
        with torch.no_grad():
            p, q = (
                model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].softmax(-1) for model in (loaded.model, changed)
            )
        torch.testing.assert_close(alpha, torch.minimum(p, q).sum(-1), rtol=0, atol=2e-5)
        assert alpha.min() < 0.95
