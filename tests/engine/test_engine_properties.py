"""The engine under random load: every sequence gets the same result as alone, and every page is released."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
from alula import Engine, Evict, Sampling, Schedule, Select, Sparsity
from alula.engine import engine as engine_module
from alula.engine import swapping
from alula.engine.block_manager import pages_for
from alula.engine.scheduler import Scheduler

TOKEN = {None: 2 * 2 * 2 * 12 * 4, "int8": 2 * 2 * 2 * 13}  # bytes: two layers, two KV heads, by KV dtype


class Watched(Scheduler):
    """A scheduler that is checked whenever the host has planned something (invariant 5)."""

    checks = swaps = 0

    def admit(self):
        admission = super().admit()
        self.check_pages()
        Watched.swaps += len(admission.swap_out)
        return admission

    def plan(self):
        plan = super().plan()
        self.check_pages()
        Watched.swaps += len(plan.swap_out)
        return plan

    def check_pages(self):
        Watched.checks += 1
        holders = Counter(page for s in (*self.running, *self.parked) for page in s.pages)
        holders.update(page for group in self.waiting for page in group.pages)
        assert len(holders) == self.pool.in_use
        assert all(self.pool._references[page] == count for page, count in holders.items())
        assert all(len(s.pages) == pages_for(s.kv_len, self.page) for s in self.running)
        assert 0 <= self.swap_used <= self.swap_memory


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setattr(engine_module, "Scheduler", Watched)
    Watched.checks = Watched.swaps = 0


@pytest.fixture(scope="module")
def loaded():
    return oracle.custom_model(3, layers=2)


@pytest.fixture(scope="module")
def alone(loaded):
    """A large engine for each page size, bucket and KV dtype, to run requests by themselves."""
    return {
        (page, rows, dtype): measured(
            Engine(loaded, page=page, kv_memory="1MiB", kv_dtype=dtype, max_rows=rows, buckets=(rows,))
        )
        for page in (2, 4)
        for rows in (1, 3, 8)
        for dtype in TOKEN
    }


def small_engine(loaded, pages, page, rows, kv_dtype=None, **options):
    options |= {"page": page, "kv_memory": pages * page * TOKEN[kv_dtype], "kv_dtype": kv_dtype}
    return measured(Engine(loaded, max_rows=rows, buckets=(rows,), **options))


def measured(engine):
    """Its pool is too small for the text that the engine would write itself."""
    engine.measure_queries([[0, 5, 9, 14, 22, 31, 8, 9] * 4])
    return engine


def assert_same_as_alone(rollouts, engine, requests):
    for request in requests:
        for single in engine.stream([request]):
            rollout = rollouts[request.id, single.sample_index]
            assert rollout.token_ids == single.token_ids
            assert torch.equal(rollout.logprobs, single.logprobs), "to the bit: the bucket is pinned"
            assert rollout.finish == single.finish
            assert (rollout.history is None) == (single.history is None)
            assert single.history is None or torch.equal(rollout.history, single.history)
            assert (rollout.kv.evictions, rollout.kv.peak_tokens) == (single.kv.evictions, single.kv.peak_tokens)


METHODS = ["rkv", "rkv-code", "snapkv", "h2o", "tova", "keydiff", "random", "streaming", "knorm"]
METHODS += ["vase", "vase-dkv", "triattention"]


@st.composite
def policies(draw, page, selector):
    kind = draw(st.sampled_from(["dense", "dense", "evict", "select", "both"]))
    evict = select = None
    if kind in ("evict", "both"):
        window, sinks = draw(st.integers(1, 3)), draw(st.integers(0, 2))
        budgets = draw(st.lists(st.integers(window + sinks, 16), min_size=1, max_size=2))
        budget = budgets[0] if len(budgets) == 1 else Schedule(tuple(budgets), width=draw(st.integers(3, 20)))
        evict = Evict(
            draw(st.sampled_from(METHODS)),
            budget,
            buffer=draw(st.integers(1, 6)),
            window=window,
            sinks=sinks,
            protect_prompt=draw(st.booleans()),
        )
    if kind in ("select", "both"):
        select = Select(selector, draw(st.integers(3, 6)) * page, block=page, dense_layers=1)
    return Sparsity(evict, select)


@st.composite
def requests(draw, page):
    selector = draw(st.sampled_from(["quest", "block-topk"]))
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(2, 95), min_size=1, max_size=18))
        stop = (3, 7, 11, 19, 40, 61) if draw(st.booleans()) else ()
        sampling = Sampling(
            n=draw(st.integers(1, 3)),
            max_new_tokens=draw(st.integers(1, 22)),
            stop=stop,
            temperature=draw(st.sampled_from([0.0, 0.8, 1.0])),
            seed=draw(st.integers(0, 9)),
        )
        drawn.append((prompt, sampling, draw(policies(page, selector))))
    return drawn


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_results_are_independent_of_batch_composition_under_random_load(data, loaded, alone):
    page = data.draw(st.sampled_from([2, 4]))
    wanted = data.draw(requests(page))
    pages = data.draw(st.integers(110 // page, 240 // page))
    rows, dtype = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.sampled_from([None, "int8"]))
    engine = small_engine(
        loaded,
        pages,
        page,
        rows,
        dtype,
        lookahead=data.draw(st.integers(1, 6)),
        prefill_tokens=data.draw(st.sampled_from([1, 16384])),
    )
    engine._in_flight = data.draw(st.integers(0, 1))
    submitted = []
    for i, (prompt, sampling, sparsity) in enumerate(wanted):
        (request,) = engine.requests([prompt], sampling, sparsity, record=True)
        request.prompt_index = i
        submitted.append(request)
    rollouts = {(submitted[r.prompt_index].id, r.sample_index): r for r in engine.stream(submitted)}
    assert engine.pool.in_use == 0
    assert_same_as_alone(rollouts, alone[page, rows, dtype], submitted)


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize(
    "sparsity",
    [Sparsity(), Sparsity(select=Select("block-topk", 20, 4, 1)), Sparsity(select=Select("quest", 20, 4, 0))],
    ids=["dense", "block-topk", "quest"],
)
@pytest.mark.slow
def test_swapped_out_and_restored_exactly(sparsity, in_flight, loaded, alone, monkeypatch):
    """The pool holds fewer than two of five sequences: younger ones are swapped out and restored bit for bit."""
    monkeypatch.setattr(swapping, "PIECE_BYTES", 3 * 4 * TOKEN[None] // 2)  # three pages
    engine = small_engine(loaded, 26, 4, 8, lookahead=3)
    engine._in_flight = in_flight
    sampling = Sampling(n=3, max_new_tokens=44, ignore_eos=True)
    submitted = engine.requests([[5, 6, 7] * 3, [8, 9]], sampling, sparsity, record=True)
    rollouts = {(submitted[r.prompt_index].id, r.sample_index): r for r in engine.stream(submitted)}
    assert Watched.swaps == sum(r.kv.swaps for r in rollouts.values()) >= 4
    assert Watched.checks > 50
    assert_same_as_alone(rollouts, alone[4, 8, None], submitted)


@pytest.mark.slow
def test_long_short_sparse_and_dense_in_a_small_pool(loaded, alone):
    """Churn: sequences of every kind are swapped; all results are exact."""
    engine = small_engine(loaded, 44, 4, 8, lookahead=4)
    evict = Sparsity(Evict("rkv", 12, buffer=4, window=3, sinks=2))
    both = Sparsity(Evict("snapkv", 20, buffer=4, window=3, sinks=2), Select("quest", 16, 4, 1))
    submitted = []
    for i, (prompt, new, policy) in enumerate(
        [(9, 100, None), (4, 90, evict), (30, 6, None), (6, 60, both), (12, 70, None), (25, 20, evict), (3, 110, None)]
    ):
        sampling = Sampling(n=1 + i % 2, max_new_tokens=new, ignore_eos=True)
        (request,) = engine.requests([list(range(5, 5 + prompt))], sampling, policy, record=True)
        request.prompt_index = i
        submitted.append(request)
    rollouts = {(submitted[r.prompt_index].id, r.sample_index): r for r in engine.stream(submitted)}
    assert len(rollouts) == 10
    assert Watched.swaps > 0
    assert any(r.kv.swaps for r in rollouts.values() if r.sparsity.evict), "evicting sequences are preempted too"
    assert_same_as_alone(rollouts, alone[4, 8, None], submitted)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_aborts_at_any_time_leave_the_others_alone(data, loaded, alone):
    rows = data.draw(st.sampled_from([1, 3, 8]))
    engine = small_engine(loaded, 50, 4, rows, lookahead=data.draw(st.integers(1, 5)))
    engine._in_flight = data.draw(st.integers(0, 1))
    evict = Sparsity(Evict("snapkv", 10, buffer=3, window=3, sinks=1))
    lengths = data.draw(st.lists(st.integers(1, 25), min_size=3, max_size=5))
    submitted = []
    for i, new in enumerate(lengths):
        sampling = Sampling(n=2, max_new_tokens=new, ignore_eos=True)
        (request,) = engine.requests([[5 + i, 6, 7]], sampling, evict if i % 2 else None, record=True)
        request.prompt_index = i
        submitted.append(request)
    victims = data.draw(st.sets(st.integers(0, len(submitted) - 1), min_size=1))
    moment = data.draw(st.integers(1, len(submitted)))
    rollouts, aborted = {}, {}
    for count, rollout in enumerate(engine.stream(submitted), 1):
        results = rollouts if rollout.finish != "aborted" else aborted
        results[submitted[rollout.prompt_index].id, rollout.sample_index] = rollout
        if count == moment:
            for victim in victims:
                engine.abort(submitted[victim].id)
    assert len(rollouts) + len(aborted) == 2 * len(submitted)
    assert {key[0] for key in aborted} <= {submitted[v].id for v in victims}
    assert engine.pool.in_use == 0
    assert_same_as_alone(
        rollouts, alone[4, rows, None], [r for r in submitted if all(key[0] != r.id for key in aborted)]
    )
