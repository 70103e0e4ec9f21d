"""Sessions: a finished turn keeps its cache, the next one appends given tokens and samples on."""

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import oracle
from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.engine.rollout import Span
from alula.errors import SettingError
from alula.models.load import LoadedModel
from alula.sparsity.evict import METHODS as EVICTORS

PROMPT = [5, 9, 14, 22, 31, 8, 9]
GIVEN = [[40, 41, 42], [50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62], [7]]
POLICIES = {
    "dense": Sparsity(),
    **{name: Sparsity(Evict(name, 12, buffer=4, window=3, sinks=2)) for name in EVICTORS},
    "protected": Sparsity(Evict("rkv", 10, buffer=3, window=3, sinks=1, protect_prompt=True)),
    "quest": Sparsity(select=Select("quest", 12, 4, 1)),
    "block-topk": Sparsity(select=Select("block-topk", 12, 4, 1)),
    "rkv and quest": Sparsity(Evict("rkv", 20, buffer=4, window=3, sinks=2), Select("quest", 12, 4, 1)),
}


@pytest.fixture(scope="module")
def loaded():
    return oracle.custom_model(3)


def engine_of(loaded, **options):
    options = {"page": 4, "kv_memory": "2MiB", "max_rows": 8, "lookahead": 3} | options
    engine = Engine(loaded, **options)
    engine._in_flight = 1
    return engine


def play(engine, policy, sampling, given=GIVEN, between=lambda turn: None, prompt=PROMPT):
    """A session of several turns; returns the rollout of each."""
    (request,) = engine.requests([prompt], sampling, policy, record=True, session=True)
    engine.submit(request)
    turns = engine.drain()
    for turn, tokens in enumerate(given):
        between(turn)
        engine.extend(turns[-1].session, tokens)
        turns += engine.drain()
    return turns


def assert_replays(model, rollout, page=4):
    """The log-probs of all sampled tokens are those of a full forward pass under the recorded masks."""
    expected = oracle.logprobs(oracle.replay(model, rollout, page), rollout)
    sampled = rollout.sampled
    torch.testing.assert_close(rollout.logprobs[sampled], expected[sampled], rtol=0, atol=2e-5)
    assert rollout.logprobs[~sampled].isnan().all()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("stops", [False, True], ids=["to the end", "until a stop token"])
def test_every_turn_equals_a_replay_of_what_it_saw(name, stops, loaded):
    engine = engine_of(loaded)
    sampling = Sampling(max_new_tokens=13, seed=4, ignore_eos=not stops, stop=tuple(range(2, 12)) if stops else ())
    turns = play(engine, POLICIES[name], sampling)
    for before, turn in pairwise(turns):
        assert turn.token_ids[: len(before)] == before.token_ids
        assert turn.session == before.session
    last = turns[-1]
    assert_replays(loaded.model, last)
    given = [tokens for span, tokens in split(last) if span.version is None]
    assert given == GIVEN
    assert stops or last.finish == "length"
    assert not stops or any(turn.finish == "stop" for turn in turns)
    if POLICIES[name].evict:
        assert last.kv.evictions > 0
    engine.close(last.session)
    assert engine.pool.in_use == 0
    assert engine._scheduler.swap_used == 0


def split(rollout):
    start = 0
    for span in rollout.spans:
        yield span, rollout.token_ids[start : start + span.tokens]
        start += span.tokens


@pytest.mark.parametrize("name", [name for name in POLICIES if POLICIES[name].select is None])
def test_given_tokens_equal_forced_decoding(name, loaded):
    """The same tokens, decoded one by one from the prompt: kept sets equal, log-probs too."""
    engine = engine_of(loaded)
    last = play(engine, POLICIES[name], Sampling(max_new_tokens=9, seed=1, ignore_eos=True))[-1]
    (forced,) = engine.score([replace(last, spans=[])], POLICIES[name], record=True)
    assert POLICIES[name].evict is None or torch.equal(last.history, forced.history)
    torch.testing.assert_close(last.logprobs[last.sampled], forced.logprobs[last.sampled], rtol=0, atol=1e-5)
    assert forced.logprobs.isfinite().all()


@pytest.mark.parametrize("name", POLICIES)
def test_scores_and_acceptance_are_those_of_the_session(name, loaded):
    """In other batches and chunks, in a pool that swaps: what a selector read, too."""
    engine, sampling = engine_of(loaded), Sampling(max_new_tokens=9, seed=1, ignore_eos=True, topk_logprobs=2)
    (request,) = engine.requests([PROMPT], sampling, POLICIES[name], record=True, session=True, keep_hidden=1)
    engine.submit(request)
    turns = engine.drain()
    for tokens in GIVEN:
        engine.extend(turns[-1].session, tokens)
        turns += engine.drain()
    measured = engine.acceptance(turns)
    again = engine_of(loaded, kv_memory=f"{28 * 4 * engine.geometry.kv_token_bytes}B", lookahead=5)
    again.cache.query_statistics, again._queries_seen = engine.cache.query_statistics, engine._queries_seen
    decoded = again.acceptance([replace(turn, hidden=None) for turn in turns], POLICIES[name])
    scores = again.score(turns, POLICIES[name], topk=2, record=True)
    for turn, score, alpha, expected in zip(turns, scores, decoded, measured):
        sampled = turn.sampled
        torch.testing.assert_close(score.logprobs[sampled], turn.logprobs[sampled], rtol=0, atol=1e-5)
        torch.testing.assert_close(alpha[sampled], expected[sampled], rtol=0, atol=1e-5)
        assert torch.equal(score.topk_ids[sampled], turn.topk_ids[sampled])
        assert name == "dense" or score.logprobs[~sampled].isnan().all()
        assert alpha[~sampled].isnan().all()
        assert turn.history is None or torch.equal(score.history, turn.history)
        assert len(score.selected or ()) == len(turn.selected or ())
        for ours, theirs in zip(score.selected or (), turn.selected or ()):
            assert all(a is b or torch.equal(a, b) for a, b in zip(ours, theirs))
    assert again.pool.in_use == 0


def test_given_tokens_have_no_logprob_and_are_masked(loaded):
    engine = engine_of(loaded)
    turns = play(engine, Sparsity(), Sampling(max_new_tokens=5, ignore_eos=True), GIVEN[:1])
    assert turns[0].spans == [Span(5, 0)]
    assert turns[1].spans == [Span(5, 0), Span(3, None), Span(5, 0)]
    assert turns[1].sampled.tolist() == [True] * 5 + [False] * 3 + [True] * 5
    assert [math.isnan(x) for x in turns[1].logprobs.tolist()] == [False] * 5 + [True] * 3 + [False] * 5
    assert turns[1].kv.given_tokens == 4, "the last sampled token goes in with the three given ones"


@pytest.mark.parametrize("name", ["dense", "rkv", "h2o", "quest", "rkv and quest"])
def test_swaps_and_sleep_between_turns_change_nothing(name, loaded):
    sampling = Sampling(max_new_tokens=9, seed=2, ignore_eos=True)
    expected = play(engine_of(loaded), POLICIES[name], sampling)[-1]

    def slept(turn):
        engine.sleep()
        engine.wake()

    engine = engine_of(loaded)
    rollout = play(engine, POLICIES[name], sampling, between=slept)[-1]
    assert rollout.token_ids == expected.token_ids
    assert torch.equal(rollout.logprobs[rollout.sampled], expected.logprobs[expected.sampled])
    assert rollout.kv.swaps == len(GIVEN)

    engine = engine_of(loaded, swap_memory=0)  # no room on the host: every turn is computed again, with its tokens
    rollout = play(engine, POLICIES[name], sampling, between=slept)[-1]
    assert rollout.token_ids == expected.token_ids
    assert rollout.kv.restarts == len(GIVEN)
    assert_replays(loaded.model, rollout)


def test_a_session_goes_on_under_new_weights(loaded):
    engine = engine_of(LoadedModel(copy.deepcopy(loaded.model), None, "own", (1,)))
    other = oracle.custom_model(3).model
    for parameter in other.parameters():
        parameter.data *= 1.1

    def update(turn):
        engine.update_weights(other.named_parameters(), version=turn + 5)

    sampling = Sampling(max_new_tokens=6, ignore_eos=True)
    first, second, third = play(engine, POLICIES["rkv"], sampling, GIVEN[:2], between=update)
    assert third.spans == [Span(6, 0), Span(3, None), Span(6, 5), Span(13, None), Span(6, 6)]
    assert (first.policy_version, second.policy_version) == (0, 5)
    assert third.token_ids[: len(second)] == second.token_ids


def test_idle_sessions_make_room_for_newcomers(loaded):
    engine = engine_of(loaded, kv_memory=30 * 4 * 2 * 3 * 2 * 12 * 4)
    sampling = Sampling(max_new_tokens=20, seed=3, ignore_eos=True)
    policy = POLICIES["rkv"]
    expected = play(engine_of(loaded), policy, sampling, GIVEN[:1])[-1]
    (request,) = engine.requests([PROMPT], sampling, policy, record=True, session=True)
    engine.submit(request)
    (first,) = engine.drain()
    assert engine.pool.in_use > 0
    crowd = engine.generate([[i, 3, 4] for i in range(20, 28)], Sampling(max_new_tokens=30, ignore_eos=True))
    assert len(crowd) == 8
    engine.extend(first.session, GIVEN[0])
    (second,) = engine.drain()
    assert second.kv.swaps >= 1
    assert second.token_ids == expected.token_ids
    assert torch.equal(second.logprobs[second.sampled], expected.logprobs[expected.sampled])


def test_a_stop_string_ends_a_turn_exactly(loaded):
    """The host finds it after the device has gone on; the next turn is still that of the tokens before it."""

    class Letters:
        added_tokens_decoder = {}  # noqa: RUF012

        def decode(self, tokens, skip_special_tokens=True):
            return "".join(chr(200 + token) for token in tokens)

    engine = engine_of(loaded)
    free = play(engine, POLICIES["rkv"], Sampling(max_new_tokens=30, seed=6, ignore_eos=True), [])[0]
    engine.inputs.tokenizer = Letters()
    stop = Letters().decode(free.token_ids[9:11])
    sampling = Sampling(max_new_tokens=30, seed=6, ignore_eos=True, stop=(stop,))
    turns = play(engine, POLICIES["rkv"], sampling, GIVEN[:2])
    assert turns[0].token_ids == free.token_ids[:11]
    assert turns[0].finish == "stop"
    assert_replays(loaded.model, turns[-1])


def test_what_ends_a_session(loaded):
    engine = engine_of(loaded)
    first = play(engine, POLICIES["rkv"], Sampling(max_new_tokens=5, ignore_eos=True), [])[0]
    request = engine.extend(first.session, GIVEN[0], Sampling(max_new_tokens=40, ignore_eos=True))
    engine.step()
    with pytest.raises(SettingError, match=f"session={first.session}"):
        engine.extend(first.session, GIVEN[0])
    engine.abort(request)
    (aborted,) = engine.drain()
    assert (aborted.finish, aborted.session) == ("aborted", None)
    assert engine.pool.in_use == 0
    with pytest.raises(SettingError, match=f"session={first.session}"):
        engine.extend(first.session, GIVEN[0])
    kept = play(engine, POLICIES["rkv"], Sampling(max_new_tokens=5, ignore_eos=True), [])[0]
    engine.session_timeout = -1.0
    engine.generate([[3, 4]], Sampling(max_new_tokens=2))
    assert kept.session not in engine.sessions
    assert engine.pool.in_use == 0


def test_a_turn_that_cannot_fit_leaves_the_session_open(loaded):
    engine = engine_of(loaded, max_length=40)
    first = play(engine, Sparsity(), Sampling(max_new_tokens=5, ignore_eos=True), [])[0]
    with pytest.raises(SettingError, match="max_length"):
        engine.extend(first.session, GIVEN[0], Sampling(max_new_tokens=60))
    with pytest.raises(SettingError, match=f"session={first.session}"):
        engine.extend(first.session, [10**6])
    engine.extend(first.session, GIVEN[0])
    (second,) = engine.drain()
    assert_replays(loaded.model, second)


@pytest.mark.parametrize("name", ["dense", "rkv"])
def test_a_session_whose_kv_was_dropped_is_not_idle_while_it_runs(name, loaded):
    engine = engine_of(loaded, kv_memory="200KiB", swap_memory=0)
    first = play(engine, POLICIES[name], Sampling(max_new_tokens=5, ignore_eos=True), [])[0]
    engine.sleep()  # drops its KV, as there is no host memory for it
    engine.wake()
    engine._scheduler.swap_memory = 1 << 20
    engine.extend(first.session, GIVEN[0], Sampling(max_new_tokens=60, ignore_eos=True))
    while not engine.pool.in_use:
        engine.step()
    long = engine.requests([[3, 4] * (2 * engine.pool.usable - 10)], Sampling(max_new_tokens=5))  # it must wait
    engine.submit(*long)
    rollouts = {len(rollout.prompt_ids): rollout for rollout in engine.drain()}
    assert len(rollouts) == 2
    assert_replays(loaded.model, rollouts[len(PROMPT)])
