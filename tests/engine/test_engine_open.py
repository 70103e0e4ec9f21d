"""The open engine: requests of any kind at any time, pauses, weight updates, shared prefixes, bounded host memory."""

import copy
import gc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
from alula import Engine, Evict, Sampling, Schedule, Select, Sparsity
from alula.engine import engine_core as engine_module
from alula.engine import swapping
from alula.engine.rollout import Span
from alula.engine.swapping import available_memory, host_bytes, swap_out
from alula.errors import SettingError
from alula.heap import frozen_heap
from alula.models.load import LoadedModel
from alula.models.lora import init_adapter
from random_load import Load, Versions, assert_as_alone

PROMPTS = [list(range(5, 12)), [3, 4, 5], [9, 8] * 13]
RKV = Sparsity(Evict("rkv", 10, buffer=4, window=3, sinks=2))
H2O = Sparsity(Evict("h2o", 12, buffer=3, window=2, sinks=1))
QUEST = Sparsity(select=Select("quest", 12, 4, 1))
BLOCK = Sparsity(select=Select("block-topk", 12, 4, 0))
BOTH = Sparsity(Evict("snapkv", 20, buffer=4, window=3, sinks=2), Select("quest", 16, 4, 2))
SAMPLING = Sampling(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded():
    return oracle.custom_model(3, layers=2)


def engine_of(loaded, **options):
    engine = Engine(loaded, **({"page": 4, "kv_memory": "2MiB", "max_rows": 8, "lookahead": 3} | options))
    engine._in_flight = options.pop("in_flight", 1)
    return engine


def same(rollout, expected):
    assert rollout.token_ids == expected.token_ids
    assert torch.equal(rollout.logprobs, expected.logprobs)


@pytest.mark.parametrize("policy", [None, RKV, H2O, BLOCK, BOTH], ids=["dense", "rkv", "h2o", "block-topk", "both"])
def test_rollouts_that_change_their_row_stay_what_they_are(loaded, policy):
    """The last row's rollout is the longest; it moves each time a smaller batch holds all that are left."""
    engine, sizes = engine_of(loaded, buckets=(1, 2, 4, 8)), []
    step = engine.runner.step
    engine.runner.step = lambda state, size: sizes.append(size.rows) or step(state, size)
    samplings = [
        Sampling(max_new_tokens=n, ignore_eos=True, temperature=t) for n, t in zip(range(6, 62, 7), (1, 0.7) * 4)
    ]
    requests = [engine.requests([PROMPTS[i % 3]], s, policy, indices=[i])[0] for i, s in enumerate(samplings)]
    done = {rollout.prompt_index: rollout for rollout in engine.stream(requests)}
    assert sorted(set(sizes), reverse=True) == [8, 4, 2, 1]
    assert sizes == sorted(sizes, reverse=True)
    for i, sampling in enumerate(samplings):
        alone = engine_of(loaded).generate([PROMPTS[i % 3]], sampling, policy, indices=[i])[0]
        assert done[i].token_ids == alone.token_ids
        torch.testing.assert_close(done[i].logprobs, alone.logprobs, atol=1e-5, rtol=0)


def test_a_rollout_may_move_and_end_in_the_same_chunk(loaded):
    engine = engine_of(loaded, buckets=(1, 2), lookahead=4)
    given = [([PROMPTS[i]], Sampling(max_new_tokens=n, ignore_eos=True), RKV) for i, n in ((0, 5), (1, 7))]
    requests = [engine.requests(*each, indices=[i])[0] for i, each in enumerate(given)]
    done = {rollout.prompt_index: rollout for rollout in engine.stream(requests)}
    for i, each in enumerate(given):
        assert done[i].token_ids == engine_of(loaded).generate(*each, indices=[i])[0].token_ids


def test_collections_leave_out_what_was_there_before(loaded):
    engine = engine_of(loaded)
    for rollout in engine.stream(engine.requests(PROMPTS[:2], SAMPLING)):
        assert gc.get_freeze_count() > 10_000
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 10_000, f"rollout {rollout.prompt_index}: the outer block still holds"
    assert gc.get_freeze_count() == 0


def test_requests_of_every_kind_at_any_time_are_as_alone(loaded):
    engine, policies = engine_of(loaded, buckets=(8,)), [None, RKV, H2O, QUEST, BLOCK, BOTH]
    requests = [engine.requests([PROMPTS[i % 3]], SAMPLING, p, indices=[i])[0] for i, p in enumerate(policies)]
    done = {}
    for request in requests:
        engine.submit(request)
        engine.step()
    for rollout in engine.results():
        done[rollout.request_id] = rollout
    assert engine.pool.in_use == 0
    assert len(engine.runner.batches) == 4, "dense and evicting rows decode together, each selector by itself"
    for i, request in enumerate(requests):
        alone = engine_of(loaded, buckets=(8,)).generate([PROMPTS[i % 3]], SAMPLING, policies[i], indices=[i])[0]
        same(done[request.id], alone)


def test_dense_and_adapted_rows_together(loaded):
    adapter = init_adapter(loaded.model, 2, 4.0, ["q_proj"], seed=0)
    for _, b in adapter.weights.values():
        b.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    engine = engine_of(loaded, sparse_adapter=adapter, buckets=(8,))
    together = engine.generate(PROMPTS[:2] * 2, SAMPLING, [Sparsity(), RKV, RKV, Sparsity()])
    for i, policy in enumerate([Sparsity(), RKV, RKV, Sparsity()]):
        same(together[i], engine.generate([PROMPTS[i % 2]], SAMPLING, policy, indices=[i])[0])
    plain = engine_of(loaded, buckets=(8,)).generate([PROMPTS[1]], SAMPLING, RKV, indices=[1])[0]
    assert not torch.equal(together[1].logprobs, plain.logprobs), "the adapter changes sparse rows"


@pytest.mark.parametrize("in_flight", [0, 1])
def test_side_state_grows_under_running_rows(loaded, in_flight):
    """Ring, sums, budgets and banned tokens are sized by the requests so far; a larger one copies them."""
    engine = engine_of(loaded, buckets=(8,))
    engine._in_flight = in_flight
    small = [engine.requests([PROMPTS[0]], SAMPLING, p, indices=[i])[0] for i, p in enumerate([RKV, H2O])]
    growing = Sparsity(select=Select("quest", Schedule((12, 16), 10), 4, 1))
    fixed = engine.requests([PROMPTS[1]], SAMPLING, QUEST, indices=[2])[0]
    for request in [*small, fixed]:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    longer = Sampling(max_new_tokens=60, min_new_tokens=40, topk_logprobs=3, stop=(5, 6, 7))
    large = [
        engine.requests([PROMPTS[2]], longer, Sparsity(Evict("snapkv", 24, buffer=4, window=8, sinks=2)), indices=[3])[
            0
        ],
        engine.requests([PROMPTS[2]], longer, Sparsity(Evict("h2o", 40, buffer=4, window=2, sinks=2)), indices=[4])[0],
        engine.requests([PROMPTS[2]], longer, growing, indices=[5], keep_hidden=1)[0],
    ]
    for request in large:
        engine.submit(request)
    done = {r.request_id: r for r in engine.results()}
    for request in [*small, fixed, *large]:
        fresh = engine_of(loaded, buckets=(8,))
        (alone,) = fresh.stream([copy.copy(request)])
        same(done[request.id], alone)


def test_pause_keeps_the_kv_and_an_update_shows_in_the_spans(loaded):
    other = oracle.custom_model(3, layers=2)
    torch.manual_seed(1)
    for parameter in other.model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    engine = engine_of(LoadedModel(copy.deepcopy(loaded.model), None, "two", (1,)), lookahead=2)
    engine.submit(engine.requests([PROMPTS[0]], SAMPLING, RKV)[0])
    for _ in range(4):
        engine.step()
    engine.pause()
    (before,) = [len(s.tokens) for live in engine._live.values() for s in live]
    assert engine.step(), "nothing runs while paused"
    assert [len(s.tokens) for live in engine._live.values() for s in live] == [before]
    with pytest.raises(SettingError, match="paused"):
        next(engine.results())
    engine.update_weights(other.model.named_parameters(), version=7)
    engine.resume()
    (rollout,) = engine.drain()
    assert rollout.spans == [Span(before, 0), Span(24 - before, 7)]
    assert rollout.policy_version == 7
    unchanged = engine_of(loaded, lookahead=2).generate([PROMPTS[0]], SAMPLING, RKV)[0]
    assert rollout.token_ids[:before] == unchanged.token_ids[:before]
    assert not torch.allclose(rollout.logprobs[before:], unchanged.logprobs[before:])


def test_an_aborted_request_gives_its_pages_back(loaded):
    engine = engine_of(loaded)
    long = engine.requests([PROMPTS[2]], Sampling(n=3, max_new_tokens=80, ignore_eos=True), RKV)[0]
    short = engine.requests([PROMPTS[0]], SAMPLING, indices=[1])[0]
    for request in (long, short):
        engine.submit(request)
    engine.step()
    held = engine.pool.in_use
    engine.abort(long.id)
    engine.step()
    assert engine.pool.in_use < held
    finishes = {r.request_id: r.finish for r in engine.results()}
    assert finishes == {long.id: "aborted", short.id: "length"}
    assert engine.pool.in_use == 0


def test_a_failed_launch_ends_what_was_running_and_leaks_nothing(loaded, monkeypatch):
    engine = engine_of(loaded)
    stream = engine.stream(engine.requests(PROMPTS, Sampling(n=2, max_new_tokens=30, ignore_eos=True), RKV))
    monkeypatch.setattr(engine.runner, "decode", lambda *a: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        next(stream)
    monkeypatch.undo()
    assert engine.pool.in_use == 0
    assert len(engine.generate(PROMPTS, SAMPLING, RKV)) == 3


def test_a_request_whose_buffers_find_no_memory_is_not_queued(loaded, monkeypatch):
    engine = engine_of(loaded)
    engine.submit(engine.requests([PROMPTS[0]], SAMPLING, RKV, session=True)[0])
    (first,) = engine.drain()

    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "batch", fail)
        with pytest.raises(torch.OutOfMemoryError):
            engine.submit(engine.requests([PROMPTS[1]], SAMPLING, H2O)[0])
        with pytest.raises(torch.OutOfMemoryError):
            engine.extend(first.session, [40, 41])
    assert engine._scheduler.idle
    engine.extend(first.session, [40, 41])
    (second,) = engine.drain()
    assert second.token_ids[:26] == [*first.token_ids, 40, 41]
    assert len(engine.generate(PROMPTS, SAMPLING, H2O)) == 3


def test_a_failed_swap_never_leaves_a_session_without_its_kv(loaded, monkeypatch):
    """Host memory that cannot be allocated ends what runs; an idle session is computed again in its next turn."""
    sampling, given = Sampling(max_new_tokens=20, seed=3, ignore_eos=True), [40, 41]

    def first_turn(engine):
        engine.submit(engine.requests([PROMPTS[0]], sampling, session=True)[0])
        return engine.drain()[0].session

    def fail(*arguments):
        raise torch.OutOfMemoryError("no pinned memory")

    roomy = engine_of(loaded)
    roomy.extend(first_turn(roomy), given)
    (expected,) = roomy.drain()
    for sleeping in (False, True):
        engine = engine_of(loaded, kv_memory=30 * 4 * 2 * 2 * 2 * 12 * 4)
        session = first_turn(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "swap_out", fail)
            with pytest.raises(torch.OutOfMemoryError):
                engine.sleep() if sleeping else engine.generate([[i, 3, 4] for i in range(20, 28)], SAMPLING)
        assert engine.cache.resident
        assert (engine.pool.in_use, engine._scheduler.swap_used) == (0, 0)
        engine.extend(session, given)
        (second,) = engine.drain()
        assert second.token_ids == expected.token_ids
        assert second.kv.restarts == 1


@pytest.mark.parametrize(
    "policy", [Sparsity(Evict("h2o", 20, buffer=3, window=2, sinks=1)), QUEST], ids=["sums", "kind"]
)
def test_requests_may_come_while_the_engine_sleeps(policy, loaded):
    """They need larger buffers than before, or rows of a new kind."""
    engine = engine_of(loaded)
    running, coming = (engine.requests([p], SAMPLING, s)[0] for p, s in zip(PROMPTS, (H2O, policy)))
    engine.submit(running)
    engine.step()
    engine.sleep()
    engine.submit(coming)
    assert not any(buffers.resident for buffers in engine.runner.buffers())
    engine.wake()
    done = {rollout.request_id: rollout for rollout in engine.drain()}
    for request in (running, coming):
        (alone,) = engine_of(loaded).stream([copy.copy(request)])
        assert done[request.id].token_ids == alone.token_ids
        torch.testing.assert_close(done[request.id].logprobs, alone.logprobs, rtol=0, atol=1e-5)


def test_statistics_of_queries_follow_the_weights_not_the_arrivals(loaded):
    """TriAttention after an update under way: a newcomer must not be what makes running rows notice it."""
    policy = Sparsity(Evict("triattention", 10, buffer=4, window=3, sinks=2))
    rollouts = []
    for newcomers in (0, 1):
        engine = engine_of(LoadedModel(copy.deepcopy(loaded.model), None, "own", (1,)), buckets=(8,))
        engine.measure_queries([PROMPTS[2]])
        requests = engine.requests(PROMPTS[:2], Sampling(max_new_tokens=60, ignore_eos=True), policy)
        engine.submit(requests[0])
        for _ in range(4):
            engine.step()
        engine.update_weights([(name, 1.5 * weight) for name, weight in engine.model.named_parameters()])
        for request in requests[1 : 1 + newcomers]:
            engine.submit(request)
        rollouts += [rollout for rollout in engine.drain() if rollout.request_id == requests[0].id]
    same(*rollouts)


# -- shared prefixes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, RKV, QUEST, BOTH, H2O], ids=["dense", "rkv", "quest", "both", "h2o"])
def test_samples_that_arrive_apart_share_their_prompt(policy, loaded):
    engine, prompt = engine_of(loaded, kv_memory="4MiB"), [*range(10, 40), 50]
    requests = [engine.requests([prompt], SAMPLING, policy, indices=[i])[0] for i in range(4)]
    for request in requests[:3]:  # together: the prompt is computed once, though no page was cached before
        engine.submit(request)
    engine.step()
    engine.submit(requests[3])  # later: while the others run
    done = {r.request_id: r for r in engine.results()}
    hits = [done[r.id].kv.cached_prompt_tokens for r in requests]
    again = max(1, (policy.evict and requests[0].evictor.queries) or 0) if policy else 1
    shared = 0 if policy is H2O else (len(prompt) - again) // 4 * 4
    assert hits == [0, shared, shared, shared]
    alone = engine_of(loaded, buckets=(8,))
    for i, request in enumerate(requests):
        expected = alone.generate([prompt], SAMPLING, policy, indices=[i], record=True)[0]
        assert done[request.id].token_ids == expected.token_ids
        torch.testing.assert_close(done[request.id].logprobs, expected.logprobs, rtol=0, atol=2e-5)
    assert engine.pool.in_use == 0


def test_prefixes_outlive_requests_only_where_asked_for_and_never_an_update(loaded):
    prompt = list(range(10, 40))
    for keep in (False, True):
        own = LoadedModel(copy.deepcopy(loaded.model), None, "own", (1,))
        engine = engine_of(own, keep_prefixes=keep)

        def hits(engine=engine):
            return engine.generate([prompt], SAMPLING)[0].kv.cached_prompt_tokens

        assert [hits(), hits()] == [0, 28 if keep else 0]
        engine.update_weights([])
        assert [hits(), hits()] == [0, 28 if keep else 0]
        with torch.no_grad():  # an optimizer that shares the weights
            next(engine.model.parameters()).mul_(1.01)
        assert [hits(), hits()] == [0, 28 if keep else 0]
        engine.sleep()
        engine.wake()
        assert hits() == 0


def test_an_update_ends_prefixes_even_if_it_repeats_a_version(loaded):
    engine, prompt = engine_of(LoadedModel(copy.deepcopy(loaded.model), None, "own", (1,))), list(range(10, 40))
    before, after = (engine.requests([prompt], SAMPLING, indices=[i])[0] for i in range(2))
    engine.submit(before)
    engine.step()
    engine.update_weights([(name, 1.1 * weight) for name, weight in engine.model.named_parameters()], version=0)
    engine.submit(after)
    done = {rollout.request_id: rollout for rollout in engine.drain()}
    assert done[after.id].kv.cached_prompt_tokens == 0
    fresh = engine_of(LoadedModel(engine.model, None, "updated", (1,))).generate([prompt], SAMPLING, indices=[1])[0]
    assert done[after.id].token_ids == fresh.token_ids


def test_a_turn_that_is_computed_again_finds_no_prefix_of_an_earlier_call(loaded):
    engine, prompt = engine_of(loaded, swap_memory=0), list(range(10, 40))
    engine.submit(engine.requests([prompt], SAMPLING, session=True)[0])
    (turn,) = engine.drain()
    engine.sleep()  # drops the session's KV
    engine.wake()
    engine.generate([prompt], SAMPLING)
    engine.extend(turn.session, [3])
    (turn,) = engine.drain()
    assert (turn.kv.restarts, turn.kv.cached_prompt_tokens) == (1, 0)


def test_cached_prefixes_make_room_for_live_sequences(loaded):
    """The pool is full of cached prompts; a sequence that needs all of it gets all of it."""
    pages = 24
    engine = engine_of(loaded, kv_memory=pages * 4 * 2 * 2 * 2 * 12 * 4, keep_prefixes=True, max_rows=2)
    for i in range(6):
        engine.generate([[i, *range(10, 30)]], Sampling(max_new_tokens=2))
    assert engine.pool.in_use == 0
    assert len(engine.pool._cached) > 10
    (rollout,) = engine.generate([[7, 8]], Sampling(max_new_tokens=85, ignore_eos=True))
    assert len(rollout) == 85
    assert rollout.kv.swaps == 0


# -- bounded host memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, RKV, H2O, QUEST, BOTH], ids=["dense", "rkv", "h2o", "quest", "both"])
@pytest.mark.parametrize("swap_memory", ["8KiB", 0])
@pytest.mark.slow
def test_a_full_host_restarts_the_youngest_with_the_same_tokens(policy, swap_memory, loaded):
    engine = engine_of(loaded, kv_memory=30 * 4 * 2 * 2 * 2 * 12 * 4, buckets=(8,), swap_memory=swap_memory)
    sampling = Sampling(n=4, max_new_tokens=44, ignore_eos=True)
    rollouts = engine.generate(PROMPTS[:2], sampling, policy, record=True)
    assert sum(r.kv.restarts for r in rollouts) > 0
    alone = engine_of(loaded, buckets=(8,), kv_memory="4MiB").generate(PROMPTS[:2], sampling, policy, record=True)
    for rollout, expected in zip(rollouts, alone):
        same(rollout, expected)
        assert (rollout.kv.evictions, rollout.kv.mean_tokens) == (expected.kv.evictions, expected.kv.mean_tokens)
        assert (rollout.history is None) or torch.equal(rollout.history, expected.history)
    assert engine._scheduler.swap_used == 0


def test_the_default_is_a_quarter_of_what_the_container_may_use(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 800 kB\n")
    group = tmp_path / "group"
    group.write_text("0::/slurm/job\n")

    def limited(folder, limit, used):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text(f"{used}\n")
        return available_memory(meminfo, tmp_path, group)

    assert available_memory(meminfo, tmp_path, group) == 800 * 1024
    assert limited(".", "max", 100000) == 800 * 1024
    assert limited(".", 300000, 100000) == 200000
    assert limited("slurm/job", 50000, 10000) == 40000, "the tightest group around the process"
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("30000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1000\n")
    assert available_memory(meminfo, tmp_path, group) == 29000, "version 1"


# -- everything at once ------------------------------------------------------------------------------------

LOAD = Load([Sparsity(), Sparsity(), RKV, H2O, QUEST, BLOCK, BOTH], page=4, pages=(30, 60))


@pytest.fixture(scope="module")
def versions(loaded):
    return Versions(loaded)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_arrivals_aborts_pauses_updates_sessions_and_swaps(data, versions, monkeypatch):
    with monkeypatch.context() as patch:
        assert_as_alone(data, LOAD, versions, patch)


def test_host_memory_of_a_swapped_sequence_is_counted_as_it_is_allocated(loaded, monkeypatch):
    """Pieces of two pages; in pinned memory each takes a power of two."""
    engine = engine_of(loaded)
    (request,) = engine.requests([list(range(5, 30))], Sampling(max_new_tokens=8, ignore_eos=True))
    engine.submit(request)
    engine.step()
    (sequence,) = engine._live[request.id]
    each = engine.cache.parts[0][:, 0].nbytes
    monkeypatch.setattr(swapping, "PIECE_BYTES", 2 * each)
    pages, geometry = len(sequence.pages), engine.geometry
    assert pages % 2
    (out,) = engine._scheduler.swap_all()
    swap_out(engine.runner, out)
    sizes = [piece.nbytes for part in sequence.saved.parts for piece in part]
    assert sizes == 2 * ((pages // 2) * [2 * each] + [each])
    sequence.pages = list(range(pages))
    page, itemsize = engine.page, engine.dtype.itemsize
    assert host_bytes(sequence, geometry, page, itemsize, pinned=False) == sum(sizes)
    assert host_bytes(sequence, geometry, page, itemsize, pinned=True) == sum(1 << (n - 1).bit_length() for n in sizes)


@pytest.fixture(scope="module")
def fused_versions(loaded):
    return Versions(loaded, fused=True)


LONG = Load([RKV, H2O, BOTH], page=4, pages=(18, 30), new=60, prompt=8)
"""Evicted texts that are longer than the pool: up to 68 tokens and further turns."""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_fused_steps_under_the_same_load(data, fused_versions, monkeypatch):
    """The layers in few kernels, as `compiled` runs them."""
    load = data.draw(st.sampled_from([LOAD, LONG]))
    with monkeypatch.context() as patch:
        assert_as_alone(data, load, fused_versions, patch)
