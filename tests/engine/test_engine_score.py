"""Scoring given tokens: the dense policy in one pass, a sparse one by forced decoding."""

import pytest
import torch

import oracle
from alula import Engine, Evict, Sampling, Schedule, Select, Sparsity
from alula.engine.rollout import Rollout
from alula.sparsity.evict import METHODS as EVICTORS

PROMPTS = [list(range(5, 12)), [3, 4, 5], [9, 8] * 13]
SAMPLING = Sampling(n=2, max_new_tokens=24, temperature=0.7, ignore_eos=True, topk_logprobs=3)
POLICIES = {method: Sparsity(Evict(method, 10, buffer=4, window=3, sinks=2)) for method in EVICTORS} | {
    "quest": Sparsity(select=Select("quest", 16, 4, 1)),
    "block-topk": Sparsity(select=Select("block-topk", Schedule((16, 20), width=20), 4, 1)),
    "both": Sparsity(Evict("rkv", 18, buffer=4, window=3, sinks=2), Select("quest", 16, 4, 0)),
}


@pytest.fixture(scope="module")
def loaded():
    return oracle.custom_model(3)


@pytest.fixture(scope="module")
def engine(loaded):
    return Engine(loaded, page=4, kv_memory="4MiB", max_rows=16, lookahead=3)


def test_dense_scores_equal_what_was_sampled(engine):
    rollouts = engine.generate(PROMPTS, SAMPLING)
    for rollout, score in zip(rollouts, engine.score(rollouts, topk=3)):
        torch.testing.assert_close(score.logprobs, rollout.logprobs, rtol=0, atol=1e-5)
        assert torch.equal(score.topk_ids, rollout.topk_ids)
        torch.testing.assert_close(score.topk_logprobs, rollout.topk_logprobs, rtol=0, atol=1e-5)
    assert engine.score(rollouts)[0].topk_ids is None


@pytest.mark.parametrize("name", POLICIES)
def test_forced_decoding_equals_what_was_sampled(name, engine):
    """Forced tokens: same evictions, same selections, same log-probs, in another batch composition."""
    rollouts = engine.generate(PROMPTS, SAMPLING, POLICIES[name], record=True)
    some = [rollouts[i] for i in (5, 0, 2, 3)]
    for rollout, score in zip(some, engine.score(some, POLICIES[name], topk=3, record=True)):
        torch.testing.assert_close(score.logprobs, rollout.logprobs, rtol=0, atol=1e-5)
        assert torch.equal(score.topk_ids, rollout.topk_ids)
        torch.testing.assert_close(score.topk_logprobs, rollout.topk_logprobs, rtol=0, atol=1e-5)
        assert (score.history is None) == (rollout.history is None)
        assert rollout.history is None or torch.equal(score.history, rollout.history)
        assert (score.selected is None) == (rollout.selected is None)
    assert engine.pool.in_use == 0


@pytest.mark.parametrize("name", ["rkv", "quest", "both"])
def test_dense_rollouts_under_a_sparse_policy(name, engine, loaded):
    """Log-probs of a sparse policy for tokens that it did not sample, against the oracle."""
    rollouts = engine.generate(PROMPTS, SAMPLING)
    for rollout, score in zip(rollouts, engine.score(rollouts, POLICIES[name], topk=5, record=True)):
        replayed = Rollout(
            rollout.prompt_ids,
            rollout.token_ids,
            None,
            "length",
            sampling=rollout.sampling,
            sparsity=POLICIES[name],
            history=score.history,
            selected=score.selected,
        )
        seen = oracle.replay(loaded.model, replayed, page=4)
        torch.testing.assert_close(score.logprobs, oracle.logprobs(seen, replayed), rtol=0, atol=2e-5)
        top = torch.log_softmax(seen.logits[len(rollout.prompt_ids) - 1 : -1] / 0.7, -1).topk(5)
        assert torch.equal(score.topk_ids, top.indices)
        torch.testing.assert_close(score.topk_logprobs, top.values, rtol=0, atol=2e-5)
        assert not torch.allclose(score.logprobs[20:], rollout.logprobs[20:], atol=1e-3), "it is another policy"


def test_sparse_rollouts_under_the_dense_policy(engine, loaded):
    rollouts = engine.generate(PROMPTS, SAMPLING, POLICIES["rkv"])
    for rollout, score in zip(rollouts, engine.score(rollouts)):
        expected = oracle.logprobs(oracle.replay(loaded.model, rollout), rollout)
        torch.testing.assert_close(score.logprobs, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("policy", [None, POLICIES["snapkv"]])
def test_temperature_of_scores(policy, engine):
    """The default is the rollout's temperature; greedy rollouts are scored at 1."""
    greedy = engine.generate(PROMPTS, Sampling(max_new_tokens=12, temperature=0, ignore_eos=True), policy)
    for rollout, at_one in zip(greedy, engine.score(greedy, policy, temperature=1.0)):
        torch.testing.assert_close(at_one.logprobs, rollout.logprobs, rtol=0, atol=1e-5)
    warm = engine.generate(PROMPTS, Sampling(max_new_tokens=12, temperature=0.5, ignore_eos=True), policy)
    default, given = engine.score(warm, policy), engine.score(warm, policy, temperature=0.5)
    other = engine.score(warm, policy, temperature=2.0)
    for a, b, c in zip(default, given, other):
        assert torch.equal(a.logprobs, b.logprobs)
        assert not torch.allclose(a.logprobs, c.logprobs, atol=1e-2)


def test_rollouts_that_stopped_are_scored_to_their_last_token(engine):
    sampling = Sampling(n=3, max_new_tokens=30, stop=(2, 3, 5, 8, 13))
    rollouts = engine.generate(PROMPTS, sampling, POLICIES["rkv"])
    assert {r.finish for r in rollouts} >= {"stop"}
    for rollout, score in zip(rollouts, engine.score(rollouts, POLICIES["rkv"])):
        assert len(score.logprobs) == len(rollout)
        torch.testing.assert_close(score.logprobs, rollout.logprobs, rtol=0, atol=1e-5)


def test_top_p_rollouts_can_be_scored(engine):
    """No log-prob comes with them; `score` gives that of the full distribution."""
    sampling = Sampling(n=2, max_new_tokens=12, top_p=0.8, ignore_eos=True)
    rollouts = engine.generate(PROMPTS, sampling, POLICIES["rkv"])
    assert all(r.logprobs is None for r in rollouts)
    for score in (*engine.score(rollouts), *engine.score(rollouts, POLICIES["rkv"])):
        assert score.logprobs.shape == (12,)
        assert score.logprobs.isfinite().all()


def test_long_scores_in_small_pieces(engine, loaded, monkeypatch):
    """Batches of few tokens and logits of few rows give the same scores."""
    from alula.engine import scoring

    rollouts = engine.generate(PROMPTS, SAMPLING)
    at_once = engine.score(rollouts, topk=2)
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * 96 * 5)
    monkeypatch.setattr(engine, "prefill_tokens", 30)
    for a, b in zip(at_once, engine.score(rollouts, topk=2)):
        torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
        assert torch.equal(a.topk_ids, b.topk_ids)


def test_tokens_after_non_finite_logits_score_nan(loaded):
    """Forced decoding: from the broken token on. The dense pass reads all tokens at once: everywhere."""
    rollouts = Engine(loaded, page=4, kv_memory="2MiB").generate(PROMPTS, SAMPLING, POLICIES["rkv"])
    bad = next(t for t in rollouts[0].token_ids[5:] if all(t not in r.prompt_ids + r.token_ids for r in rollouts[2:]))
    broken = oracle.custom_model(3)
    with torch.no_grad():
        broken.model.get_input_embeddings().weight[bad] = float("nan")
    engine = Engine(broken, page=4, kv_memory="2MiB")
    poisoned = Rollout([5, bad], [6, 7, 8], None, "length")
    scored = [*rollouts, poisoned]
    unbroken = Engine(loaded, page=4, kv_memory="2MiB").score(scored, POLICIES["rkv"])
    overlaps = engine.acceptance(scored, POLICIES["rkv"])
    for r, score, well, alpha in zip(scored, engine.score(scored, POLICIES["rkv"], topk=2), unbroken, overlaps):
        text = r.prompt_ids + r.token_ids
        good = max(0, text.index(bad) + 1 - len(r.prompt_ids)) if bad in text[:-1] else len(r)
        assert score.logprobs.shape == alpha.shape == (len(r),)
        assert score.topk_logprobs.shape == score.topk_ids.shape == (len(r), 2)
        torch.testing.assert_close(score.logprobs[:good], well.logprobs[:good], rtol=0, atol=1e-5)
        assert score.logprobs[good:].isnan().all()
        assert (alpha.isnan() == (bad in text)).all()
        assert (engine.score([r])[0].logprobs.isnan() == (bad in text)).all()
