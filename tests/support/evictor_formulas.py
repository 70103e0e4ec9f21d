"""Cached keys to score, and the evictors' formulas as loops over Python numbers."""

import math

import torch
from torch.nn.functional import pad

from alula.ops.compact import PagedKeys
from alula.sparsity.evict import METHODS, Cached

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
    return evictor, Cached(
        paged=in_pages(keys, layers),
        queries=queries if evictor.queries else None,
        attention=attention if evictor.accumulates else None,
        scaling=dim**-0.5,
        row_keys=torch.randint(2**62, (rows,), generator=random).repeat_interleave(layers),
        position=torch.randint(n, n + 1000, (rows,), generator=random).repeat_interleave(layers),
    )


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

    return Cached(
        PagedKeys(kv.paged.pool, kv.paged.table[row : row + 1], kv.paged.n),
        part(kv.queries),
        part(kv.attention),
        kv.scaling,
        part(kv.row_keys),
        part(kv.position),
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
