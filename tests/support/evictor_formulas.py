"""Cached keys to score, and the evictors' formulas as loops over Python numbers."""

import cmath
import math
from dataclasses import replace

import torch
from torch.nn.functional import pad

from alula.ops.compact import PagedKeys
from alula.sparsity.evict import METHODS, Cached
from alula.sparsity.evict.query_statistics import QueryStatistics

WINDOW = 4


def cached(method: str, *, rows=2, layers=2, kv_heads=2, group=2, n=30, dim=8, seed=0, spread=1.0, window=WINDOW):
    """Keys around a common direction, so that some pairs are similar and some are not."""
    random = torch.Generator().manual_seed(seed)
    count = rows * layers
    centre = torch.randn(count, kv_heads, 1, dim, generator=random)
    keys = centre + spread * torch.randn(count, kv_heads, n, dim, generator=random)
    evictor = METHODS[method](window=window)
    queries = torch.randn(count, kv_heads * group, evictor.queries, dim, generator=random) * 2
    attention = torch.rand(count, kv_heads, n, generator=random)
    values = torch.randn(count, kv_heads, n, dim, generator=torch.Generator().manual_seed(seed + 1))
    return evictor, Cached(
        paged=in_pages(keys, layers),
        values=in_pages(values, layers),
        queries=queries if evictor.queries else None,
        attention=attention if evictor.accumulates else None,
        scaling=dim**-0.5,
        row_keys=torch.randint(2**62, (rows,), generator=random).repeat_interleave(layers),
        position=torch.randint(n, n + 1000, (rows,), generator=random).repeat_interleave(layers),
        statistics=some_statistics(layers, kv_heads * group, dim, seed) if evictor.calibrated else None,
        keep=n // 3,
        sinks=0,
        protected=0,
    )


def some_statistics(layers: int, heads: int, dim: int, seed: int, rope_scaling: float = 1.0) -> QueryStatistics:
    """Statistics of random queries around a mean."""
    random = torch.Generator().manual_seed(seed + 2)
    real = torch.randn(2, 40, layers, heads, dim // 2, generator=random) + torch.randn(
        2, 1, layers, heads, dim // 2, generator=random
    )
    queries = torch.complex(real[0], real[1])
    frequencies = 0.3 ** torch.arange(dim // 2, dtype=torch.float64)
    return QueryStatistics(frequencies, rope_scaling, queries.mean(0), queries.abs().mean(0), ((1, 2),))


def in_pages(keys: torch.Tensor, layers: int, page: int = 4) -> PagedKeys:
    """keys [C·L, Hkv, n, D] cut into pages that lie in no order; what is past the end of a sequence is NaN."""
    n = keys.shape[2]
    cut = pad(keys.unflatten(0, (-1, layers)), (0, 0, 0, -n % page), value=math.nan).unflatten(3, (-1, page))
    pool = cut.permute(1, 0, 3, 2, 4, 5).flatten(1, 2)  # [L, C · pages, Hkv, page, D]
    order = torch.randperm(pool.shape[1], generator=torch.Generator().manual_seed(n)).to(keys.device)
    table = order.argsort().int().view(-1, pool.shape[1] * layers // len(keys))
    return PagedKeys(pool[:, order].contiguous(), table, n)


def only(kv: Cached, row: int) -> Cached:
    """One of the sequences, alone."""

    def part(tensor):
        return None if tensor is None else tensor[row * kv.layers : (row + 1) * kv.layers]

    return replace(
        kv,
        paged=replace(kv.paged, table=kv.paged.table[row : row + 1]),
        values=replace(kv.values, table=kv.values.table[row : row + 1]),
        queries=part(kv.queries),
        attention=part(kv.attention),
        row_keys=part(kv.row_keys),
        position=part(kv.position),
    )


# --- the formulas, literally -----------------------------------------------------------------------------------


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def norm(a):
    return math.sqrt(dot(a, a))


def softmax(logits):
    peak = max(logits)
    weights = [math.exp(x - peak) for x in logits]
    return [w / sum(weights) for w in weights]


def mean(values):
    return sum(values) / len(values)


def snapkv_scores(keys, queries, scaling, window, kernel=7):
    """keys [n][D] of one KV head, queries [G][W][D] of its group -> a score for each of the first n − window."""
    seen = keys[: len(keys) - window]
    probabilities = []
    for w in range(len(queries[0])):
        probabilities.append(softmax([max(scaling * dot(member[w], k) for member in queries) for k in seen]))
    average = [mean([p[j] for p in probabilities]) for j in range(len(seen))]
    half = kernel // 2
    return [max(average[max(0, j - half) : j + half + 1]) for j in range(len(seen))]


def redundancy_scores(keys, threshold=0.5):
    n = len(keys)
    unit = [[x / (norm(k) + 1e-8) for x in k] for k in keys]
    similarity = [[0.0 if i == j else dot(unit[i], unit[j]) for j in range(n)] for i in range(n)]
    for i in range(n):
        last = 0
        for j in range(n):
            if similarity[i][j] > threshold:
                last = j
        similarity[i][last] = 0.0
    return [mean([similarity[i][j] for i in range(n)]) for j in range(n)]


def rkv_scores(keys, queries, scaling, window, mix=0.1, kernel=7, threshold=0.5):
    important = snapkv_scores(keys, queries, scaling, window, kernel)
    redundant = softmax(redundancy_scores(keys, threshold))
    return [mix * i - (1 - mix) * r for i, r in zip(important, redundant)]


def knorm_scores(keys):
    """Norms with ten significant bits."""
    scores = []
    for key in keys:
        significand, exponent = math.frexp(norm(key))
        scores.append(-math.ldexp(round(significand * 1024), exponent - 10))
    return scores


def keydiff_scores(keys):
    unit = [[x / norm(k) for x in k] for k in keys]
    anchor = [mean(column) for column in zip(*unit)]
    return [-dot(k, anchor) / (norm(k) * norm(anchor)) for k in keys]


def vase_scores(keys, values, queries, scaling, window, draw, *, budget, sinks=0, protected=0, large=0.25, kernel=5):
    """`draw(j)` is the word of slot j. Infinite where the value is kept."""
    seen = keys[: len(keys) - window]
    rows = [softmax([scaling * dot(q, k) for k in seen]) for member in queries for q in member]
    received = [mean(column) for column in zip(*rows)]
    half = kernel // 2
    pooled = [sum(received[max(0, j - half) : j + half + 1]) / kernel for j in range(len(seen))]
    scores = [math.log(a) - math.log(-math.log1p(-(draw(j) + 0.5) / 2**32)) for j, a in enumerate(pooled)]
    sizes = [math.inf if j < sinks else max(v) - min(v) for j, v in enumerate(values[: len(seen)])]
    places = sorted(range(protected, len(seen)), key=lambda j: (-sizes[j], j))
    for j in places[: min(int(large * budget), budget - window)]:
        scores[j] = math.inf
    return scores + [0.0] * window


def vase_dkv_scores(keys, values, draw, rank=20):
    """`draw(i)` is word i of the layer."""
    dim = len(keys[0])

    def normal(d, i):
        u, v = ((draw((part * dim + d) * rank + i) + 0.5) / 2**32 for part in (0, 1))
        return math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v) / math.sqrt(rank)

    columns = [[normal(d, i) for d in range(dim)] for i in range(rank)]
    size = lambda x: sum(dot(x, g) ** 2 for g in columns)  # noqa: E731
    return [size(k) * size(v) for k, v in zip(keys, values)]


def triattention_logits(rotated, positions, t, mean, size, frequencies, rope_scaling=1.0, horizon=65536):
    """T_j + E_j of the keys of one head for one query head, from the keys before their rotation and their positions.

    `mean` are complex numbers, `size` the mean |q_f|, both by frequency.
    """
    half, offsets = len(frequencies), [2**i for i in range(40) if 2**i <= horizon]
    scores = []
    for key, p in zip(rotated, positions):
        total = 0.0
        for f, omega in enumerate(frequencies):
            k = complex(key[f], key[f + half]) / rope_scaling * cmath.exp(-1j * omega * p)
            angle = cmath.phase(mean[f]) - cmath.phase(k)
            waves = [math.cos(omega * (t + offset - p) + angle) for offset in offsets]
            total += abs(mean[f]) * abs(k) * sum(waves) / len(offsets) + (size[f] - abs(mean[f])) * abs(k)
        scores.append(total * rope_scaling**2)
    return scores


def z_scores(values, protected=0):
    ranked = values[protected:]
    centre = mean(ranked)
    deviation = math.sqrt(mean([(x - centre) ** 2 for x in ranked]))
    return [(x - centre) / max(deviation, 1e-6) for x in values]


def eviction_word(key, position, layer, count, index):
    """Word `index` of the `count` that a layer draws."""
    calls = -(-count // 4)
    return philox_literal(key, position, 3 * 2**30 + layer * calls + index // 4)[index % 4]


def philox_literal(key: int, c0: int, c1: int) -> list[int]:
    """Philox4x32-10 (Salmon et al., 2011) on Python's integers."""
    mask = 0xFFFFFFFF
    k = [key & mask, (key >> 32) & mask]
    c = [c0 & mask, c1 & mask, 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def best_slots(scores, n, count, first, window):
    """Literal choice: everything forced, then by score, the lower slot first."""
    forced = [j for j in range(n) if j < first or j >= n - window]
    others = [j for j in range(n) if j not in forced]
    others.sort(key=lambda j: (-scores[j], j))
    return sorted(forced + others[: count - len(forced)])


def group_of(kv: Cached, r: int, h: int):
    size = kv.queries.shape[1] // kv.keys.shape[1]
    return kv.queries[r, h * size : (h + 1) * size].tolist()


def each_head(kv: Cached):
    rows, heads = kv.keys.shape[:2]
    return ((r, h, kv.keys[r, h].tolist()) for r in range(rows) for h in range(heads))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=2e-7)


def splitmix64(x):
    limit = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & limit
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & limit
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & limit
    return x ^ (x >> 31)
