"""Selection in the engine against a slow oracle: blocks read, and the resulting log-probs."""

import pytest
import torch
from test_engine_evict import assert_events, assert_kept_are_the_best

import oracle
from alula import Engine, Evict, Rollout, Sampling, Schedule, Select, Sparsity
from alula.engine.block_manager import pages_for
from alula.engine.kv_cache import KVCache
from alula.sparsity.policy import budget_at
from alula.sparsity.select import METHODS
from evictor_formulas import dot, mean

PROMPTS = [list(range(5, 12)), [3, 4, 5], [9, 8] * 13, [7]]
SAMPLING = Sampling(n=2, max_new_tokens=30, temperature=0.8, ignore_eos=True)


@pytest.fixture(scope="module")
def models():
    return {group: oracle.custom_model(group) for group in (1, 3, 4, 7)}


def engine_of(loaded, **options):
    return Engine(loaded, **({"page": 4, "kv_memory": "2MiB", "max_rows": 16, "lookahead": 3} | options))


def literal_score(method: str, keys: list[list[float]], queries: list[list[float]]) -> float:
    """One block of keys [page][D] seen by the queries [G][D] of a KV head's group."""
    columns = list(zip(*keys))
    if method == "block-topk":
        return dot([mean(c) for c in columns], [mean(c) for c in zip(*queries)])
    bounds = [sum(max(q * max(c), q * min(c)) for q, c in zip(query, columns)) for query in queries]
    return mean(bounds)


def assert_reads_are_the_best(rollout: Rollout, seen: oracle.Pass, page: int, *, every: int = 1) -> int:
    """Every recorded choice, by the formula over the oracle's keys and queries; returns how many were sparse."""
    select, prompt, sparse = rollout.sparsity.select, len(rollout.prompt_ids), 0
    assert select is not None
    assert rollout.selected is not None
    assert len(rollout.selected) == len(rollout) - 1, "the first token comes with the prompt, which is read in full"
    gone_at = rollout.history
    for step, layers in enumerate(rollout.selected):
        assert [blocks is None for blocks in layers] == [i < select.dense_layers for i in range(len(layers))]
        if step % every:
            continue
        position = prompt + step
        budget = pages_for(budget_at(select.budget, position + 1), page)
        for layer, blocks in enumerate(layers):
            for head, read in enumerate(() if blocks is None else blocks.tolist()):
                held = [j for j in range(position + 1) if gone_at is None or gone_at[layer, head, j] > position]
                total = pages_for(len(held), page)
                assert len(read) == min(budget, total)
                assert read == sorted(set(read))
                assert {0, total - 1, max(0, total - 2)} <= set(read)
                if len(read) == total:
                    continue
                sparse += 1
                group = seen.queries[layer].shape[0] // seen.keys[layer].shape[0]
                queries = seen.queries[layer][head * group : (head + 1) * group, position].tolist()
                scores = [
                    literal_score(
                        select.method, seen.keys[layer][head, held[b * page : (b + 1) * page]].tolist(), queries
                    )
                    for b in range(1, total - 2)
                ]
                left = [s for b, s in enumerate(scores, 1) if b not in read]
                chosen = [s for b, s in enumerate(scores, 1) if b in read]
                assert min(chosen, default=max(left)) >= max(left) - 1e-5 * max(1.0, abs(max(left)))
    return sparse


def assert_oracle_agrees(loaded, rollouts: list[Rollout], page: int, *, every: int = 1) -> None:
    sparse = 0
    for rollout in rollouts:
        seen = oracle.replay(loaded.model, rollout, page)
        torch.testing.assert_close(rollout.logprobs, oracle.logprobs(seen, rollout), rtol=0, atol=2e-5)
        sparse += assert_reads_are_the_best(rollout, seen, page, every=every)
    assert sparse > 0, "some steps must really have read less than everything"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_every_selector_agrees_with_the_oracle(method, group, models):
    engine = engine_of(models[group])
    select = Select(method, 16, block=4, dense_layers=1)
    rollouts = engine.generate(PROMPTS, SAMPLING, Sparsity(select=select), record=True)
    assert_oracle_agrees(models[group], rollouts[::3], 4, every=3)
    assert all(r.kv.evictions == 0 and r.history is None for r in rollouts)
    assert engine.pool.in_use == 0


VARIANTS = {
    "only what is always read": (Select("quest", 12, block=4, dense_layers=0), 4),
    "budget not a multiple of the block": (Select("block-topk", 14, block=4, dense_layers=2), 4),
    "blocks of one": (Select("block-topk", 9, block=1, dense_layers=1), 1),
    "large blocks": (Select("quest", 24, block=8, dense_layers=1), 8),
    "growing schedule": (Select("block-topk", Schedule((12, 16, 28), width=13), block=4, dense_layers=1), 4),
    "shrinking schedule": (Select("quest", Schedule((32, 20, 12), width=12), block=4, dense_layers=1), 4),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("lookahead", [1, 7])
@pytest.mark.slow
def test_variants_agree_with_the_oracle(name, lookahead, models):
    select, page = VARIANTS[name]
    engine = engine_of(models[3], page=page, lookahead=lookahead)
    rollouts = engine.generate(PROMPTS, SAMPLING, Sparsity(select=select), record=True)
    assert_oracle_agrees(models[3], rollouts[1::2], page, every=4)


BOTH = {
    "rkv & block-topk": Sparsity(Evict("rkv", 24, buffer=5, window=3, sinks=2), Select("block-topk", 16, 4, 1)),
    "snapkv & quest": Sparsity(Evict("snapkv", 18, buffer=1, window=3, sinks=1), Select("quest", 16, 4, 0)),
    "h2o & block-topk": Sparsity(Evict("h2o", 22, buffer=3, window=3, sinks=1), Select("block-topk", 16, 4, 0)),
    "prompt protected": Sparsity(
        Evict("keydiff", 10, buffer=3, window=3, sinks=1, protect_prompt=True), Select("block-topk", 16, 4, 1)
    ),
    "two schedules": Sparsity(
        Evict("tova", Schedule((28, 18), width=20), buffer=4, window=3, sinks=1),
        Select("quest", Schedule((20, 16), width=30), 4, 1),
    ),
}


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("lookahead", [1, 7])
@pytest.mark.slow
def test_evict_and_select_together(name, lookahead, models):
    engine = engine_of(models[3], lookahead=lookahead)
    rollouts = engine.generate(PROMPTS, SAMPLING, BOTH[name], record=True)
    assert_oracle_agrees(models[3], rollouts[1::2], 4, every=4)
    for rollout in rollouts:
        assert_events(rollout)
    rollout = rollouts[4]
    assert_kept_are_the_best(rollout, oracle.replay(models[3].model, rollout, 4), 12**-0.5)
    assert sum(r.kv.evictions for r in rollouts) > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_budget_that_covers_everything_is_dense_to_the_bit(method, models):
    engine = engine_of(models[3])
    dense = engine.generate(PROMPTS, SAMPLING)
    policies = [
        Sparsity(select=Select(method, 26 + 30, block=4, dense_layers=0)),
        Sparsity(Evict("rkv", 26 + 30), Select(method, 26 + 30, block=4, dense_layers=1)),
    ]
    for policy in policies:
        for covered, plain in zip(engine.generate(PROMPTS, SAMPLING, policy), dense):
            assert covered.token_ids == plain.token_ids
            assert torch.equal(covered.logprobs, plain.logprobs)
            assert covered.kv.mean_read_tokens == plain.kv.mean_read_tokens


@pytest.mark.parametrize("method", METHODS)
def test_dense_layers_that_cover_the_model_are_dense_to_the_bit(method, models):
    engine = engine_of(models[3])
    covered = engine.generate(PROMPTS, SAMPLING, Sparsity(select=Select(method, 12, block=4, dense_layers=3)))
    for one, plain in zip(covered, engine.generate(PROMPTS, SAMPLING)):
        assert one.token_ids == plain.token_ids
        assert torch.equal(one.logprobs, plain.logprobs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_results_are_independent_of_batch_composition(method, models):
    policies = [
        Sparsity(select=Select(method, 20, block=4, dense_layers=1)),
        Sparsity(Evict("rkv", 24, buffer=3, window=3, sinks=2), Select(method, 16, block=4, dense_layers=1)),
        Sparsity(),
        Sparsity(select=Select(method, Schedule((16, 24), width=17), block=4, dense_layers=1)),
    ]
    loose, pinned = engine_of(models[4]), engine_of(models[4], buckets=(16,))
    for engine in (loose, pinned):
        together = engine.generate(PROMPTS, SAMPLING, policies, record=True)
        for request in engine.requests(PROMPTS, SAMPLING, policies, record=True):
            for alone in engine.stream([request]):
                same = together[alone.prompt_index * 2 + alone.sample_index]
                assert alone.token_ids == same.token_ids
                for a, b in zip(alone.selected or (), same.selected or ()):
                    assert all(x is y is None or torch.equal(x, y) for x, y in zip(a, b))
                torch.testing.assert_close(alone.logprobs, same.logprobs, rtol=0, atol=1e-5)
                assert engine is loose or torch.equal(alone.logprobs, same.logprobs)


def test_read_tokens_are_counted(models):
    engine = engine_of(models[1], lookahead=4)
    policy = Sparsity(select=Select("quest", 12, block=4, dense_layers=0))
    (rollout,) = engine.generate([[5] * 14], Sampling(max_new_tokens=6, ignore_eos=True), policy)
    # 15..19 tokens in 4, 4, 5, 5, 5 blocks; three are read, the last of them not always full
    assert rollout.kv.mean_read_tokens == ((8 + 3) + (8 + 4) + (8 + 1) + (8 + 2) + (8 + 3)) / 5
    assert rollout.kv.mean_tokens == rollout.kv.dense_mean_tokens == sum(range(15, 20)) / 5


@pytest.mark.slow
def test_one_selector_after_another_on_the_same_pages(models):
    """Summaries of one kind never leak into a call of the other, nor from a call without any."""
    reused = engine_of(models[3])
    for method in ("quest", "block-topk", None, "quest", "block-topk"):
        policy = Sparsity() if method is None else Sparsity(select=Select(method, 20, block=4, dense_layers=0))
        got = reused.generate(PROMPTS[::-1], SAMPLING, policy)
        expected = engine_of(models[3]).generate(PROMPTS[::-1], SAMPLING, policy)
        assert [r.token_ids for r in got] == [r.token_ids for r in expected]


def test_evictions_compute_no_unused_summaries(models, monkeypatch):
    """Once an engine has served a selector its cache has summaries; later calls that only evict leave them alone."""
    engine, evict = engine_of(models[3]), Evict("rkv", 24, buffer=5, window=3, sinks=2)
    engine.generate(PROMPTS, SAMPLING, Sparsity(select=Select("quest", 16, 4, 1)))
    calls = []
    summarise = KVCache.summarise
    monkeypatch.setattr(KVCache, "summarise", lambda cache, *pages: calls.append(summarise(cache, *pages)))
    assert sum(r.kv.evictions for r in engine.generate(PROMPTS, SAMPLING, Sparsity(evict))) > 0
    assert not calls
    engine.generate(PROMPTS, SAMPLING, Sparsity(evict, Select("quest", 16, 4, 1)))
    assert len(calls) > 1


def test_pages_are_summarised_alike_however_many_layers_at_a_time(models, monkeypatch):
    cache = engine_of(models[3]).cache
    cache.prepare("quest")
    cache.keys.normal_()
    pages = torch.tensor([3, 1, 5])
    cache.summarise("quest", pages)
    expected = torch.stack([cache.keys[:, pages].amin(-2), cache.keys[:, pages].amax(-2)], -2)
    assert torch.equal(cache.summaries["quest"][:, pages], expected)
    cache.summaries["quest"].zero_()
    monkeypatch.setattr("alula.ops.summarise_pages.TORCH_BYTES", 1)
    cache.summarise("quest", pages)
    assert torch.equal(cache.summaries["quest"][:, pages], expected)


def test_evictions_of_a_row_with_a_selector_and_one_without(models):
    """One rollout selects and evicts, the other only evicts; each is as when it runs alone."""
    engine, evict = engine_of(models[3]), Evict("rkv", 24, buffer=5, window=3, sinks=2)
    prompts, both = [PROMPTS[2], PROMPTS[2][::-1]], Sparsity(evict, Select("quest", 16, 4, 1))
    policies = [both, Sparsity(evict)]
    together = engine.generate(prompts, SAMPLING, policies)
    (request, _) = engine.requests(prompts, SAMPLING, policies)
    for alone in engine.stream([request]):
        assert alone.token_ids == together[alone.sample_index].token_ids
        assert alone.kv.evictions > 0
