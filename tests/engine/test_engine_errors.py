"""Bad input: one clear sentence, nothing half-done, and the engine goes on."""

import pytest
import torch

import oracle
from alula import Engine, Evict, Sampling, Schedule, Select, Sparsity
from alula.errors import SettingError

GOOD = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def loaded():
    return oracle.custom_model(3)


@pytest.fixture(scope="module")
def engine(loaded):
    return Engine(loaded, page=4, kv_memory=40 * 4 * 2 * 3 * 2 * 12 * 4, max_rows=8, lookahead=3, max_length=120)


@pytest.fixture(scope="module")
def expected(engine):
    return [r.token_ids for r in engine.generate(GOOD, Sampling(max_new_tokens=6))]


def refuse(engine, expected, message, prompts=GOOD, sampling=None, sparsity=None):
    with pytest.raises(SettingError) as refusal:
        engine.generate(prompts, sampling or Sampling(max_new_tokens=6), sparsity)
    text = str(refusal.value)
    assert message in text
    assert "\n" not in text
    assert len(text) < 250
    assert engine.pool.in_use == 0
    assert not engine._live
    assert [r.token_ids for r in engine.generate(GOOD, Sampling(max_new_tokens=6))] == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts: the list is empty."),
        ([[5, 6], []], "prompt 1 is empty"),
        ([[5, 6], [5, 96]], "prompt 1 holds the token id 96, outside 0..95"),
        ([[5, -1]], "prompt 0 holds the token id -1, outside 0..95"),
        ([5, 6, 7], "prompts: give a list of prompts"),
        ([{"role": "user", "content": "hi"}], "prompts: give a list of prompts"),
        (["text"], "has no tokenizer; give prompts as lists of token ids"),
        ([[5, 6], None], "prompt 1, 'None': must be text, chat messages or token ids."),
        ([["a", "b"]], "must be text, chat messages or token ids."),
        ([[5, 6.5]], "must be text, chat messages or token ids."),
        (torch.tensor([5, 6]), "must be text, chat messages or token ids."),
    ],
)
def test_prompts(engine, expected, prompts, message):
    refuse(engine, expected, message, prompts)


@pytest.mark.parametrize(
    ("prompts", "sampling", "sparsity", "message"),
    [
        (
            [[5] * 20, [5] * 100],
            Sampling(max_new_tokens=80),
            None,
            "of 100 tokens with max_new_tokens=80 needs",
        ),
        ([[5] * 10], Sampling(max_new_tokens=115), None, "max_length=120"),
        (
            [[5] * 90],
            Sampling(max_new_tokens=500),
            Sparsity(Evict("rkv", 64, buffer=40)),
            "a prompt of 90 tokens with max_new_tokens=500 needs",
        ),
        (
            [[5] * 4],
            Sampling(max_new_tokens=5000),
            Sparsity(Evict("h2o", 4096)),
            "raise kv_memory or lower max_new_tokens (or the budget)",
        ),
    ],
)
def test_what_can_never_fit(engine, expected, prompts, sampling, sparsity, message):
    refuse(engine, expected, message, prompts, sampling, sparsity)


def test_what_just_fits_runs(engine):
    """The bounds are exact: one token less than what is refused runs to its end."""
    for prompts, sampling, sparsity in (
        ([[5] * 10], Sampling(max_new_tokens=110, ignore_eos=True), None),
        ([[5] * 119], Sampling(max_new_tokens=1, ignore_eos=True), None),
        ([[5] * 50], Sampling(max_new_tokens=400, ignore_eos=True), Sparsity(Evict("rkv", 44, buffer=3, window=3))),
    ):
        (rollout,) = engine.generate(prompts, sampling, sparsity)
        assert len(rollout) == sampling.max_new_tokens
        assert engine.pool.in_use == 0


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (lambda: Sampling(stop=(96,)), "stop holds the token id 96"),
        (lambda: Sampling(topk_logprobs=97), "topk_logprobs=97"),
        (lambda: Sampling(n=0), "n=0"),
        (lambda: Sampling(max_new_tokens=0), "max_new_tokens=0"),
        (lambda: Sampling(max_new_tokens=4, min_new_tokens=5), "min_new_tokens=5"),
        (lambda: Sampling(temperature=-1), "temperature=-1"),
        (lambda: Sampling(temperature=float("nan")), "temperature=nan"),
        (lambda: Sampling(top_p=0), "top_p=0"),
        (lambda: Sampling(top_k=-1), "top_k=-1"),
        (lambda: Sampling(n=1.5), "n=1.5: must be a whole number."),
        (lambda: Sampling(temprature=1), "unknown setting of Sampling: 'temprature'; did you mean 'temperature'?"),
    ],
)
def test_sampling(engine, expected, sampling, message):
    with pytest.raises(SettingError) as refusal:
        engine.generate(GOOD, sampling())
    assert message in str(refusal.value)
    assert [r.token_ids for r in engine.generate(GOOD, Sampling(max_new_tokens=6))] == expected


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda: Evict("rkv", 11, window=8, sinks=4), "budget=11 is smaller than window + sinks = 8 + 4"),
        (lambda: Evict("rkv", Schedule((64, 11)), window=8, sinks=4), "budget=11 is smaller than window + sinks"),
        (lambda: Evict("rkv", 64, buffer=0), "buffer=0"),
        (lambda: Evict("rkv", 64, window=0), "window=0"),
        (lambda: Evict("rkv", 64, sinks=-1), "sinks=-1"),
        (lambda: Evict("rkv", 64.0), "budget=64.0: must be a number of tokens or a Schedule"),
        (lambda: Evict("r-kv", 64), "unknown evictor 'r-kv'; did you mean 'rkv'?"),
        (lambda: Evict("rkv", 64, windw=8), "did you mean 'window'?"),
        (lambda: Select("quets", 64), "unknown selector 'quets'; did you mean 'quest'?"),
        (lambda: Select("quest", 47), "budget=47 is smaller than the three blocks of 16"),
        (lambda: Select("quest", 64, dense_layers=-1), "dense_layers=-1"),
        (lambda: Select("quest", 64, blok=16), "unknown setting of Select: 'blok'; did you mean 'block'?"),
        (lambda: Evict("rkv", 64, buffer=2.5), "buffer=2.5: must be a whole number."),
        (lambda: Sparsity("rkv"), "evict='rkv': must be made by Evict, as Evict('rkv', budget=512)."),
    ],
)
def test_policies_are_refused_when_they_are_written(policy, message):
    with pytest.raises(SettingError) as refusal:
        policy()
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("sparsity", "message"),
    [
        (Sparsity(select=Select("quest", 64, block=16)), "this engine's pages hold 4 tokens; load it with page=16"),
        (Sparsity(Evict("rkv", Schedule((64,), method="snapkv"))), "was made for method=snapkv, not method=rkv"),
        (
            Sparsity(select=Select("quest", Schedule((64,), method="block-topk"), block=4)),
            "was made for method=block-topk, not method=quest",
        ),
        (
            Sparsity(select=Select("quest", Schedule((64,), block=16), block=4)),
            "was made for block=16, not block=4",
        ),
        (Sparsity(Evict("rkv", Schedule((64,), model="qwen3-4b"))), "was made for model=qwen3-4b, not model=group-3"),
        ([Sparsity()], "1 policies for 2 prompts"),
        ("rkv:64+16", "sparsity='rkv:64+16': must be made by Sparsity"),
        (Evict("rkv", 64), "must be made by Sparsity"),
        (
            [Sparsity(select=Select("quest", 12, 4)), Sparsity(select=Select("block-topk", 12, 4))],
            "not selectors or dense_layers",
        ),
        (
            [Sparsity(select=Select("quest", 12, 4, 0)), Sparsity(select=Select("quest", 12, 4, 1))],
            "not selectors or dense_layers",
        ),
    ],
)
def test_policies_that_do_not_fit_the_engine(engine, expected, sparsity, message):
    refuse(engine, expected, message, sparsity=sparsity)


def test_engine_settings(loaded):
    for options, message in (
        ({"page": 12}, "page=12: use a power of two"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"lookahead": 0}, "lookahead=0: must be at least 1."),
        ({"buckets": (4, 0)}, "buckets[1]=0: must be at least 1."),
        ({"max_length": -5}, "max_length=-5: must be at least 1."),
        ({"kv_memory": "1KiB"}, "give it at least 4 pages"),
        ({"kv_memory": "60 gigs"}, "kv_memory='60 gigs': write a size such as 60GiB"),
    ):
        with pytest.raises(SettingError) as refusal:
            Engine(loaded, **options)
        assert message in str(refusal.value)
    with pytest.raises(SettingError, match=r"unknown setting of Engine: 'kv_memry'; did you mean 'kv_memory'\?"):
        Engine.load("no/such/model", kv_memry="1GiB")  # told before anything is loaded


def test_scores(engine, expected):
    rollouts = engine.generate(GOOD, Sampling(max_new_tokens=6))
    empty = engine.generate(GOOD, Sampling(max_new_tokens=6))
    empty[1].token_ids = []
    foreign = engine.generate(GOOD, Sampling(max_new_tokens=6))
    foreign[0].token_ids[2] = 96
    wrong_block = Sparsity(select=Select("quest", 64, block=16))
    for given, options, message in (
        ([], {}, "rollouts: the list is empty"),
        (empty, {}, "rollout 1 has no tokens to score"),
        (foreign, {}, "rollout 0 holds the token id 96"),
        (rollouts, {"temperature": 0.0}, "temperature=0.0"),
        (rollouts, {"topk": 97}, "topk=97"),
        (rollouts, {"sparsity": wrong_block}, "load it with page=16"),
    ):
        with pytest.raises(SettingError) as refusal:
            engine.score(given, **options)
        assert message in str(refusal.value)
        assert engine.pool.in_use == 0
    assert len(engine.score(rollouts)) == 2


def test_top_p_gives_no_logprob_of_the_sampler(engine):
    for sampling in (Sampling(max_new_tokens=6, top_p=0.9), Sampling(max_new_tokens=6, top_k=5)):
        assert sampling.filtered
        for rollout in engine.generate(GOOD, sampling):
            assert rollout.logprobs is None
            with pytest.raises(SettingError, match=r"sample with top_p=1 and top_k=0 where log-probs are needed\."):
                rollout.sampler_logprobs()
    plain = engine.generate(GOOD, Sampling(max_new_tokens=6))[0]
    assert plain.sampler_logprobs() is plain.logprobs


@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_failure_on_the_way_leaves_a_usable_engine(engine, expected, monkeypatch, step):
    """Say the device runs out of memory in the prompt's pass or later: pages, rows and hooks are as before."""
    healthy, calls = engine.runner.logits, []

    def fail(hidden):
        calls.append(1)
        if len(calls) > step:
            raise torch.OutOfMemoryError("no memory")
        return healthy(hidden)

    policies = [Sparsity(Evict("rkv", 10, buffer=3, window=3, sinks=1)), Sparsity(select=Select("quest", 12, 4, 1))]
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "logits", fail)
        with pytest.raises(torch.OutOfMemoryError):
            engine.generate(GOOD, Sampling(n=3, max_new_tokens=20), policies)
    assert engine.pool.in_use == 0
    assert not engine._live
    assert [r.token_ids for r in engine.generate(GOOD, Sampling(max_new_tokens=6))] == expected


# --- logits that are not finite ----------------------------------------------------------------------------------


POLICIES = {
    "dense": Sparsity(),
    "evict": Sparsity(Evict("rkv", 10, buffer=3, window=3, sinks=1)),
    "h2o": Sparsity(Evict("h2o", 10, buffer=3, window=3, sinks=1)),
    "select": Sparsity(select=Select("quest", 12, 4, 1)),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_only_the_poisoned_request_fails(name, poison):
    """One token's embedding is broken: whoever reads it fails, in the prompt or later; the others are exact."""
    prompts = [[5, 6, 7, 10], [8, 9] * 6, [11] * 5]
    sampling = Sampling(n=3, max_new_tokens=24, ignore_eos=True)
    loaded = oracle.custom_model(3)
    options = {"page": 4, "kv_memory": "2MiB", "max_rows": 16, "lookahead": 4}
    healthy = Engine(loaded, **options).generate(prompts, sampling, POLICIES[name])
    assert not loaded.model.config.tie_word_embeddings, "a tied head would poison every row"
    elsewhere = {token for r in healthy[3:] for token in (*r.prompt_ids, *r.token_ids)} | set(prompts[0])
    bad = next(t for t in healthy[0].token_ids[4:20] if t not in elsewhere)
    unused = next(t for t in range(96) if t not in elsewhere and all(t not in r.token_ids for r in healthy))
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[[bad, unused]] = poison
    engine = Engine(loaded, **options)
    for _ in range(2):  # the second time over pages that the first left poisoned
        rollouts = engine.generate([*prompts, [unused, 5]], sampling, POLICIES[name])
        for rollout, well in zip(rollouts, healthy):
            if bad in well.token_ids[:-1]:
                assert rollout.finish == "error"
                stop = well.token_ids.index(bad) + 1  # drawn while all was well; its own forward pass is not
                assert rollout.token_ids == well.token_ids[:stop]
                assert rollout.logprobs.isfinite().all()
            else:
                assert rollout.finish == "length"
                assert rollout.token_ids == well.token_ids
                torch.testing.assert_close(rollout.logprobs, well.logprobs, rtol=0, atol=1e-5)
        assert rollouts[0].finish == "error"
        assert [(r.finish, r.token_ids) for r in rollouts[9:]] == [("error", [])] * 3
        assert engine.pool.in_use == 0
