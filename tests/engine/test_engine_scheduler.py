"""Scheduler and block manager without a model: every plan runs on a simulated device that checks each page."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.engine import scheduler as scheduler_module
from alula.engine.block_manager import BlockManager
from alula.engine.rollout import Sampling
from alula.engine.sequence import Request, kind_of
from alula.sparsity.policy import DENSE, Evict, Select, Sparsity
from alula.sparsity.schedule import Schedule
from simulated import Arrival, Simulation

PAGES = st.sampled_from([1, 2, 4])


@st.composite
def evictions(draw):
    window, sinks = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    budgets = draw(st.lists(st.integers(window + sinks, 14), min_size=1, max_size=3))
    budget = budgets[0] if len(budgets) == 1 else Schedule(tuple(budgets), width=draw(st.integers(1, 12)))
    return Evict(
        draw(st.sampled_from(["streaming", "knorm"])),
        budget,
        buffer=draw(st.integers(1, 6)),
        window=window,
        sinks=sinks,
        protect_prompt=draw(st.booleans()),
    )


@st.composite
def arrivals(draw, page):
    new = draw(st.integers(1, 24))
    kind = draw(st.sampled_from(["dense", "dense", "evict", "evict", "select", "both"]))
    select = Select("quest", 3 * page, block=page) if kind in ("select", "both") else None
    evict = draw(evictions()) if kind in ("evict", "both") else None
    return Arrival(
        at=draw(st.integers(0, 12)),
        prompt=draw(st.integers(1, 18)),
        new=new,
        stops=draw(st.lists(st.integers(1, new) | st.just(new), min_size=1, max_size=4)),
        sparsity=Sparsity(evict, select),
        abort_at=draw(st.none() | st.none() | st.integers(0, 20)),
    )


@settings(max_examples=500, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_pages_are_conserved_and_all_sequences_finish(data):
    page = data.draw(PAGES)
    simulation = Simulation(
        pages=data.draw(st.integers(8, 60)),
        page=page,
        rows=data.draw(st.integers(1, 6)),
        lookahead=data.draw(st.integers(1, 7)),
        ahead=data.draw(st.integers(0, 1)),
        prefill_tokens=data.draw(st.sampled_from([1, 20, 1000])),
        host=data.draw(st.sampled_from([0, 5, 20, 10**6])),
        buckets=data.draw(st.sampled_from([(), (1, 2, 3, 4, 6), (2, 6)])),
    )
    simulation.run(data.draw(st.lists(arrivals(page), min_size=1, max_size=6)))


SMALL = Sparsity(Evict("streaming", 4, buffer=2, window=1, sinks=1))
OLD_AND_NEW = {"rows": 4, "lookahead": 1, "ahead": 0, "page": 1}


def test_dense_sequences_are_swapped_out_and_come_back():
    for ahead in (0, 1):
        simulation = Simulation(pages=30, page=2, rows=6, lookahead=4, ahead=ahead)
        simulation.run([Arrival(0, 8, 30, [30, 30, 30, 9], DENSE), Arrival(2, 5, 30, [30, 30], DENSE)])
        assert simulation.swaps > 0
        assert simulation.rejected == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_long_rollouts_in_high_rows_move_down(ahead):
    simulation = Simulation(pages=200, page=2, rows=8, lookahead=4, ahead=ahead, buckets=(1, 2, 4, 8))
    simulation.run([Arrival(0, 8, 60, [8, 8, 8, 24, 8, 24, 8, 60], DENSE)])
    assert simulation.moves == 3, "the sixth and the last once four rows hold all, the last again when it is alone"
    simulation = Simulation(pages=200, page=2, rows=8, lookahead=4, ahead=ahead)
    simulation.run([Arrival(0, 8, 60, [8, 8, 8, 24, 8, 24, 8, 60], DENSE)])
    assert simulation.moves == 0, "nothing is padded"


def test_the_last_sequence_frees_the_pages_of_a_waiting_prompt():
    """It was swapped out while its own prompt stays cached for rollouts that have yet to start."""
    for pages in range(26, 45):
        simulation = Simulation(pages=pages, page=1, rows=3, lookahead=4, ahead=0)
        simulation.run([Arrival(0, 8, 16, [16, 16, 16, 3], DENSE), Arrival(0, 8, 16, [16, 16, 16, 3], DENSE)])
        assert simulation.rejected == 0


def test_rollouts_of_one_token_do_not_preempt_older_ones():
    """They reserve as others do, but their only token came with the prompt."""
    for pages in range(22, 40):
        simulation = Simulation(pages=pages, **OLD_AND_NEW)
        simulation.run([Arrival(0, 4, 16, [16], DENSE), Arrival(3, 4, 1, [1], SMALL), Arrival(3, 6, 1, [1], SMALL)])
        assert simulation.swaps == simulation.rejected == 0


def test_an_admitted_sequence_is_not_swapped_out_at_once():
    """Six rollouts whose prompt fills its pages exactly: they start only as fast as their next pages exist."""
    simulation = Simulation(pages=12, page=4, rows=8, lookahead=4, ahead=0)
    simulation.run([Arrival(0, 16, 5, [5] * 6, DENSE)])
    assert simulation.swaps == 0


def test_decoding_waits_for_prompts_while_the_batch_would_grow_by_a_quarter():
    """Eight prompts, one a pass: one chunk of seven rows, then the eighth has its own."""
    simulation = Simulation(pages=200, page=2, rows=8, lookahead=16, ahead=1, prefill_tokens=1)
    simulation.run([Arrival(0, 8, 9, [9], DENSE) for _ in range(8)])
    assert simulation.launches == 2


def test_decoding_does_not_wait_for_a_prompt_that_has_no_room():
    """One row decodes alone: the second prompt would fit neither a pass nor the pool."""
    scheduler = Simulation(pages=12, page=2, rows=8, lookahead=4, ahead=0, prefill_tokens=1).scheduler
    for _ in range(2):
        request = Request(0, list(range(14)), Sampling(max_new_tokens=4), DENSE, frozenset())
        request.kind = kind_of(DENSE, adapted=False)
        request.prompt_ids = [len(scheduler.waiting), *request.prompt_ids]
        scheduler.submit(request)
    assert len(scheduler.admit().start) == 1
    assert len(scheduler.plan().chunks) == 1


def test_decoding_does_not_wait_for_rollouts_of_one_token():
    """They never decode, so a stream of them would hold up everybody else for good."""
    scheduler = Simulation(pages=60, page=2, rows=8, lookahead=4, ahead=0, prefill_tokens=1).scheduler
    for number, new in enumerate([20, 1, 1, 1]):
        request = Request(number, list(range(4)), Sampling(max_new_tokens=new), DENSE, frozenset())
        request.kind = kind_of(DENSE, adapted=False)
        scheduler.submit(request)
    assert len(scheduler.admit().start) == 1
    assert len(scheduler.plan().chunks) == 1


def test_a_restarted_sequence_takes_the_pages_of_a_prompt_behind_it():
    """Host memory is full, so it restarts from its prompt; when all others have ended, only the prompt behind it, whose
    other rollouts have yet to start, holds pages."""
    evict = Sparsity(Evict("streaming", 4, buffer=4, window=1, sinks=1))
    simulation = Simulation(pages=39, page=1, rows=3, lookahead=1, ahead=0, prefill_tokens=20, host=5)
    stops = {(1, 12): [17, 2], (4, 23): [17, 7, 7, 10], (5, 19): [14, 5]}
    groups = [Arrival(at, prompt, 24, stop, evict) for (at, prompt), stop in stops.items()]
    simulation.run([*groups, Arrival(6, 20, 8, [5, 4], DENSE)])
    assert simulation.rejected == 0


@pytest.mark.parametrize("evict", [None, Evict("streaming", 48, buffer=16, window=2, sinks=1)], ids=["dense", "evict"])
def test_a_swapped_sequence_resumes_when_it_can_stay(evict, monkeypatch):
    """Sixteen sequences in the room of a few at full length: fewer swaps, and hardly more chunks."""
    counts = []
    for steps in (scheduler_module.RESUMED_STEPS, 0):
        monkeypatch.setattr(scheduler_module, "RESUMED_STEPS", steps)
        simulation = Simulation(pages=400, page=2, rows=16, lookahead=4, ahead=1)
        simulation.run([Arrival(0, 8, 192, [192 - 4 * i], Sparsity(evict)) for i in range(16)])
        counts.append((simulation.swaps, simulation.launches))
    (swaps, launches), (more_swaps, fewest) = counts
    assert swaps < 0.9 * more_swaps
    assert launches < 1.1 * fewest


def test_long_and_short_sequences_mixed():
    """A long sequence under churn of short ones runs all the time and delays none of them."""
    simulation = Simulation(pages=40, page=2, rows=4, lookahead=2, ahead=1)
    short = [Arrival(i, 4, 4, [4, 3], DENSE if i % 2 else SMALL) for i in range(20)]
    simulation.run([Arrival(0, 6, 60, [60], DENSE), *short])
    assert simulation.launches <= 45  # 60 tokens in chunks of two, and a few for the stragglers


def test_evicting_sequences_share_a_prompt_and_free_it():
    simulation = Simulation(pages=60, page=2, rows=8, lookahead=3, ahead=0)
    evict = Sparsity(Evict("streaming", 6, buffer=3, window=2, sinks=1))
    simulation.run([Arrival(0, 17, 40, [40] * 4, evict)])
    assert simulation.evictions >= 12
    assert simulation.swaps == 0
    assert simulation.pool.peak <= 9 + 4 * 9


def test_many_evictions_at_once_are_batched_and_need_little_scratch():
    """Twelve sequences in step: as few launches as free pages allow, never none."""
    simulation = Simulation(pages=100, page=2, rows=12, lookahead=4, ahead=0)
    evict = Sparsity(Evict("streaming", 6, buffer=2, window=2, sinks=1))
    simulation.run([Arrival(0, 5, 41, [41] * 12, evict)])
    assert simulation.launches < simulation.evictions < 12 * 20


def test_the_pool_counts_references():
    pool = BlockManager(6)
    assert (pool.usable, pool.free, pool.in_use) == (5, 5, 0)
    first, second = pool.allocate(2), pool.allocate(1)
    assert 0 not in first + second
    pool.share(first)
    assert [pool._references[p] for p in first + second] == [2, 2, 1]
    assert pool.release(first) == 0
    assert pool.release(first + second) == 3
    assert (pool.free, pool.peak) == (5, 3)
    with pytest.raises(AssertionError, match="6 pages wanted, 5 free"):
        pool.allocate(6)
    with pytest.raises(AssertionError, match="is free"):
        pool.release(first)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(second)
