"""Eviction in the engine against a slow oracle: evicted tokens, when, and the resulting log-probs."""

from dataclasses import replace

import pytest
import torch

import oracle
from alula import Engine, Evict, Rollout, Sampling, Schedule, Sparsity
from alula.engine.batch_state import BatchFeatures
from alula.engine.block_manager import pages_for
from alula.engine.eviction import captured_rows
from alula.engine.rollout import NEVER
from alula.engine.sequence import BatchKind, rollout_key
from alula.errors import SettingError
from alula.models.geometry import Geometry
from alula.sparsity.evict import METHODS, build
from alula.sparsity.evict.query_statistics import QueryStatistics
from alula.sparsity.policy import budget_at
from evictor_formulas import (
    dot,
    eviction_word,
    keydiff_scores,
    knorm_scores,
    mean,
    rkv_scores,
    snapkv_scores,
    softmax,
    splitmix64,
    triattention_logits,
    vase_dkv_scores,
    vase_scores,
    z_scores,
)

PROMPTS = [list(range(5, 12)), [3, 4, 5], [9, 8] * 13, [7]]
"""The third is longer than every small budget here."""
SMALL = {"budget": 10, "buffer": 4, "window": 3, "sinks": 2}
SAMPLING = Sampling(n=2, max_new_tokens=24, temperature=0.8, ignore_eos=True)


@pytest.fixture(scope="module")
def models():
    return {group: oracle.custom_model(group) for group in (1, 3, 4, 7)}


def engine_of(loaded, **options):
    return Engine(loaded, **({"page": 4, "kv_memory": "2MiB", "max_rows": 16, "lookahead": 3} | options))


# --- what the trigger and the record must be, by the settings alone ---------------------------------------------


def expected_events(rollout: Rollout) -> list[tuple[int, int, int]]:
    """(position, tokens held, tokens kept) of every eviction, from lengths only."""
    evict = rollout.sparsity.evict
    assert evict is not None
    prompt = len(rollout.prompt_ids)
    extra = prompt if evict.protect_prompt else 0
    held, events = prompt, []
    for position in range(prompt, prompt + len(rollout) - 1):  # the last token is never fed back
        keep = budget_at(evict.budget, position) + extra
        if held >= keep + evict.buffer:
            events.append((position, held, keep))
            held = keep
        held += 1
    return events


def assert_events(rollout: Rollout) -> None:
    history = rollout.history
    assert history is not None
    events = expected_events(rollout)
    assert sorted(set(history.unique().tolist()) - {NEVER}) == [position for position, _, _ in events]
    for position, held, keep in events:
        before = (history >= position)[..., :position].sum(-1)
        after = (history > position)[..., :position].sum(-1)
        assert (before == held).all()
        assert (after == keep).all()
    assert rollout.kv.evictions == len(events)


# --- what a method must keep, from the oracle's own keys and queries --------------------------------------------


def literal_scores(rollout: Rollout, seen: oracle.Pass, layer: int, head: int, t: int, held: list[int], scaling):
    """The method's formula over the tokens held at position t, with the queries before t."""
    evict = rollout.sparsity.evict
    assert evict is not None
    keys = [seen.keys[layer][head, j].tolist() for j in held]
    heads = seen.queries[layer].shape[0]
    group = heads // seen.keys[layer].shape[0]
    members = range(head * group, (head + 1) * group)
    recent = [seen.queries[layer][g, t - evict.window : t].tolist() for g in members]
    match evict.method:
        case "streaming":
            return [float(j) for j in held]
        case "snapkv":
            return snapkv_scores(keys, recent, scaling, evict.window, **dict(evict.options))
        case "rkv":
            return rkv_scores(keys, recent, scaling, evict.window, **dict(evict.options))
        case "rkv-code":  # all heads of layer 0 decide together, for every layer
            summed = []
            for h, own in enumerate(seen.keys[0]):
                queries = [seen.queries[0][g, t - evict.window : t].tolist() for g in range(h * group, (h + 1) * group)]
                summed.append(rkv_scores([own[j].tolist() for j in held], queries, scaling, evict.window))
            return [sum(column) for column in zip(*summed)]
        case "knorm":
            return knorm_scores(keys)
        case "keydiff":
            return keydiff_scores(keys)
        case "tova":  # over all heads of the layer, which therefore hold the same tokens
            columns = []
            for g in range(heads):
                query, own = seen.queries[layer][g, t - 1].tolist(), seen.keys[layer][g // group]
                columns.append(softmax([scaling * dot(query, own[j].tolist()) for j in held]))
            return [mean(column) for column in zip(*columns)]
        case "h2o":
            received = dict.fromkeys(held, 0.0)
            for q in range(t):
                read = seen.visible[layer, head, q].nonzero()[:, 0]
                then = [j for j in held if j <= q]  # what stayed to the end was also held then
                for g in members:
                    logits = scaling * seen.keys[layer][head] @ seen.queries[layer][g, q]
                    for j, weight in zip(then, (logits[then] - logits[read].logsumexp(0)).exp().tolist()):
                        received[j] += weight
            return list(received.values())
        case "random":
            x = splitmix64(rollout_key(rollout.sampling.seed, rollout.prompt_index, rollout.sample_index)) ^ t
            x = splitmix64(splitmix64(splitmix64(x) ^ layer) ^ head)
            return [(splitmix64(x ^ slot) >> 40) / 2**24 for slot in range(len(held))]
        case "vase" | "vase-dkv":
            key = rollout_key(rollout.sampling.seed, rollout.prompt_index, rollout.sample_index)
            values, n = [seen.values[layer][head, j].tolist() for j in held], len(held)
            if evict.method == "vase-dkv":
                return vase_dkv_scores(keys, values, lambda i: eviction_word(key, t, layer, 2 * len(keys[0]) * 20, i))
            words = len(seen.keys[layer]) * n
            draw = lambda j: eviction_word(key, t, layer, words, head * n + j)  # noqa: E731
            budget = budget_at(evict.budget, t)
            limits = {"budget": budget, "sinks": evict.sinks, "protected": protected(rollout)}
            return vase_scores(keys, values, recent, scaling, evict.window, draw, **limits, **dict(evict.options))
        case "triattention":  # every layer's heads of this number hold the same tokens
            known, by_layer = seen.statistics, []
            assert known is not None
            for other, rotated in enumerate(seen.keys):
                own = [rotated[head, j].tolist() for j in held]
                lines = []
                for g in members:
                    numbers = known.mean[other, g].tolist(), known.size[other, g].tolist(), known.frequencies.tolist()
                    lines.append(z_scores(triattention_logits(own, held, t, *numbers), protected(rollout)))
                by_layer.append([max(column) for column in zip(*lines)])
            return [mean(column) for column in zip(*by_layer)]
    raise NotImplementedError(f"{evict.method}: write its formula here")


def protected(rollout: Rollout) -> int:
    evict = rollout.sparsity.evict
    return len(rollout.prompt_ids) if evict is not None and evict.protect_prompt else 0


def assert_kept_are_the_best(rollout: Rollout, seen: oracle.Pass, scaling: float, layers=(0, 2)) -> None:
    evict, history = rollout.sparsity.evict, rollout.history
    assert evict is not None
    assert history is not None
    first = max(evict.sinks, protected(rollout))
    for position, _, _ in expected_events(rollout):
        for layer in layers:
            for head in range(history.shape[1]):
                gone_at = history[layer, head]
                held = [j for j in range(position) if gone_at[j] >= position]
                dropped = {slot for slot, j in enumerate(held) if gone_at[j] == position}
                free = range(first, len(held) - evict.window)
                assert dropped <= set(free), "sinks, window and a protected prompt always stay"
                scores = literal_scores(rollout, seen, layer, head, position, held, scaling)
                best_dropped = max(scores[slot] for slot in dropped)
                worst_kept = min((scores[slot] for slot in free if slot not in dropped), default=best_dropped)
                assert worst_kept >= best_dropped - 1e-5 * max(1.0, abs(best_dropped))


def assert_oracle_agrees(
    loaded, rollouts: list[Rollout], page: int, *, formulas: bool = True, statistics: QueryStatistics | None = None
) -> None:
    head_dim = loaded.model.config.head_dim
    for rollout in rollouts:
        seen = oracle.replay(loaded.model, rollout, page)
        torch.testing.assert_close(rollout.logprobs, oracle.logprobs(seen, rollout), rtol=0, atol=2e-5)
        assert_events(rollout)
        if formulas:
            seen.statistics = statistics
            assert_kept_are_the_best(rollout, seen, head_dim**-0.5)


# --- tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_every_evictor_agrees_with_the_oracle(method, models):
    engine = engine_of(models[3])
    rollouts = engine.generate(PROMPTS, SAMPLING, Sparsity(Evict(method, **SMALL)), record=True)
    assert_oracle_agrees(models[3], rollouts, 4, formulas=False)
    assert_oracle_agrees(models[3], rollouts[1:6:2], 4, statistics=engine.query_statistics)
    assert all(r.kv.evictions >= 2 for r in rollouts)
    histories = [r.history for r in rollouts]
    if method not in ("streaming", "tova", "rkv-code"):
        assert any((h[:, 0] != h[:, 1]).any() for h in histories), "every head chooses for itself"
    if method not in ("streaming", "rkv-code", "triattention"):
        assert any((h[0] != h[2]).any() for h in histories), "every layer chooses for itself"
    assert engine.pool.in_use == 0


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("method", ["rkv", "h2o", "tova"])
@pytest.mark.slow
def test_group_sizes(method, group, models):
    engine = engine_of(models[group])
    rollouts = engine.generate(PROMPTS, SAMPLING, Sparsity(Evict(method, **SMALL)), record=True)
    assert_oracle_agrees(models[group], rollouts[::3], 4)


VARIANTS = {
    "buffer of one": Evict("snapkv", 9, buffer=1, window=3, sinks=1),
    "the papers' own setting": Evict("rkv", 10, buffer=6, window=4, sinks=0, mix=0.5, kernel=3),
    "nothing left to choose": Evict("knorm", 6, buffer=3, window=4, sinks=2),
    "prompt protected": Evict("rkv", 6, buffer=3, window=3, sinks=2, protect_prompt=True),
    "prompt protected, h2o": Evict("h2o", 4, buffer=2, window=3, sinks=1, protect_prompt=True),
    "prompt protected, vase": Evict("vase", 8, buffer=3, window=3, sinks=1, protect_prompt=True, large=0.5),
    "growing schedule": Evict("snapkv", Schedule((8, 12, 18), width=11), buffer=3, window=3, sinks=1),
    "shrinking schedule": Evict("keydiff", Schedule((20, 12, 7), width=12), buffer=4, window=3, sinks=1),
    "window as large as the prompt": Evict("snapkv", 14, buffer=5, window=12, sinks=1),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("page", "lookahead"), [(1, 1), (8, 7)])
@pytest.mark.slow
def test_variants_agree_with_the_oracle(name, page, lookahead, models):
    engine = engine_of(models[3], page=page, lookahead=lookahead)
    rollouts = engine.generate(PROMPTS, SAMPLING, Sparsity(VARIANTS[name]), record=True)
    assert_oracle_agrees(models[3], rollouts, page, formulas=False)
    assert_oracle_agrees(models[3], rollouts[2:6:2], page)
    assert sum(r.kv.evictions for r in rollouts) > 0


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
def test_every_family_agrees_with_the_oracle(shape):
    from alula.models.load import load_model

    loaded = load_model(f"shape:{shape}")
    engine = engine_of(loaded)
    rollouts = engine.generate(PROMPTS, SAMPLING, Sparsity(Evict("rkv", **SMALL)), record=True)
    assert_oracle_agrees(loaded, rollouts[::2], 4)


def test_policies_of_every_kind_in_one_call(models):
    """Different methods, windows and budgets share rows and rings; each is what it would be alone."""
    policies = [Sparsity(Evict(m, 8 + 2 * i, buffer=2 + i, window=1 + i, sinks=i % 3)) for i, m in enumerate(METHODS)]
    policies.append(Sparsity())
    prompts = [PROMPTS[i % 4] for i in range(len(policies))]
    engine = engine_of(models[3], max_rows=32)
    rollouts = engine.generate(prompts, SAMPLING, policies, record=True)
    for rollout in rollouts[:-2]:
        seen = oracle.replay(models[3].model, rollout)
        torch.testing.assert_close(rollout.logprobs, oracle.logprobs(seen, rollout), rtol=0, atol=2e-5)
        assert_events(rollout)
    for rollout in rollouts[1:-2:2]:
        seen = oracle.replay(models[3].model, rollout)
        seen.statistics = engine.query_statistics
        assert_kept_are_the_best(rollout, seen, 12**-0.5, layers=(1,))
    assert rollouts[-1].history is None
    dense = oracle.logprobs(oracle.replay(models[3].model, rollouts[-1]), rollouts[-1])
    torch.testing.assert_close(rollouts[-1].logprobs, dense, rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_budget_that_covers_everything_is_dense_to_the_bit(method, models):
    engine = engine_of(models[3])
    dense = engine.generate(PROMPTS, SAMPLING)
    evict = Evict(method, 26 + 24, window=3, sinks=2, buffer=1)
    for covered, plain in zip(engine.generate(PROMPTS, SAMPLING, Sparsity(evict), record=True), dense):
        assert covered.token_ids == plain.token_ids
        assert torch.equal(covered.logprobs, plain.logprobs)
        assert (covered.history == NEVER).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_results_are_independent_of_batch_composition(method, models):
    """Invariant 3: same tokens, same kept sets, and with the bucket pinned the same bits."""
    sparsity = Sparsity(Evict(method, **SMALL))
    loose, pinned = engine_of(models[4]), engine_of(models[4], buckets=(16,))
    for engine in (loose, pinned):
        together = engine.generate(PROMPTS, SAMPLING, sparsity, record=True)
        for request in engine.requests(PROMPTS, SAMPLING, sparsity, record=True):
            for alone in engine.stream([request]):
                same = together[alone.prompt_index * 2 + alone.sample_index]
                assert alone.token_ids == same.token_ids
                assert torch.equal(alone.history, same.history)
                torch.testing.assert_close(alone.logprobs, same.logprobs, rtol=0, atol=1e-5)
                assert engine is loose or torch.equal(alone.logprobs, same.logprobs)


@pytest.mark.slow
def test_pages_are_released(models):
    """Ceiling of pages per sequence, and long rollouts through a pool that could never hold them densely."""
    engine = engine_of(models[1], kv_memory=96 * 4 * 2 * 3 * 2 * 12 * 4, lookahead=4)
    assert engine.pool.count == 96
    evict = Evict("snapkv", 16, buffer=4, window=3, sinks=2)
    sampling = Sampling(n=8, max_new_tokens=150, ignore_eos=True)
    rollouts = engine.generate([[5] * 9, [6] * 9], sampling, Sparsity(evict))
    ceiling = pages_for(20, 4)
    assert {r.kv.peak_pages for r in rollouts} == {ceiling}
    assert {r.kv.peak_tokens for r in rollouts} == {20}
    assert engine.pool.peak <= 95 < 16 * pages_for(159, 4)
    assert engine.pool.in_use == 0
    # each eviction gives its pages back: what the last one holds is freed at the end, not by an eviction
    steps = 149 - (20 - 9)  # decode steps after the cache first filled
    assert {r.kv.evictions for r in rollouts} == {-(-steps // 4)}
    assert all(r.kv.pages_freed > 0 for r in rollouts)


def test_kv_statistics_by_hand(models):
    engine = engine_of(models[1], lookahead=4)
    (rollout,) = engine.generate(
        [[5] * 7], Sampling(max_new_tokens=9, ignore_eos=True), Sparsity(Evict("knorm", 8, buffer=3, window=2, sinks=1))
    )
    # steps find 7..10 tokens, then 8 after the eviction; attention sees one more
    seen = [8, 9, 10, 11, 9, 10, 11, 9]
    kv = rollout.kv
    assert (kv.peak_tokens, kv.evictions, kv.swaps) == (11, 2, 0)
    assert kv.mean_tokens == kv.mean_read_tokens == sum(seen) / 8
    assert kv.dense_mean_tokens == sum(range(8, 16)) / 8
    token_bytes = 2 * 3 * 2 * 12 * 4
    assert (kv.peak_bytes, kv.mean_bytes) == (11 * token_bytes, kv.mean_tokens * token_bytes)
    assert kv.saved == pytest.approx(1 - sum(seen) / sum(range(8, 16)))
    assert kv.pages_freed == 3 + 3  # all old pages, the prompt's too: no other sequence holds them
    assert kv.peak_pages == 3


def test_random_eviction_follows_the_rollouts_seed(models):
    engine = engine_of(models[1])
    policy = Sparsity(Evict("random", **SMALL))
    make = lambda seed: engine.generate(  # noqa: E731
        PROMPTS, Sampling(n=2, max_new_tokens=20, temperature=0, ignore_eos=True, seed=seed), policy, record=True
    )
    first, again, other = make(0), make(0), make(1)
    assert all(torch.equal(a.history, b.history) for a, b in zip(first, again))
    assert any(not torch.equal(a.history, b.history) for a, b in zip(first, other))
    assert not torch.equal(first[0].history, first[1].history), "rollouts of a prompt draw for themselves"


def test_every_evictor_has_a_formula_here():
    covered = {"streaming", "snapkv", "rkv", "rkv-code", "knorm", "keydiff", "tova", "h2o", "random"}
    covered |= {"vase", "vase-dkv", "triattention"}
    assert covered == set(METHODS)
    assert all(build(Evict(m, 64)) for m in METHODS)


def test_h2o_with_prompts_longer_than_its_sums(models):
    """The running sums are as long as the longest evicting sequence, not as its neighbours."""
    engine = engine_of(models[1])
    prompts, policies = [[5, 6] * 30, [7, 8]], [Sparsity(), Sparsity(Evict("h2o", 6, buffer=2, window=2, sinks=1))]
    sampling = Sampling(max_new_tokens=10, temperature=0.8, ignore_eos=True)
    dense, sparse = engine.generate(prompts, sampling, policies, record=True)
    torch.testing.assert_close(dense.logprobs, engine.score([dense])[0].logprobs, rtol=0, atol=1e-5)
    assert_oracle_agrees(models[1], [sparse], 4)


def test_a_row_that_ends_with_its_table_full(models):
    """It stands one past the last page while its neighbour decodes on."""
    engine = engine_of(models[3], lookahead=8, max_length=16)
    evict = Sparsity(Evict("rkv", 12, buffer=4, window=3, sinks=1))
    requests = [engine.requests([[5] * 5], Sampling(max_new_tokens=n, ignore_eos=True), evict)[0] for n in (12, 40)]
    assert [len(rollout) for rollout in engine.stream(requests)] == [12, 40]


def test_evictions_of_one_length_are_captured(models, monkeypatch):
    """Prompts longer than budget + buffer have a first eviction of their own length: a graph of it would serve once."""
    engine, seen = engine_of(models[1], max_rows=8), []
    run = engine.runner.evict

    def watched(state, event, table):
        seen.append((event.n, len(event.rows), captured_rows(engine.runner.cache, event)))
        return run(state, event, table)

    monkeypatch.setattr(engine.runner, "evict", watched)
    prompts = [[5] * 20, [6] * 9, [7] * 9, [8] * 9, [9] * 31]
    evict = Evict("streaming", 12, buffer=4, window=3, sinks=1)
    engine.generate(prompts, Sampling(max_new_tokens=30, ignore_eos=True), Sparsity(evict))
    assert {n for n, _, _ in seen} == {16, 20, 31}
    assert all(rows <= captured < 2 * rows if n == 16 else captured == 0 for n, rows, captured in seen)
    seen.clear()
    engine.generate(prompts, Sampling(max_new_tokens=30), Sparsity(replace(evict, protect_prompt=True)))
    assert {captured for _, _, captured in seen} == {0}


def test_larger_requests_seldom_invalidate_graphs(models):
    """Buffers grow by half at least; while a request fits, nothing is allocated."""
    state = engine_of(models[1]).runner.batch(BatchKind())
    generations = []
    for tokens in (100, 101, 102, 140, 150, 151):
        state.prepare(BatchFeatures(ring=2, accumulated=tokens), keep=True)
        generations.append(state.generation)
    assert generations == [1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3"])
def test_statistics_of_queries_are_those_of_the_model_before_rotation(shape, monkeypatch):
    """Against the plain model: what its rotary embedding is given, caught where transformers calls it."""
    from importlib import import_module

    from alula.models.load import load_model

    loaded = load_model(f"shape:{shape}")
    text, seen = [[3, 4, 5, 6, 7] * 5, [9], [8] * 40], []
    monkeypatch.setattr("alula.engine.measure_queries.PASS_TOKENS", 30)
    known = engine_of(loaded).measure_queries(text)
    module = import_module(type(loaded.model).__module__)
    rotate = module.apply_rotary_pos_emb
    caught = lambda q, k, *rest: (seen.append(q[0]), rotate(q, k, *rest))[1]  # noqa: E731
    monkeypatch.setattr(module, "apply_rotary_pos_emb", caught)
    with torch.no_grad():
        for ids in text:
            loaded.model(torch.tensor([ids]), use_cache=False)
    layers, half = loaded.model.config.num_hidden_layers, loaded.model.config.head_dim // 2
    for layer in range(layers):
        queries = torch.cat(seen[layer::layers], 1)  # [Hq, tokens, D]
        pairs = torch.complex(queries[..., :half], queries[..., half:])
        torch.testing.assert_close(known.mean[layer], pairs.mean(1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(known.size[layer], pairs.abs().mean(1), rtol=1e-4, atol=1e-5)
    assert [list(sequence) for sequence in known.text] == text


def test_statistics_of_queries_follow_the_weights(models):
    engine, policy = engine_of(oracle.custom_model(2)), Sparsity(Evict("triattention", **SMALL))
    assert engine.query_statistics is None
    engine.generate(PROMPTS, SAMPLING, Sparsity(Evict("rkv", **SMALL)))
    assert engine.query_statistics is None, "only what is needed is measured"
    engine.generate(PROMPTS, SAMPLING, policy)
    before = engine.query_statistics
    engine.generate(PROMPTS, SAMPLING, policy)
    assert engine.query_statistics is before
    engine.update_weights([(name, 1.1 * p) for name, p in engine.model.named_parameters()])
    engine.generate(PROMPTS, SAMPLING, policy)
    after = engine.query_statistics
    assert after.text == before.text
    assert not torch.equal(after.mean, before.mean)
    assert torch.equal(engine.measure_queries(after.text).mean, after.mean)
    with pytest.raises(SettingError, match="query_statistics"):
        engine_of(models[3]).query_statistics = after


def test_statistics_of_queries_in_a_pool_smaller_than_their_text(models):
    engine = engine_of(models[3], kv_memory=f"{12 * 4 * Geometry.of(models[3].model).kv_token_bytes}B")
    assert engine.pool.usable == 11
    (rollout,) = engine.generate([PROMPTS[1]], Sampling(max_new_tokens=8), Sparsity(Evict("triattention", **SMALL)))
    assert rollout.finish in ("length", "stop")


def test_evictions_whose_capture_fails_run_uncaptured(models, monkeypatch):
    """The failed attempt has evicted already, once; there is no second one."""
    prompts, policy, attempts = PROMPTS[:2], Sparsity(Evict("rkv", **SMALL)), []
    expected = engine_of(models[3]).generate(prompts, SAMPLING, policy)
    engine = engine_of(models[3])

    def capture(key, work, warm_up):
        attempts.append(warm_up())
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(engine.runner, "use_graphs", True)
    monkeypatch.setattr(engine.runner, "graph_for", lambda *size: None)
    monkeypatch.setattr(engine.runner.graphs, "capture", capture)
    actual = engine.generate(prompts, SAMPLING, policy)
    assert [r.token_ids for r in actual] == [r.token_ids for r in expected]
    assert 0 < len(attempts) < sum(r.kv.evictions for r in actual)
