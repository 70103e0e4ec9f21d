"""Invalid input raises with one sentence and leaves the engine usable."""

import numpy as np
import pytest
import torch

import oracle
from alula import Engine, Evict, Sampling, Schedule, Select, Sparsity
from alula.engine import prefill
from alula.engine.engine import default_buckets
from alula.engine.schedule_plan import padded_rows
from alula.engine.sequence import MOST_KINDS
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


def check_rejected(engine, expected, message, prompts=GOOD, sampling=None, sparsity=None):
    with pytest.raises(SettingError) as error:
        engine.generate(prompts, sampling or Sampling(max_new_tokens=6), sparsity)
    text = str(error.value)
    assert message in text
    assert "\n" not in text
    assert len(text) < 250
    assert engine.pool.in_use == 0
    assert not engine._live
    assert [r.token_ids for r in engine.generate(GOOD, Sampling(max_new_tokens=6))] == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts:"),
        ([[5, 6], []], "prompt 1"),
        ([[5, 6], [5, 96]], "prompt 1 holds the token id 96"),
        ([[5, -1]], "prompt 0 holds the token id -1"),
        ([5, 6, 7], "prompts:"),
        ([{"role": "user", "content": "hi"}], "prompts:"),
        (["text"], "no tokenizer"),
        ([[5, 6], None], "prompt 1, 'None'"),
        ([["a", "b"]], "prompt 0, \"['a', 'b']\""),
        ([[5, 6.5]], "prompt 0, '[5, 6.5]'"),
        (torch.tensor([5, 6]), "prompt 0, 'tensor(5)'"),
    ],
)
def test_invalid_prompts_raise(engine, expected, prompts, message):
    check_rejected(engine, expected, message, prompts)


@pytest.mark.parametrize(
    ("prompts", "sampling", "sparsity", "message"),
    [
        (
            [[5] * 20, [5] * 100],
            Sampling(max_new_tokens=80),
            None,
            "100 tokens with max_new_tokens=80",
        ),
        ([[5] * 10], Sampling(max_new_tokens=115), None, "max_length=120"),
        (
            [[5] * 90],
            Sampling(max_new_tokens=500),
            Sparsity(Evict("rkv", 64, buffer=40)),
            "90 tokens with max_new_tokens=500",
        ),
        (
            [[5] * 4],
            Sampling(max_new_tokens=1000),
            Sparsity(Evict("h2o", 512)),
            "raise kv_memory",
        ),
    ],
)
def test_requests_larger_than_the_pool_or_the_context_raise(engine, expected, prompts, sampling, sparsity, message):
    check_rejected(engine, expected, message, prompts, sampling, sparsity)


@pytest.mark.slow
def test_largest_requests_that_fit_run(engine):
    """The limits are exact: one token less than a rejected request runs to its end."""
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
        (lambda: Sampling(temperature=1e300), "temperature=1e+300: must be 0 (greedy), or lie"),
        (lambda: Sampling(temperature=1e-50), "temperature=1e-50"),  # 0 in float32: greedy, and its scores NaN
        (lambda: Sampling(top_p=0), "top_p=0"),
        (lambda: Sampling(top_k=-1), "top_k=-1"),
        (lambda: Sampling(n=1.5), "n=1.5"),
        (lambda: {"n": 2}, "sampling={'n': 2}"),
        (lambda: Sampling(temprature=1), "did you mean 'temperature'?"),
    ],
)
def test_invalid_sampling_raises(engine, expected, sampling, message):
    with pytest.raises(SettingError) as error:
        engine.generate(GOOD, sampling())
    assert message in str(error.value)
    assert [r.token_ids for r in engine.generate(GOOD, Sampling(max_new_tokens=6))] == expected


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda: Evict("rkv", 11, window=8, sinks=4), "budget=11"),
        (lambda: Evict("rkv", Schedule((64, 11)), window=8, sinks=4), "budget=11"),
        (lambda: Evict("rkv", 64, buffer=0), "buffer=0"),
        (lambda: Evict("rkv", 64, window=0), "window=0"),
        (lambda: Evict("rkv", 64, sinks=-1), "sinks=-1"),
        (lambda: Evict("rkv", 64.0), "64.0"),
        (lambda: Evict("r-kv", 64), "did you mean 'rkv'?"),
        (lambda: Evict("rkv", 64, windw=8), "did you mean 'window'?"),
        (lambda: Select("quets", 64), "did you mean 'quest'?"),
        (lambda: Select("quest", 47), "budget=47"),
        (lambda: Select("quest", 64, dense_layers=-1), "dense_layers=-1"),
        (lambda: Select("quest", 64, blok=16), "did you mean 'block'?"),
        (lambda: Evict("rkv", 64, buffer=2.5), "buffer=2.5"),
        (lambda: Sparsity("rkv"), "evict='rkv'"),
    ],
)
def test_invalid_policies_raise_when_built(policy, message):
    with pytest.raises(SettingError) as error:
        policy()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("sparsity", "message"),
    [
        (Sparsity(select=Select("quest", 64, block=16)), "page=16"),
        (Sparsity(Evict("rkv", Schedule((64,), method="snapkv"))), "method=snapkv"),
        (
            Sparsity(select=Select("quest", Schedule((64,), method="block-topk"), block=4)),
            "method=block-topk",
        ),
        (
            Sparsity(select=Select("quest", Schedule((64,), block=16), block=4)),
            "block=16",
        ),
        (Sparsity(Evict("rkv", Schedule((64,), model="qwen3-4b"))), "model=qwen3-4b"),
        ([Sparsity()], "sparsity: 1 values for 2 prompts"),
        ("rkv:64+16", "sparsity='rkv:64+16'"),
        (Evict("rkv", 64), "sparsity=Evict("),
    ],
)
def test_policies_that_do_not_fit_the_engine_raise(engine, expected, sparsity, message):
    check_rejected(engine, expected, message, sparsity=sparsity)


def test_invalid_engine_settings_raise(loaded):
    for options, message in (
        ({"page": 12}, "page=12"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"lookahead": 0}, "lookahead=0"),
        ({"buckets": (4, 0)}, "buckets[1]=0"),
        ({"buckets": 4}, "buckets=4"),
        ({"max_length": -5}, "max_length=-5"),
        ({"kv_memory": "1KiB"}, "kv_memory=1024"),
        ({"kv_memory": "60 gigs"}, "kv_memory='60 gigs'"),
    ):
        with pytest.raises(SettingError) as error:
            Engine(loaded, **options)
        assert message in str(error.value)
    with pytest.raises(SettingError, match=r"some/model.*Engine\.load"):
        Engine("some/model")
    with pytest.raises(SettingError, match=r"did you mean 'kv_memory'\?"):
        Engine.load("no/such/model", kv_memry="1GiB")  # raises before anything is loaded


def test_invalid_score_requests_raise(engine, expected):
    rollouts = engine.generate(GOOD, Sampling(max_new_tokens=6))
    empty = engine.generate(GOOD, Sampling(max_new_tokens=6))
    empty[1].token_ids = []
    foreign = engine.generate(GOOD, Sampling(max_new_tokens=6))
    foreign[0].token_ids[2] = 96
    wrong_block = Sparsity(select=Select("quest", 64, block=16))
    for given, options, message in (
        ([], {}, "rollouts:"),
        (rollouts[0], {}, "rollouts:"),
        (["text"], {}, "rollouts:"),
        (empty, {}, "rollout 1"),
        (foreign, {}, "rollout 0 holds the token id 96"),
        (rollouts, {"temperature": 0.0}, "temperature=0.0"),
        (rollouts, {"topk": 97}, "topk=97"),
        (rollouts, {"sparsity": wrong_block}, "page=16"),
    ):
        with pytest.raises(SettingError) as error:
            engine.score(given, **options)
        assert message in str(error.value)
        assert engine.pool.in_use == 0
    assert len(engine.score(rollouts)) == 2


def test_top_p_gives_no_logprob_of_the_sampler(engine):
    for sampling in (Sampling(max_new_tokens=6, top_p=0.9), Sampling(max_new_tokens=6, top_k=5)):
        assert sampling.filtered
        for rollout in engine.generate(GOOD, sampling):
            assert rollout.logprobs is None
            with pytest.raises(SettingError, match=f"top_p={sampling.top_p}, top_k={sampling.top_k}"):
                rollout.sampler_logprobs()
    plain = engine.generate(GOOD, Sampling(max_new_tokens=6))[0]
    assert plain.sampler_logprobs() is plain.logprobs


@pytest.mark.parametrize("step", [0, 1, 4])
def test_engine_stays_usable_after_an_out_of_memory_error(engine, expected, monkeypatch, step):
    """The device runs out of memory during prefill or decoding: pages, rows and hooks are as before."""
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


def test_a_sequence_as_long_as_a_small_pool_allows_can_run():
    engine = Engine.load("shape:tiny-llama", kv_memory="64KiB", page=4, max_rows=2)
    assert engine.max_length < engine.positions, "the pool is the limit"
    [rollout] = engine.generate([[5] * 10], Sampling(max_new_tokens=engine.max_length - 10, ignore_eos=True))
    assert len(rollout) == engine.max_length - 10
    with pytest.raises(SettingError, match="raise kv_memory or lower max_new_tokens"):
        engine.generate([[5] * 10], Sampling(max_new_tokens=engine.max_length - 9))


# --- logits that are not finite ----------------------------------------------------------------------------------


POLICIES = {
    "dense": Sparsity(),
    "evict": Sparsity(Evict("rkv", 10, buffer=3, window=3, sinks=1)),
    "h2o": Sparsity(Evict("h2o", 10, buffer=3, window=3, sinks=1)),
    "select": Sparsity(select=Select("quest", 12, 4, 1)),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.slow
def test_only_the_poisoned_request_fails(name, poison):
    """One token's embedding is broken: rollouts that read it fail, in the prompt or later; the others are exact."""
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


def test_texts_longer_than_the_positions_of_the_model_are_rejected():
    """An evictor holds few tokens, but the model knows no position beyond its last."""
    policy, prompt = Sparsity(Evict("streaming", 32, buffer=16)), [[3, 4, 5]]
    engine = Engine.load("shape:tiny-qwen3", kv_memory="4MiB", max_rows=2, max_length=96)
    positions = engine.model.config.max_position_embeddings
    with pytest.raises(
        SettingError, match=f"beyond the model's {positions} positions; lower max_new_tokens or use shorter"
    ):
        engine.generate(prompt, Sampling(max_new_tokens=positions), policy)
    longer = Engine.load("shape:tiny-qwen3", kv_memory="4MiB", max_rows=2, max_length=positions + 3)
    longer.submit(longer.requests(prompt, Sampling(max_new_tokens=positions), policy)[0])


def test_default_batch_sizes_are_few():
    assert [default_buckets(rows)[-1] for rows in (8, 1024, 1025, 1280, 1281)] == [1024, 1024, 1280, 1280, 1536]
    assert len({padded_rows(rows, default_buckets(4096)) for rows in range(1, 4097)}) < 40


@pytest.mark.parametrize("select", [None, Select("quest", 12, 4, 0)], ids=["dense", "quest"])
def test_a_request_without_memory_does_not_change_running_rows(loaded, select):
    """Its queries would take terabytes. Rows beside it keep their budgets, banned tokens and results."""
    sampling = Sampling(max_new_tokens=24, min_new_tokens=24, stop=tuple(range(2, 60)), ignore_eos=True)
    huge = Sparsity(Evict("snapkv", 9 * 10**10, window=8 * 10**10), select)
    found = []
    for refused in (False, True):
        engine = Engine(loaded, page=4, kv_memory="2MiB", max_rows=4, lookahead=2)
        engine.submit(engine.requests([list(range(5, 40))], sampling, Sparsity(select=select))[0])
        for _ in range(4):
            engine.step()
        if refused:
            with pytest.raises(RuntimeError, match="allocate"):
                engine.submit(engine.requests([[5, 6, 7]], Sampling(max_new_tokens=4), huge)[0])
        [rollout] = engine.drain()
        found.append(rollout)
    assert found[0].token_ids == found[1].token_ids
    assert torch.equal(found[0].logprobs, found[1].logprobs)


def test_budgets_and_top_k_beyond_32_bits_read_everything(engine):
    sampling = Sampling(max_new_tokens=6, top_k=10**19, ignore_eos=True)
    policies = [Sparsity(select=Select("quest", 10**11, 4, 0)), Sparsity()]
    schedule = Sparsity(select=Select("quest", Schedule((10**11, 10**12), 8), 4, 0))
    dense, *others = (engine.generate(GOOD, sampling, policy) for policy in (policies[1], policies[0], schedule))
    for other in others:
        assert [r.token_ids for r in other] == [r.token_ids for r in dense]


def test_many_rollouts_of_a_prompt_are_sampled_in_parts(engine, monkeypatch):
    """Each takes a row of logits. The draws are the same."""
    sampling = Sampling(n=20, max_new_tokens=3, topk_logprobs=2, top_p=0.9)
    whole = engine.generate(GOOD, sampling)
    rows, real = [], prefill.sample
    monkeypatch.setattr(prefill, "sample", lambda logits, *a, **k: (rows.append(len(logits)), real(logits, *a, **k))[1])
    monkeypatch.setattr(prefill, "LOGITS_BYTES", 4 * 3 * engine.model.config.vocab_size)
    parts = engine.generate(GOOD, sampling)
    assert max(rows) == 3
    assert [r.token_ids for r in parts] == [r.token_ids for r in whole]
    assert all(torch.equal(a.topk_logprobs, b.topk_logprobs) for a, b in zip(whole, parts))


def test_stop_ids_may_be_numpy_integers(engine):
    [free] = engine.generate([GOOD[0]], Sampling(max_new_tokens=6, ignore_eos=True))
    stop = free.token_ids[2]
    [stopped] = engine.generate([GOOD[0]], Sampling(max_new_tokens=6, ignore_eos=True, stop=(np.int64(stop),)))
    assert stopped.token_ids[-1] == stop
    assert Sampling(stop=np.int64(7)).stop == (7,)
    for wrong in ({"stop": (1.5,)}, {"stop": None}, {"temperature": None}, {"top_p": "1"}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            Sampling(**wrong)


def test_tables_of_unused_kinds_are_dropped(engine):
    """Every number of dense layers is a kind of its own."""
    for layers in range(20):
        engine.generate([GOOD[0]], Sampling(max_new_tokens=2), Sparsity(select=Select("quest", 12, 4, layers)))
    assert len(engine._scheduler.rows.batches) <= MOST_KINDS
