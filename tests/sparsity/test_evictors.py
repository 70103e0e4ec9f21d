"""Evictors against their formulas, written out as loops over Python numbers."""

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.errors import SettingError
from alula.sparsity.evict import METHODS, Evictor, build, keep
from alula.sparsity.evict.query_statistics import QueryStatistics
from alula.sparsity.evict.vase import RESERVED
from alula.sparsity.policy import Evict
from evictor_formulas import (
    WINDOW,
    assert_close,
    best_slots,
    cached,
    dot,
    each_head,
    eviction_word,
    group_of,
    in_pages,
    keydiff_scores,
    knorm_scores,
    mean,
    only,
    redundancy_scores,
    rkv_scores,
    snapkv_scores,
    softmax,
    some_statistics,
    splitmix64,
    triattention_logits,
    vase_dkv_scores,
    vase_scores,
    z_scores,
)


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("window", [1, 5, 8])
def test_snapkv_and_rkv_follow_their_formulas(group, window):
    for name, formula in (("snapkv", snapkv_scores), ("rkv", rkv_scores)):
        evictor, kv = cached(name, group=group, window=window, seed=group)
        scores = evictor.score(kv)
        for r, h, keys in each_head(kv):
            expected = formula(keys, group_of(kv, r, h), kv.scaling, window)
            assert_close(scores[r, h, : len(keys) - window], expected)


def test_options_of_rkv_reach_the_formula():
    _, kv = cached("rkv", rows=1)
    options = {"mix": 0.4, "kernel": 3, "threshold": 0.8}
    scores = build(Evict("rkv", 20, window=WINDOW, **options)).score(kv)
    for r, h, keys in each_head(kv):
        assert_close(scores[r, h, :-WINDOW], rkv_scores(keys, group_of(kv, r, h), kv.scaling, WINDOW, **options))


def test_rkv_with_mix_1_is_snapkv():
    evictor, kv = cached("snapkv")
    assert torch.equal(METHODS["rkv"](window=WINDOW, mix=1.0).score(kv), evictor.score(kv))  # type: ignore[call-arg]


def test_rkv_code_sums_the_heads_of_layer_0_and_keeps_the_same_tokens_everywhere():
    evictor, kv = cached("rkv-code", rows=3)
    scores = evictor.score(kv)
    layers, heads = kv.layers, kv.shape[1]
    assert layers > 1
    assert heads > 1
    for row in range(3):
        first = [rkv_scores(kv.keys[row * layers, h].tolist(), group_of(kv, row * layers, h), kv.scaling, WINDOW)
                 for h in range(heads)]  # fmt: skip
        expected = [sum(column) for column in zip(*first)]
        for layer in range(layers):
            for h in range(heads):
                assert_close(scores[row * layers + layer, h, :-WINDOW], expected)
    kept = keep(scores, count=12, sinks=0, window=WINDOW).view(3, layers * heads, 12)
    assert torch.equal(kept, kept[:, :1].expand_as(kept)), "all layers and heads keep the same tokens"
    assert not torch.equal(kept[0], kept[1]), "and each sequence its own"


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 30.0])
def test_redundancy_where_all_some_or_no_keys_are_similar(spread):
    from alula.ops.rkv_score import redundancy

    _, kv = cached("rkv", spread=spread, n=25)
    keys = kv.keys.clone()
    keys[0, 0, 7] = 0  # a key without direction
    keys[1, 1, :12] = keys[1, 1, 12:24]  # repeated keys
    scores = redundancy(keys.flatten(0, 1), 0.5).view(keys.shape[:3])
    for r, h in ((0, 0), (1, 1), (3, 0)):
        assert_close(scores[r, h], redundancy_scores(keys[r, h].tolist()))


def test_redundancy_is_the_same_in_pieces(monkeypatch):
    from alula.ops import rkv_score as module

    keys = cached("rkv", n=25)[1].keys.flatten(0, 1)
    expected = module.redundancy_torch(keys, 0.5)
    monkeypatch.setattr(module, "TORCH_ROWS", 7)
    torch.testing.assert_close(module.redundancy_torch(keys, 0.5), expected, rtol=1e-6, atol=1e-7)


def test_tova_follows_its_formula():
    evictor, kv = cached("tova", group=3)
    scores = evictor.score(kv)
    for r in range(len(kv.keys)):
        heads = []
        for h in range(kv.keys.shape[1]):
            keys = kv.keys[r, h].tolist()
            heads += [softmax([kv.scaling * dot(q[0], k) for k in keys]) for q in group_of(kv, r, h)]
        expected = [mean(column) for column in zip(*heads)]
        for h in range(kv.keys.shape[1]):
            assert_close(scores[r, h], expected)


def test_keydiff_and_knorm_follow_their_formulas():
    evictor, kv = cached("keydiff")
    for r, h, keys in each_head(kv):
        assert_close(evictor.score(kv)[r, h], keydiff_scores(keys))
        assert_close(METHODS["knorm"](window=WINDOW).score(kv)[r, h], knorm_scores(keys))


def test_h2o_ranks_by_attention_received_over_all_queries():
    evictor, kv = cached("h2o", rows=1, layers=1, kv_heads=2, n=12)
    queries = torch.randn(12, 2, 3, 8, generator=torch.Generator().manual_seed(1))
    received = [[0.0] * 12 for _ in range(2)]
    for t in range(12):
        for h in range(2):
            for g in range(3):
                seen = kv.keys[0, h, : t + 1].tolist()
                attention = softmax([kv.scaling * dot(queries[t, h, g].tolist(), k) for k in seen])
                for j, weight in enumerate(attention):
                    received[h][j] += weight
    kv = replace(kv, attention=torch.tensor([received]))
    kept = keep(evictor.score(kv), count=7, sinks=1, window=2)
    for h in range(2):
        assert kept[0, h].tolist() == best_slots(received[h], 12, 7, 1, 2)


def test_streaming_keeps_sinks_and_the_most_recent():
    evictor, kv = cached("streaming", n=20)
    kept = keep(evictor.score(kv), count=9, sinks=3, window=2)
    assert kept.tolist() == [[[0, 1, 2, *range(14, 20)]] * 2] * 4


def test_random_is_a_hash_of_rollout_layer_head_slot_and_length():
    evictor, kv = cached("random", rows=3, layers=2)
    state = torch.random.get_rng_state()
    scores = evictor.score(kv)
    assert torch.equal(torch.random.get_rng_state(), state)
    for r in range(6):
        for h in range(2):
            for j in (0, 7, 29):
                x = splitmix64(int(kv.row_keys[r])) ^ int(kv.position[r])
                x = splitmix64(splitmix64(splitmix64(x) ^ (r % 2)) ^ h) ^ j
                assert scores[r, h, j].item() == (splitmix64(x) >> 40) / 2**24
    later = evictor.score(replace(kv, position=kv.position + 1))
    assert len(torch.cat([scores, later]).unique()) == 2 * scores.numel()


def test_random_is_uniform():
    evictor, kv = cached("random", rows=2, n=5000, dim=1)
    counts = torch.histc(evictor.score(kv), bins=20, min=0, max=1)
    expected = counts.sum() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("sinks", "protected", "options"), [(0, 0, {}), (2, 0, {"large": 0.5}), (1, 7, {"kernel": 3})])
def test_vase_follows_its_formula(sinks, protected, options):
    evictor, kv = cached("vase", group=3)
    evictor, kv = replace(evictor, **options), replace(kv, sinks=sinks, protected=protected, keep=12 + protected)
    scores = evictor.score(kv)
    for r, h, keys in each_head(kv):
        key, t, n = int(kv.row_keys[r]), int(kv.position[r]), len(keys)
        draw = lambda j: eviction_word(key, t, r % kv.layers, 2 * n, h * n + j)  # noqa: B023, E731
        limits = {"budget": 12, "sinks": sinks, "protected": protected} | options
        values = kv.values.gathered[r, h].tolist()
        expected = vase_scores(keys, values, group_of(kv, r, h), kv.scaling, WINDOW, draw, **limits)[:-WINDOW]
        actual = scores[r, h, :-WINDOW]
        kept = [j for j, score in enumerate(expected) if score == math.inf]
        assert (actual >= RESERVED).nonzero()[:, 0].tolist() == kept
        assert_close(torch.where(actual >= RESERVED, 0.0, actual), [0.0 if s == math.inf else s for s in expected])


def test_vase_draws_in_proportion_to_attention():
    """One token of two is drawn: its share over many rollouts is its share of the attention."""
    evictor, kv = cached("vase", rows=1, layers=1, kv_heads=1, n=WINDOW + 2, seed=3)
    evictor = replace(evictor, large=0.0, kernel=1)
    rows = 20_000
    many = replace(
        kv,
        paged=replace(kv.paged, table=kv.paged.table.expand(rows, -1)),
        values=replace(kv.values, table=kv.values.table.expand(rows, -1)),
        queries=kv.queries.expand(rows, -1, -1, -1),
        row_keys=torch.arange(rows) * 0x9E3779B97F4A7,
        position=kv.position.expand(rows),
        keep=WINDOW + 1,
    )
    share = (keep(evictor.score(many), count=WINDOW + 1, sinks=0, window=WINDOW)[:, 0, 0] == 0).float().mean().item()
    expected = mean([softmax([kv.scaling * dot(q, k) for k in kv.keys[0, 0, :2].tolist()])[0]
                     for member in group_of(kv, 0, 0) for q in member])  # fmt: skip
    assert 0.2 < expected < 0.8
    assert abs(share - expected) < 3.3 * math.sqrt(expected * (1 - expected) / rows)


@pytest.mark.parametrize("rank", [1, 20])
def test_vase_dkv_follows_its_formula(rank):
    evictor, kv = cached("vase-dkv")
    evictor = replace(evictor, rank=rank)
    scores = evictor.score(kv)
    for r, h, keys in each_head(kv):
        words = 2 * 8 * rank
        draw = lambda i: eviction_word(int(kv.row_keys[r]), int(kv.position[r]), r % kv.layers, words, i)  # noqa: B023, E731
        expected = torch.tensor(vase_dkv_scores(keys, kv.values.gathered[r, h].tolist(), draw, rank))
        torch.testing.assert_close(scores[r, h], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("protected", "rope_scaling", "horizon"), [(0, 1.0, 65536), (9, 1.3, 5)])
def test_triattention_follows_its_formula(protected, rope_scaling, horizon):
    """From keys before their rotation, at any positions: the evictor sees rotated keys and no positions."""
    rows, layers, heads, group, n, dim = 2, 2, 2, 3, 14, 8
    evictor, kv = cached("triattention", rows=rows, layers=layers, kv_heads=heads, group=group, n=n)
    known = some_statistics(layers, heads * group, dim, 5, rope_scaling)
    kv = replace(kv, statistics=known, protected=protected)
    scores = replace(evictor, horizon=horizon).score(kv)
    positions = [3 * j + j % 2 for j in range(n)]
    for row in range(rows):
        for h in range(heads):
            by_layer = []
            for layer in range(layers):
                keys, members = kv.keys[row * layers + layer, h].tolist(), range(h * group, (h + 1) * group)
                logits = [
                    triattention_logits(
                        keys,
                        positions,
                        int(kv.position[row * layers]),
                        known.mean[layer, g].tolist(),
                        known.size[layer, g].tolist(),
                        known.frequencies.tolist(),
                        rope_scaling,
                        horizon,
                    )
                    for g in members
                ]
                by_layer.append([max(column) for column in zip(*(z_scores(line, protected) for line in logits))])
            expected = torch.tensor([mean(column) for column in zip(*by_layer)])
            for layer in range(layers):
                torch.testing.assert_close(scores[row * layers + layer, h], expected, rtol=1e-4, atol=1e-5)


def test_statistics_of_queries_are_saved_and_loaded(tmp_path):
    known = some_statistics(2, 4, 8, 0, 1.25)
    known.save(tmp_path / "queries.safetensors")
    loaded = QueryStatistics.load(tmp_path / "queries.safetensors")
    for name in ("frequencies", "mean", "size"):
        assert torch.equal(getattr(loaded, name), getattr(known, name))
    assert (loaded.text, loaded.rope_scaling) == (known.text, known.rope_scaling)
    (tmp_path / "other").write_bytes(b"no")
    with pytest.raises(SettingError, match="statistics="):
        QueryStatistics.load(tmp_path / "other")


def test_directions_of_vase_dkv_are_normal():
    evictor, kv = cached("vase-dkv", rows=200, layers=2, dim=32, n=WINDOW)
    normal = evictor.directions(kv) * 20**0.5
    assert normal.mean().abs() < 0.01
    assert (normal.var() - 1).abs() < 0.02
    assert (normal.pow(4).mean() - 3).abs() < 0.1
    between = torch.corrcoef(normal.view(200, 2, -1)[:, :, :50].flatten(1).T)
    assert (between - torch.eye(100)).abs().max() < 5 / 200**0.5, "layers and entries are independent"


# --- several rounds of eviction --------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("name", ["snapkv", "rkv"])
def test_rounds_of_eviction_keep_the_formulas_tokens(name, group):
    """Score, keep, gather, grow and score again: the positions kept stay those of a loop over plain lists."""
    formula = {"snapkv": snapkv_scores, "rkv": rkv_scores}[name]
    rows, heads, budget, buffer, sinks, dim = 3, 2, 14, 8, 2, 8
    evictor = METHODS[name](window=WINDOW)
    random = torch.Generator().manual_seed(group)
    everything = torch.randn(rows, heads, 1, dim, generator=random) + torch.randn(
        rows, heads, budget + 3 * buffer, dim, generator=random
    )
    positions = torch.arange(budget + buffer).expand(rows, heads, -1)
    expected = [[list(range(budget + buffer)) for _ in range(heads)] for _ in range(rows)]
    for turn in range(3):
        length = budget + (turn + 1) * buffer
        queries = torch.randn(rows, heads * group, WINDOW, dim, generator=random)
        keys = everything.gather(2, positions[..., None].expand(-1, -1, -1, dim))
        kv = replace(cached(name)[1], paged=in_pages(keys, 1), queries=queries, scaling=dim**-0.5)
        kept = keep(evictor.score(kv), count=budget, sinks=sinks, window=WINDOW)
        positions = positions.gather(-1, kept.long())
        for r in range(rows):
            for h in range(heads):
                scores = formula(
                    [everything[r, h, p].tolist() for p in expected[r][h]], group_of(kv, r, h), kv.scaling, WINDOW
                )
                slots = best_slots(scores, budget + buffer, budget, sinks, WINDOW)
                expected[r][h] = [expected[r][h][slot] for slot in slots]
        assert positions.tolist() == expected
        assert len({tuple(map(tuple, row)) for row in expected}) == rows, "sequences keep different tokens"
        new = torch.arange(length, length + buffer)
        positions = torch.cat([positions, new.expand(rows, heads, -1)], -1)
        expected = [[[*kept, *new.tolist()] for kept in row] for row in expected]


# --- properties of every method ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_scores_are_fp32_finite_repeatable_and_do_not_change_their_input(name):
    evictor, kv = cached(name)
    before = kv.keys.clone()
    scores = evictor.score(kv)
    assert scores.shape == kv.keys.shape[:3]
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    assert torch.equal(scores, evictor.score(kv))
    assert torch.equal(kv.keys, before)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_independent_of_batch_composition(name, dtype):
    evictor, kv = cached(name, rows=3)
    queries = None if kv.queries is None else kv.queries.to(dtype)
    kv = replace(kv, paged=in_pages(kv.keys.to(dtype), kv.layers), queries=queries)
    together = evictor.score(kv)
    for row in range(3):
        assert torch.equal(evictor.score(only(kv, row)), together[2 * row : 2 * row + 2])


@pytest.mark.parametrize("name", METHODS)
def test_scores_do_not_protect_the_first_token(name):
    """Sinks are protected by `keep`, not by the score: without them the first token may be evicted."""
    evictor, kv = cached(name)
    kept = keep(evictor.score(kv), count=10, sinks=0, window=WINDOW)
    assert (kept[..., 0] > 0).any()


@pytest.mark.parametrize("name", METHODS)
def test_queries_in_any_order_give_the_same_choice(name):
    evictor, kv = cached(name)
    if kv.queries is None:
        assert evictor.queries == 0
        return
    turned = replace(kv, queries=kv.queries.roll(1, 2))
    torch.testing.assert_close(evictor.score(turned), evictor.score(kv), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_documents_its_formula_source_and_options(name):
    text = METHODS[name].__doc__ or ""
    assert "score_j =" in text
    assert "Source:" in text or name == "random"
    for option in METHODS[name].__dataclass_fields__:
        assert option == "window" or f"{option}:" in text
    assert issubclass(METHODS[name], Evictor)


# --- keep ------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_keep_is_the_literal_choice(data):
    n = data.draw(st.integers(1, 24))
    first = data.draw(st.integers(0, n - 1))
    window = data.draw(st.integers(1, n - first))
    count = data.draw(st.integers(first + window, n))
    sinks = data.draw(st.integers(0, first))
    value = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, math.inf, -math.inf, math.nan])
    rows = data.draw(st.lists(st.lists(value, min_size=n, max_size=n), min_size=2, max_size=4))
    scores = torch.tensor(rows).view(len(rows), 1, n)
    kept = keep(scores, count=count, sinks=sinks, window=window, protected=first)
    for row, slots in zip(rows, kept[:, 0].tolist()):
        clean = [-math.inf if math.isnan(x) else x for x in row]
        assert slots == best_slots(clean, n, count, first, window)


def test_keep_takes_the_larger_of_sinks_and_protected():
    scores = torch.arange(10.0).flip(0).neg().view(1, 1, 10)  # rising
    assert keep(scores, count=5, sinks=2, window=1, protected=1).tolist() == [[[0, 1, 7, 8, 9]]]
    assert keep(scores, count=5, sinks=1, window=1, protected=3).tolist() == [[[0, 1, 2, 8, 9]]]


@pytest.mark.parametrize(("count", "first", "window"), [(4, 3, 2), (11, 1, 1)])
def test_keep_raises_on_impossible_counts(count, first, window):
    with pytest.raises(SettingError, match=f"cannot keep {count} of 10"):
        keep(torch.zeros(1, 1, 10), count=count, sinks=first, window=window)


# --- settings --------------------------------------------------------------------------------------------------


def test_build_passes_window_and_options():
    evictor = build(Evict("rkv", 64, window=5, mix=0.07, threshold=0.6))
    assert evictor == METHODS["rkv"](window=5, mix=0.07, threshold=0.6)  # type: ignore[call-arg]
    assert evictor.queries == 5
    assert build(Evict("tova", 64, window=5)).queries == 1
    assert build(Evict("h2o", 64)).accumulates


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("rvk", {}, "unknown evictor 'rvk'; did you mean 'rkv'?"),
        ("rkv", {"mx": 0.1}, "did you mean 'mix'?"),
        ("snapkv", {"bufer": 64}, "did you mean 'buffer'?"),
        ("streaming", {"kernel": 7}, "unknown setting of evictor 'streaming': 'kernel'"),
        ("rkv", {"mix": "much"}, "mix='much': must be a number."),
        ("rkv", {"mix": 1.5}, "mix=1.5"),
        ("rkv", {"threshold": 1.0}, "threshold=1.0"),
        ("snapkv", {"kernel": 6}, "kernel=6"),
        ("vase", {"large": 1.5}, "large=1.5"),
        ("triattention", {"horizon": 0}, "horizon=0"),
        ("vase-dkv", {"rank": 0}, "rank=0"),
        ("snapkv", {"kernel": 7.0}, "kernel=7.0: must be a whole number."),
    ],
)
def test_bad_settings_raise(method, options, message):
    with pytest.raises(SettingError) as raised:
        Evict(method, 64, **options)
    assert message in str(raised.value)


def test_the_documented_example_of_a_custom_evictor_runs(monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "evictors.md").read_text()
    example = text.split("## Writing your own")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.setitem(METHODS, "loudest", Evictor)  # removed again afterwards
    exec(example, {"__name__": "example"})
    evictor, kv = build(Evict("loudest", 20, power=2.0)), cached("knorm")[1]
    torch.testing.assert_close(evictor.score(kv), kv.keys.square().sum(-1))


def test_the_table_of_methods_is_complete():
    text = (Path(__file__).parents[2] / "docs" / "evictors.md").read_text()
    for name, method in METHODS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        for option in fields(method):
            assert option.name == "window" or f"`{option.name}={option.default}`" in row
