"""The eviction kernels against their torch twins: on CUDA if available, else in Triton's interpreter."""

import math
from dataclasses import replace

import pytest
import torch

from alula import Engine, Evict, Sampling, Sparsity
from alula.engine.batch_state import BatchFeatures, BatchState
from alula.engine.eviction import compile_eviction, evict, upload_tables
from alula.engine.kv_cache import KVCache
from alula.engine.schedule_plan import EvictionEvent
from alula.engine.sequence import BatchKind, Request, Sequence
from alula.models.geometry import Geometry
from alula.models.load import load_model
from alula.ops.compact import PagedKeys, _copy, _install, install
from alula.ops.importance import importance, mean_attention_torch, mean_attention_triton
from alula.ops.rkv_score import (
    _find_last,
    _pool_and_mix,
    alignment_torch,
    alignment_triton,
    pool_and_mix,
    pool_and_mix_torch,
    redundancy_torch,
    redundancy_triton,
)
from alula.ops.top_indices import _top_indices, top_indices_torch, top_indices_triton
from alula.sparsity.evict import METHODS, Cached, keep
from evictor_formulas import best_slots, cached, in_pages, only, some_statistics
from kernel_inputs import DEVICE

pytestmark = pytest.mark.kernels

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter's bf16 product is wrong


@pytest.fixture(autouse=True)
def run_kernels(monkeypatch):
    monkeypatch.setenv("ALULA_TRITON_INTERPRET", "1")


def some_keys(heads, n, dim, *, spread=1.0, dtype=torch.float32):
    random = torch.Generator().manual_seed(n + dim)
    centre = torch.randn(heads, 1, dim, generator=random)
    return (centre + spread * torch.randn(heads, n, dim, generator=random)).to(DEVICE, dtype)


def some_queries(rows, heads, count, dim, dtype=torch.float32):
    return torch.randn(rows, heads, count, dim, generator=torch.Generator().manual_seed(count)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(
    ("n", "dim", "spread"),
    [(1, 8, 1.0), (20, 16, 1.0), (64, 16, 1.0), (80, 24, 0.3), (150, 16, 0.7), (150, 16, 1.5), (70, 32, 30.0)],
)
def test_redundancy(n, dim, spread, dtype):
    """Few and many similar keys, one tile and several, ragged ones, a dimension that is no power of two."""
    keys = some_keys(2, n, dim, spread=spread, dtype=dtype)
    keys[0, n // 2] = 0
    torch.testing.assert_close(redundancy_triton(keys, 0.5), redundancy_torch(keys, 0.5), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(alignment_triton(keys), alignment_torch(keys), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_redundancy_at_both_ends_of_the_scan():
    """The last similar key in the last tile, in the first one, and nowhere."""
    n = 140
    keys = torch.eye(n, dtype=torch.float32, device=DEVICE)[None].repeat(3, 1, 1)
    keys[0, :, -1] += 3  # all alike
    keys[1, 5] = keys[1, 3]  # one pair near the start
    for threshold in (0.0, 0.5, 0.9):
        expected = redundancy_torch(keys, threshold)
        torch.testing.assert_close(redundancy_triton(keys, threshold), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize(("count", "n", "dim"), [(1, 33, 16), (5, 64, 8), (8, 80, 24), (16, 70, 16)])
def test_importance(group, count, n, dim, dtype):
    queries, keys = (
        some_queries(2, 2 * group, count, dim, dtype),
        some_keys(4, n, dim, dtype=dtype).unflatten(0, (2, 2)),
    )
    expected = mean_attention_torch(queries, keys, dim**-0.5, count)
    actual = mean_attention_triton(queries, in_pages(keys, 2), dim**-0.5, count)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert (actual[..., n - count :] == 0).all()


def test_importance_of_a_window_that_one_program_cannot_hold():
    queries, keys = some_queries(1, 4, 40, 16), some_keys(1, 60, 16)[None]
    for window in (0, 40):
        expected = mean_attention_torch(queries, keys, 0.3, window)
        actual = mean_attention_triton(queries, in_pages(keys, 1), 0.3, window)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's, about lanes past the end of a row
@pytest.mark.parametrize("kernel", [1, 3, 7, 31])
@pytest.mark.parametrize("n", [1, 20, 1500])
@pytest.mark.slow
def test_pool_and_mix_gives_the_bits_that_torch_gives(n, kernel):
    important, redundant = some_keys(2, 3, n).softmax(-1)
    important[1, n // 2] = math.nan
    for mix in (0.0, 0.07, 0.1, 1.0):
        expected = pool_and_mix_torch(important, redundant, kernel, mix)
        actual = pool_and_mix(important, redundant, kernel, mix)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_scores_do_not_overflow_where_logits_are_large():
    queries, keys = some_queries(1, 2, 8, 16) * 1000, some_keys(1, 70, 16)[None]
    expected = mean_attention_torch(queries, keys, 1.0, 8)
    actual = mean_attention_triton(queries, in_pages(keys, 1), 1.0, 8)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("n", "count", "first", "window"),
    [
        (1, 1, 0, 1),
        (9, 9, 4, 5),
        (9, 6, 4, 2),
        (9, 5, 0, 0),
        (64, 20, 3, 0),
        (100, 37, 0, 8),
        (100, 99, 90, 1),
    ],
)
def test_top_indices_with_slots_that_always_stay(n, count, first, window):
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan])
    drawn = torch.randint(len(values), (5, n), generator=torch.Generator().manual_seed(n))
    scores = values[drawn].to(DEVICE)
    expected = []
    for row in scores.tolist():
        expected.append(best_slots([-math.inf if math.isnan(x) else x for x in row], n, count, first, window))
    for choose in (top_indices_torch, top_indices_triton):
        assert choose(scores, count, first, window).tolist() == expected


@pytest.mark.parametrize("width", [1, 5, 64, 70])
def test_install(width, monkeypatch):
    """Rows in any order, tables that are parts of one upload, a table wider than what is written."""
    upload = torch.arange(3 * (width + 4), dtype=torch.int32).view(3, -1).to(DEVICE)
    upload[:, 2] = torch.tensor([4, 0, 2])
    for kernels in "01":
        monkeypatch.setenv("ALULA_TRITON_INTERPRET", kernels)
        table = torch.full((6, 80), -1, dtype=torch.int32, device=DEVICE)
        state = torch.full((2, 6), -1, dtype=torch.int32, device=DEVICE)
        install(table, state[1], upload[:, 2], upload[:, 3 : 3 + width], 37)
        assert state.tolist() == [[-1] * 6, [37, -1, 37, -1, 37, -1]]
        for row in range(6):
            pages = upload[[4, 0, 2].index(row), 3 : 3 + width].tolist() if row in (0, 2, 4) else []
            assert table[row].tolist() == pages + [-1] * (80 - len(pages))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_every_evictor_chooses_alike_with_and_without_kernels(name, monkeypatch):
    evictor, kv = cached(name, group=3, n=70)
    kv = on_device(kv)
    with_kernels = evictor.score(kv)
    kept = keep(with_kernels, count=30, sinks=2, window=4)
    monkeypatch.setenv("ALULA_TRITON_INTERPRET", "0")
    plain = evictor.score(on_device(kv, "cpu"))
    torch.testing.assert_close(with_kernels[..., :-4].cpu(), plain[..., :-4], rtol=1e-4, atol=1e-6)
    assert torch.equal(kept.cpu(), keep(plain, count=30, sinks=2, window=4))
    for r in range(len(plain)):
        assert kept[r, 1].tolist() == best_slots(plain[r, 1].tolist(), 70, 30, 2, 4)


@pytest.mark.parametrize("name", METHODS)
def test_scores_are_independent_of_batch_composition(name):
    evictor, kv = cached(name, rows=2, layers=1, n=70)
    kv = on_device(kv)
    assert torch.equal(evictor.score(only(kv, 1)), evictor.score(kv)[1:])


def test_importance_is_the_same_for_any_pages():
    """Pages of any size, in a table that is part of a wider one; queries that are not contiguous."""
    queries, keys = some_queries(4, 4, 8, 16), some_keys(8, 70, 16).unflatten(0, (4, 2))
    expected = importance(queries, in_pages(keys, 2, page=70), 0.25, 8, 7)
    ring = queries.transpose(1, 2).contiguous().transpose(1, 2)
    for page in (1, 16):
        paged = in_pages(keys, 2, page)
        wide = torch.full((2, 80), 10**6, dtype=torch.int32, device=DEVICE)
        wide[:, 3 : 3 + paged.table.shape[1]] = paged.table
        paged = PagedKeys(paged.pool, wide[:, 3:], 70)
        assert torch.equal(importance(ring, paged, 0.25, 8, 7), expected)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_a_whole_eviction_is_the_same_with_and_without_kernels(name, monkeypatch):
    """Two rows in other places than their numbers, page tables of different lengths, one upload with another event."""
    geometry = Geometry(0, 2, 4, 2, 16, value_bytes=4)
    request = Request(0, [5] * 6, Sampling(), Sparsity(evict=Evict(name, 20, window=4, sinks=2)), frozenset(), 0)
    sequences = [Sequence(request, sample) for sample in range(2)]
    pages = torch.randperm(59, generator=torch.Generator().manual_seed(0)).add(1).tolist()
    first = EvictionEvent(0, sequences[:1], 30, 20, [pages[:8]], [pages[8:13]], [3])
    event = EvictionEvent(0, sequences, 37, 20, [pages[13:23], pages[23:34]], [pages[34:39], pages[39:45]], [4, 1])
    results = []
    for kernels in "01":
        monkeypatch.setenv("ALULA_TRITON_INTERPRET", kernels)
        device = torch.device(DEVICE if kernels == "1" else "cpu")
        cache = KVCache(geometry, torch.float32, 0.25, 60, 4, device)
        cache.prepare("quest")
        cache.summaries["quest"].zero_()
        batch = BatchState(BatchKind("quest"), geometry, 6, 12, 1, device, torch.float32, 8)
        batch.prepare(BatchFeatures(ring=4, accumulated=40), keep=False)
        random = torch.Generator().manual_seed(1)
        for state in (cache.keys, cache.values, batch.ring, batch.accumulated):
            state.copy_(torch.rand(state.shape, generator=random) - 0.5)
        batch.key.copy_(torch.randint(2**62, (6,), generator=random))
        cache.query_statistics = some_statistics(2, 4, 16, 0).to(device)
        tables = upload_tables([first, event], device)
        kept = evict(cache, batch, event, tables[1])
        results.append([kept, *cache.parts, cache.summaries["quest"], batch.accumulated, batch.table, batch.ints])
        new = torch.tensor([pages[:5] for pages in event.new]).flatten().to(device)
        assert torch.equal(cache.summaries["quest"][:, new, :, 1], cache.keys[:, new].amax(-2))
        assert batch.kv_len.tolist() == [0, 20, 0, 0, 20, 0]
        assert batch.table[4].tolist() == event.new[0] + [0] * 7
        assert batch.table[1].tolist() == event.new[1] + [0] * 6
    assert all(torch.equal(a, b.cpu()) for a, b in zip(*results))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", METHODS)
def test_compiling_an_eviction_changes_no_row(name):
    """It reads and writes the scratch page only, which may hold anything."""
    geometry = Geometry(0, 2, 4, 2, 16, value_bytes=4)
    sequence = Sequence(Request(0, [5] * 6, Sampling(), Sparsity(evict=Evict(name, 20, buffer=8)), frozenset(), 0), 0)
    device = torch.device(DEVICE)
    cache = KVCache(geometry, torch.float32, 0.25, 30, 4, device)
    batch = BatchState(BatchKind(), geometry, 3, 12, 1, device, torch.float32, 8)
    batch.prepare(BatchFeatures(ring=16, accumulated=40), keep=False)
    cache.query_statistics = some_statistics(2, 4, 16, 0).to(device)
    state = (cache.keys, cache.values, batch.ring, batch.accumulated, batch.table, batch.ints)
    for i, tensor in enumerate(state):
        tensor.fill_(i + 1)
    cache.keys[:, 0] = math.nan
    compile_eviction(cache, batch, sequence)
    assert not cache.keys[:, 1:].ne(1).any()
    assert not cache.values[:, 1:].ne(2).any()
    assert not any(tensor.ne(i).any() for i, tensor in enumerate(state[2:], start=3))


@pytest.mark.gpu
def test_an_engine_compiles_evictions_before_the_first():
    engine = Engine(load_model("shape:tiny-qwen3", device="cuda"), kv_memory="64MiB", max_rows=4, compiled=False)
    policy = Sparsity(evict=Evict("rkv", budget=48, buffer=16))
    engine.submit(*engine.requests([[3, 4, 5]], Sampling(max_new_tokens=200, ignore_eos=True), policy))
    kernels = (_find_last, _pool_and_mix, _top_indices, _copy, _install)
    variants = lambda: [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]  # noqa: E731
    before = variants()
    assert all(before)
    assert all(rollout.kv.evictions > 3 for rollout in engine.drain())
    assert variants() == before


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "dim"), [(640, 128), (2176, 128), (640, 64)])
def test_real_sizes_in_bf16(n, dim):
    keys = some_keys(64, n, dim, spread=1.0, dtype=torch.bfloat16)
    torch.testing.assert_close(redundancy_triton(keys, 0.5), redundancy_torch(keys, 0.5), rtol=1e-4, atol=1e-5)
    keys = keys.unflatten(0, (8, 8))
    for group, count in ((2, 8), (7, 16), (4, 32), (8, 64)):
        queries = some_queries(8, 8 * group, count, dim, torch.bfloat16)
        expected = mean_attention_torch(queries, keys, dim**-0.5, count)
        actual = mean_attention_triton(queries, in_pages(keys, 4, page=16), dim**-0.5, count)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.gpu
def test_a_new_length_compiles_nothing():
    redundancy_triton(some_keys(2, 640, 64, dtype=torch.bfloat16), 0.5)
    compiled = len(_find_last.device_caches[torch.cuda.current_device()][0])
    for n in (1, 17, 641, 656, 1000):
        redundancy_triton(some_keys(2, n, 64, dtype=torch.bfloat16), 0.5)
    assert len(_find_last.device_caches[torch.cuda.current_device()][0]) == compiled


def on_device(kv: Cached, device: str = DEVICE) -> Cached:
    def move(tensor):
        return None if tensor is None else tensor.to(device)

    return replace(
        kv,
        paged=PagedKeys(move(kv.paged.pool), move(kv.paged.table), kv.paged.n),
        values=PagedKeys(move(kv.values.pool), move(kv.values.table), kv.paged.n),
        queries=move(kv.queries),
        attention=move(kv.attention),
        row_keys=move(kv.row_keys),
        position=move(kv.position),
        statistics=kv.statistics and kv.statistics.to(torch.device(device)),
    )
