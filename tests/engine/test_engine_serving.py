"""Streams, aborts, weight updates, sleep and wake."""

import pytest
import torch

import oracle
from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.engine.fused_linear import JointSlice, fuse_projections
from alula.errors import SettingError

PROMPTS = [list(range(5, 12)), [3, 4, 5], [9, 8] * 13]
EVICT = Sparsity(Evict("rkv", 10, buffer=4, window=3, sinks=2))
SELECT = Sparsity(select=Select("quest", 20, 4, 1))


@pytest.fixture
def loaded():
    return oracle.custom_model(3)


@pytest.fixture(params=[0, 1], ids=["host in step", "host one behind"])
def engine(loaded, request):
    engine = Engine(loaded, page=4, kv_memory="2MiB", max_rows=16, lookahead=3)
    engine._in_flight = request.param  # on CUDA the host reads a chunk while the next one runs
    return engine


def test_rollouts_come_as_they_end(engine):
    samplings = [Sampling(max_new_tokens=n, ignore_eos=True) for n in (20, 3, 9)]
    requests = [engine.requests([prompt], s)[0] for prompt, s in zip(PROMPTS, samplings)]
    lengths = [len(rollout) for rollout in engine.stream(requests)]
    assert lengths == [3, 9, 20]


def test_tokens_of_unfinished_rollouts_are_readable_between_steps(engine):
    (request,) = engine.requests([PROMPTS[0]], Sampling(n=2, max_new_tokens=20, ignore_eos=True), EVICT)
    engine.submit(request)
    seen = {0: [[]], 1: [[]]}
    while engine.step():
        for sequence in engine.unfinished(request.id):
            seen[sequence.sample].append(list(sequence.tokens))
    done = {rollout.sample_index: rollout.token_ids for rollout in engine.finished()}
    assert (engine.finished(), engine.unfinished(request.id)) == ([], [])
    for sample, tokens in done.items():
        assert len(seen[sample]) > 5
        assert all(tokens[: len(prefix)] == prefix for prefix in seen[sample])


@pytest.mark.parametrize("policy", [None, EVICT, SELECT], ids=["dense", "evict", "select"])
@pytest.mark.slow
def test_abort_returns_the_tokens_so_far(engine, policy):
    sampling = Sampling(n=2, max_new_tokens=40, ignore_eos=True)
    unaborted = engine.generate(PROMPTS, sampling, policy)
    requests = engine.requests(PROMPTS, sampling, policy)
    short = engine.requests([[7, 8]], Sampling(max_new_tokens=10, ignore_eos=True), policy)
    done = {}
    for rollout in engine.stream([*requests, *short]):
        if rollout.sampling.max_new_tokens == 10:
            engine.abort(requests[1].id)
        else:
            done[rollout.prompt_index, rollout.sample_index] = rollout
    assert len(done) == 6
    for (prompt, sample), rollout in done.items():
        complete = unaborted[2 * prompt + sample]
        assert rollout.finish == ("aborted" if prompt == 1 else "length")
        assert rollout.token_ids == complete.token_ids[: len(rollout)]
        assert len(rollout) < 40 if prompt == 1 else len(rollout) == 40
        assert len(rollout.logprobs) == len(rollout)
    assert engine.pool.in_use == 0


@pytest.mark.slow
def test_abort_of_the_waiting_and_of_everything(loaded):
    engine = Engine(loaded, page=4, kv_memory="2MiB", max_rows=1, lookahead=3)
    requests = engine.requests(PROMPTS, Sampling(n=2, max_new_tokens=9, ignore_eos=True))
    finishes = []
    for rollout in engine.stream(requests):
        finishes.append((rollout.prompt_index, rollout.finish, len(rollout)))
        for request in requests:
            engine.abort(request.id)
    assert finishes[0] == (0, "length", 9)
    # the second rollout of the first prompt has its first token, which came with the prompt
    assert sorted(finishes[1:]) == [
        (0, "aborted", 1),
        (1, "aborted", 0),
        (1, "aborted", 0),
        (2, "aborted", 0),
        (2, "aborted", 0),
    ]
    assert engine.pool.in_use == 0
    assert len(engine.generate(PROMPTS)) == 3


def test_an_abort_of_a_rollout_that_has_ended_changes_nothing(engine):
    """Two rollouts end in the same chunk; the caller aborts the second on seeing the first."""
    requests = engine.requests(PROMPTS[:2], Sampling(max_new_tokens=6, ignore_eos=True))
    seen = []
    for rollout in engine.stream(requests):
        seen.append(rollout.finish)
        engine.abort(requests[1 - rollout.prompt_index].id)
    assert seen == ["length", "length"]


def test_a_closed_stream_releases_everything(engine):
    for policy in (None, EVICT, SELECT):
        stream = engine.stream(engine.requests(PROMPTS, Sampling(n=3, max_new_tokens=30), policy))
        next(stream)
        assert engine.pool.in_use > 0
        stream.close()
        assert engine.pool.in_use == 0
        assert len(engine.generate(PROMPTS, Sampling(max_new_tokens=2), policy)) == 3


def test_two_streams_at_a_time(engine):
    sampling = Sampling(max_new_tokens=30, ignore_eos=True)
    alone = engine.generate(PROMPTS, sampling, EVICT)
    stream = engine.stream(engine.requests(PROMPTS, sampling, EVICT))
    first = next(stream)
    assert len(engine.generate(PROMPTS, Sampling(max_new_tokens=4))) == 3
    done = {r.prompt_index: r for r in [first, *stream]}
    assert [done[i].token_ids for i in range(3)] == [r.token_ids for r in alone], "the first stream is unaffected"
    assert engine.pool.in_use == 0


@pytest.mark.slow
def test_new_weights_change_results_in_place(engine, loaded):
    sampling = Sampling(max_new_tokens=16, temperature=0.8, ignore_eos=True)
    before = engine.generate(PROMPTS, sampling, EVICT, record=True)
    assert {r.policy_version for r in before} == {0}
    other = oracle.custom_model(3).model
    torch.manual_seed(7)
    for parameter in other.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    addresses = {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    engine.update_weights(other.named_parameters())
    assert {name: p.data_ptr() for name, p in engine.model.named_parameters()} == addresses
    assert engine.policy_version == 1
    after = engine.generate(PROMPTS, sampling, EVICT, record=True)
    for old, new in zip(before, after):
        assert new.policy_version == 1
        assert not torch.allclose(old.logprobs[:1], new.logprobs[:1])
        expected = oracle.logprobs(oracle.replay(other, new, 4), new)
        torch.testing.assert_close(new.logprobs, expected, rtol=0, atol=2e-5)
    # the engine runs on the very parameters it was given: a learner that steps them needs no copy
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight.mul_(1.5)
    assert not torch.equal(engine.generate(PROMPTS, sampling)[0].logprobs, after[0].logprobs)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.slow
def test_joined_projections_stay_the_parameters_they_were(model_type):
    """What compiled engines do to q, k, v and gate, up, here without the compiler: several engines and the learner
    share one memory, whichever of them writes it."""
    loaded = oracle.custom_model(3, model_type=model_type)
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
    engines = [Engine(loaded, page=4, kv_memory="1MiB", max_rows=4) for _ in range(2)]
    plain = engines[0].generate(PROMPTS, sampling)
    for engine in engines:
        for layer in engine.model.base_model.layers:
            fuse_projections(layer)
        assert any(isinstance(m, JointSlice) for m in engine.model.modules())

    def assert_all_follow(model):
        for engine in engines:
            for rollout in engine.generate(PROMPTS, sampling):
                expected = oracle.logprobs(oracle.replay(model, rollout), rollout)
                torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=2e-5)

    for rollout, same in zip(engines[0].generate(PROMPTS, sampling), plain):
        assert rollout.token_ids == same.token_ids
    assert_all_follow(loaded.model)
    other = oracle.custom_model(3, model_type=model_type).model
    torch.manual_seed(7)
    for parameter in other.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    engines[0].update_weights(other.named_parameters())
    assert_all_follow(other)
    with torch.no_grad():  # as an optimizer does
        for parameter in loaded.model.parameters():
            parameter.mul_(1.1)
    assert_all_follow(loaded.model)


def test_weights_that_do_not_fit_raise(engine):
    """None of them is copied, even if the invalid one comes last."""
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    good = [(name, p + 1) for name, p in engine.model.named_parameters()]
    with pytest.raises(SettingError, match=r"'lm_head.wieght'; did you mean 'lm_head.weight'\?"):
        engine.update_weights([*good, ("lm_head.wieght", torch.zeros(1))])
    with pytest.raises(SettingError, match=r"'lm_head.weight': .*\(1,\).*\(96, 48\)"):
        engine.update_weights(pair for pair in [*good, ("lm_head.weight", torch.zeros(1))])
    assert engine.policy_version == 0
    assert all(torch.equal(p, before[name]) for name, p in engine.model.named_parameters())


def test_weights_can_come_one_by_one(engine):
    """A learner that gathers each tensor from its ranks never holds two."""
    held = []

    def gathered():
        for name, p in engine.model.named_parameters():
            assert not held or held[-1][0].equal(held[-1][1]), "the one before is already in place"
            held.append((p, p + 1))
            yield name, held[-1][1]

    engine.update_weights(gathered(), lazily=True)
    assert engine.policy_version == 1
    assert all(parameter.equal(new) for parameter, new in held)


@pytest.mark.slow
def test_sleep_releases_the_memory_and_wake_restores_it(engine):
    for policy in (None, EVICT, SELECT):
        before = engine.generate(PROMPTS, Sampling(max_new_tokens=16, ignore_eos=True), policy)
        engine.sleep()
        rows = [t for state in engine.runner.batches.values() for t in (state.ring, state.accumulated)]
        kept = [engine.cache.keys, *engine.cache.summaries.values(), *rows]
        assert all(t.untyped_storage().nbytes() == 0 for t in kept if t is not None)
        with pytest.raises(SettingError, match="wake"):
            engine.generate(PROMPTS)
        engine.score(before)  # dense scores need no KV pool
        engine.sleep()
        engine.wake()
        engine.wake()
        after = engine.generate(PROMPTS, Sampling(max_new_tokens=16, ignore_eos=True), policy)
        assert [r.token_ids for r in after] == [r.token_ids for r in before]
        assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(after, before))


@pytest.mark.slow
def test_results_do_not_depend_on_what_ran_before(engine, loaded):
    """Pages, rings and sums hold old data; a fresh engine gives the same bits."""
    sampling = Sampling(n=2, max_new_tokens=20, ignore_eos=True)
    h2o = Sparsity(Evict("h2o", 12, buffer=3, window=3, sinks=1))
    for policy in (h2o, EVICT, SELECT, None, h2o, SELECT):
        used = engine.generate(PROMPTS, sampling, policy)
        fresh = Engine(loaded, page=4, kv_memory="2MiB", max_rows=16, lookahead=3).generate(PROMPTS, sampling, policy)
        assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(used, fresh))


def test_a_progress_bar_on_a_terminal_and_none_in_a_pipe(engine, capsys, monkeypatch):
    engine.generate(PROMPTS, Sampling(max_new_tokens=2))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats the output as a terminal
    engine.generate(PROMPTS, Sampling(max_new_tokens=2), progress=True)
    assert "rollouts" in capsys.readouterr().err


def test_strings_and_chat_messages_need_a_tokenizer(engine):
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        with pytest.raises(SettingError, match="group-3 has no tokenizer"):
            engine.generate([prompt])


def test_chat_messages_need_a_chat_template(engine):
    """Base models have a tokenizer, but no chat template."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(96)}
    engine.inputs.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))
    )
    with pytest.raises(SettingError, match="group-3 has no chat template"):
        engine.generate([[{"role": "user", "content": "w5"}]])
    engine.inputs.tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(SettingError, match=r"prompts.*no such role"):
        engine.generate([[{"role": "nobody", "content": "w5"}]])
    (rollout,) = engine.generate(["w5"], Sampling(max_new_tokens=3))
    assert rollout.prompt_ids == [5]
    assert rollout.text


@pytest.mark.slow
def test_many_compiled_engines_live_in_one_process(monkeypatch):
    """They share the code of one forward: recompiling its full graph too often would raise."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **given: real(f, backend="eager", **given))
    for group in range(1, 7):
        engine = Engine(oracle.custom_model(group, layers=1), page=4, kv_memory="1MiB", max_rows=2, compiled=True)
        [rollout] = engine.generate([[5, 6, 7]], Sampling(max_new_tokens=3, ignore_eos=True))
        assert len(rollout) == 3


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.slow
def test_the_default_pool_lets_every_row_run(loaded, rows, monkeypatch):
    """Also with long, protected prompts: each row then holds the shared prompt and its own copy."""
    evict = Evict("snapkv", 10, buffer=4, window=3, sinks=2, protect_prompt=True)
    engine = Engine(loaded, page=4, max_rows=rows, max_length=1040, lookahead=4)
    decode, together = engine.runner.decode, []
    monkeypatch.setattr(
        engine.runner, "decode", lambda chunk, features: (together.append(len(chunk.parts)), decode(chunk, features))[1]
    )
    prompts = [[3 + i, 4, 5] * 333 for i in range(rows)]
    rollouts = engine.generate(prompts, Sampling(max_new_tokens=40, ignore_eos=True), Sparsity(evict))
    assert [len(rollout) for rollout in rollouts] == [40] * rows
    assert set(together) == {rows}
