"""The dense engine against transformers' own generation and a plain forward pass."""

from dataclasses import replace

import pytest
import torch

import oracle
from alula import Engine, Sampling
from alula.engine.block_manager import pages_for
from alula.errors import SettingError
from alula.models.load import load_model

PROMPTS = [list(range(5, 12)), [3, 4, 5], [9, 8, 60] * 13, [7]]
OPTIONS = {"page": 4, "kv_memory": "4MiB", "max_rows": 16}


@pytest.fixture(scope="module")
def loaded():
    return oracle.custom_model(3)


@pytest.mark.parametrize("options", [{"lookahead": 1}, {"page": 16, "lookahead": 5, "max_rows": 3}])
@pytest.mark.slow
def test_greedy_equals_transformers(tiny, options):
    """Invariant 1: prompts of different lengths together, more rollouts than rows."""
    engine = Engine(tiny, **(OPTIONS | options))
    rollouts = engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=32, temperature=0, ignore_eos=True))
    assert len(rollouts) == 8
    for i, prompt in enumerate(PROMPTS):
        expected = oracle.greedy(tiny.model, prompt, 32)
        for rollout in rollouts[2 * i : 2 * i + 2]:
            assert rollout.prompt_ids == prompt
            assert rollout.token_ids == expected
            assert rollout.finish == "length"
            at_one = oracle.logprobs(oracle.replay(tiny.model, rollout), rollout, temperature=1.0)
            torch.testing.assert_close(rollout.logprobs, at_one, rtol=0, atol=2e-5)
    assert engine.pool.in_use == 0


@pytest.mark.slow
def test_greedy_equals_transformers_for_every_group_size():
    for group in (1, 4, 7):
        loaded = oracle.custom_model(group, model_type="qwen2" if group == 7 else "llama")
        engine = Engine(loaded, **OPTIONS)
        for rollout in engine.generate(PROMPTS, Sampling(max_new_tokens=20, temperature=0, ignore_eos=True)):
            assert rollout.token_ids == oracle.greedy(loaded.model, rollout.prompt_ids, 20)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_the_sampling_temperature(loaded, temperature):
    engine = Engine(loaded, **OPTIONS, lookahead=4)
    rollouts = engine.generate(PROMPTS, Sampling(n=3, max_new_tokens=20, temperature=temperature, ignore_eos=True))
    for rollout in rollouts:
        assert rollout.logprobs.dtype == torch.float32
        expected = oracle.logprobs(oracle.replay(loaded.model, rollout), rollout, temperature)
        torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=2e-5)


def test_topk_ids_and_logprobs(loaded):
    engine = Engine(loaded, **OPTIONS, lookahead=4)
    for temperature in (0.0, 0.7):
        sampling = Sampling(max_new_tokens=12, temperature=temperature, ignore_eos=True, topk_logprobs=5)
        for rollout in engine.generate(PROMPTS, sampling):
            seen = oracle.replay(loaded.model, rollout)
            logits = seen.logits[len(rollout.prompt_ids) - 1 : -1] / (temperature or 1.0)
            top = torch.log_softmax(logits, -1).topk(5)
            assert torch.equal(rollout.topk_ids, top.indices)
            torch.testing.assert_close(rollout.topk_logprobs, top.values, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_results_are_independent_of_batch_composition(loaded):
    """Invariant 3, dense: also when the others are longer, shorter, end earlier, or wait for a row."""
    sampling = Sampling(n=3, max_new_tokens=30, temperature=0.9, stop=(2, 3, 4, 5))
    for options in ({}, {"lookahead": 4, "max_rows": 5}, {"lookahead": 3, "buckets": (16,)}):
        engine = Engine(loaded, **(OPTIONS | options))
        together = engine.generate(PROMPTS, sampling)
        assert {r.finish for r in together} == {"stop", "length"}
        for request in engine.requests(PROMPTS, sampling):
            for alone in engine.stream([request]):
                same = together[alone.prompt_index * 3 + alone.sample_index]
                assert alone.token_ids == same.token_ids
                assert alone.finish == same.finish
                torch.testing.assert_close(alone.logprobs, same.logprobs, rtol=0, atol=1e-5)
                if "buckets" in options:
                    assert torch.equal(alone.logprobs, same.logprobs)


@pytest.mark.slow
def test_draws_that_depend_on_the_batch_are_rare():
    """At most about one draw in 10⁶, over 10⁵ draws from 1,000 tokens."""
    loaded = oracle.custom_model(1, layers=1, vocabulary=1000)
    sampling = Sampling(n=200, max_new_tokens=256, ignore_eos=True)
    together, fewer = (
        Engine(loaded, **(OPTIONS | {"max_rows": rows, "kv_memory": "64MiB"})).generate([[5, 6, 7], [8, 9]], sampling)
        for rows in (400, 200)
    )
    assert sum(map(len, together)) > 100_000
    assert sum(a.token_ids != b.token_ids for a, b in zip(together, fewer)) <= 1
    for a, b in zip(together, fewer):
        if a.token_ids == b.token_ids:
            torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


def test_indices_key_the_random_numbers(loaded):
    """A share of the prompts with their indices in the whole gives the rollouts of the whole."""
    engine = Engine(loaded, **OPTIONS)
    sampling = Sampling(n=2, max_new_tokens=10, ignore_eos=True)
    everything = engine.generate(PROMPTS, sampling)
    share = engine.generate(PROMPTS[1::2], sampling, indices=range(len(PROMPTS))[1::2])
    expected = [r for r in everything if r.prompt_index % 2]
    assert [(r.prompt_index, r.token_ids) for r in share] == [(r.prompt_index, r.token_ids) for r in expected]
    with pytest.raises(SettingError, match="indices"):
        engine.generate(PROMPTS[:2], sampling, indices=[4, 4])


def test_a_pinned_bucket_bounds_the_rows(loaded):
    """No batch ever leaves the one size, so the bits cannot depend on how many wait."""
    engine = Engine(loaded, **(OPTIONS | {"max_rows": 64, "buckets": (4,)}))
    sampling = Sampling(n=5, max_new_tokens=8, ignore_eos=True)
    together = engine.generate(PROMPTS, sampling)
    (request,) = engine.requests(PROMPTS[:1], sampling)
    for alone in engine.stream([request]):
        assert torch.equal(alone.logprobs, together[alone.sample_index].logprobs)


def test_rollouts_share_the_pages_of_their_prompt(loaded):
    engine = Engine(loaded, **OPTIONS)
    engine.generate([[5] * 40], Sampling(n=12, max_new_tokens=2, ignore_eos=True))
    assert engine.pool.peak == 10 + 12  # ten full pages once, and one page each for what follows
    engine = Engine(loaded, **OPTIONS)
    engine.generate([[5] * 42], Sampling(n=12, max_new_tokens=2, ignore_eos=True))
    assert engine.pool.peak == 11 + 12  # the half-full page is copied: each rollout writes on in its own


def test_kv_statistics(loaded):
    engine = Engine(loaded, **OPTIONS, lookahead=4)
    token_bytes = 2 * 3 * 2 * 12 * 4
    for rollout in engine.generate(PROMPTS, Sampling(max_new_tokens=10, ignore_eos=True)):
        prompt, kv = len(rollout.prompt_ids), rollout.kv
        held = [prompt + step for step in range(1, 10)]  # the last token is never fed back
        assert kv.peak_tokens == held[-1]
        assert kv.mean_tokens == kv.dense_mean_tokens == kv.mean_read_tokens == sum(held) / 9
        assert kv.peak_pages == pages_for(held[-1], 4)
        assert kv.peak_bytes == held[-1] * token_bytes
        assert (kv.evictions, kv.pages_freed, kv.swaps, kv.saved) == (0, 0, 0, 0.0)
    (one,) = engine.generate([[5] * 6], Sampling(max_new_tokens=1, ignore_eos=True))
    assert (len(one), one.kv.peak_tokens, one.kv.mean_tokens) == (1, 6, 6.0)


@pytest.mark.slow
def test_stop_tokens(loaded):
    engine = Engine(loaded, **OPTIONS, lookahead=5)
    free = engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=40, ignore_eos=True))
    stop = (2, 3, 5, 8)
    stopped = engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=40, stop=stop))
    ends = {*stop, *engine.inputs.eos_ids}
    assert sum(r.finish == "stop" for r in stopped) > 4
    for one, unstopped in zip(stopped, free):
        if one.finish == "stop":
            assert one.token_ids[-1] in ends, "the stop token is among the tokens"
        else:
            assert len(one) == 40
        assert not ends & set(one.token_ids[:-1])
        assert one.token_ids == unstopped.token_ids[: len(one)]
        torch.testing.assert_close(one.logprobs, unstopped.logprobs[: len(one)], rtol=0, atol=1e-5)
        assert one.kv.peak_tokens == len(one.prompt_ids) + max(len(one) - 1, 0)


def test_a_first_token_that_stops(loaded):
    engine = Engine(loaded, **OPTIONS, lookahead=5)
    (unstopped,) = engine.generate([[5] * 6], Sampling(max_new_tokens=3, temperature=0, ignore_eos=True))
    sampling = Sampling(n=3, max_new_tokens=3, temperature=0, stop=(unstopped.token_ids[0],))
    for rollout in engine.generate([[5] * 6, [7, 8]], sampling)[:3]:
        assert (rollout.token_ids, rollout.finish) == (unstopped.token_ids[:1], "stop")
    assert engine.pool.in_use == 0


def test_end_tokens_of_the_generation_config(tmp_path):
    """A list of end tokens, as chat models have, ends rollouts; `ignore_eos` does not listen."""
    model = oracle.custom_model(1).model
    prompt, sampling = [[5, 6, 7]], Sampling(max_new_tokens=12)
    probe = Engine(load_like(model, tmp_path), **OPTIONS)
    (unstopped,) = probe.generate(prompt, replace(sampling, ignore_eos=True))
    ends = [unstopped.token_ids[5], unstopped.token_ids[8]]
    model.generation_config.eos_token_id = ends
    engine = Engine(load_like(model, tmp_path), **OPTIONS)
    assert set(ends) <= set(engine.inputs.eos_ids)
    (stopped,) = engine.generate(prompt, sampling)
    first = min(unstopped.token_ids.index(end) for end in ends)
    assert 0 < first <= 5
    assert stopped.token_ids == unstopped.token_ids[: first + 1]
    (ignored,) = engine.generate(prompt, replace(sampling, ignore_eos=True))
    assert ignored.token_ids == unstopped.token_ids


def load_like(model, folder):
    model.save_pretrained(folder)
    return load_model(folder)


def test_lengths_are_per_request(loaded):
    engine = Engine(loaded, **OPTIONS, lookahead=4)
    samplings = [Sampling(max_new_tokens=n, temperature=0, ignore_eos=True) for n in (1, 9, 4)]
    requests = [engine.requests([[5, 6]], s)[0] for s in samplings]
    lengths = {r.sampling.max_new_tokens: r for r in engine.stream(requests)}
    longest = lengths[9].token_ids
    assert {n: r.token_ids for n, r in lengths.items()} == {n: longest[:n] for n in (1, 9, 4)}
