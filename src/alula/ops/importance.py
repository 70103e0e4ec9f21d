"""Attention of recent queries to every key: SnapKV's score, as R-KV computes it while decoding.

    L[h,q,j] = max over the query heads g of KV head h of scaling · q_g · k_j   (logits, before the softmax)
    A[h,j]   = mean over the W queries of softmax over j < n − window of L[h,q,j]
    I[h,j]   = max of A[h,j'] over |j' − j| ≤ kernel // 2                       (max-pooling, stride 1)

Source: R-KV (arXiv 2505.24133), `compute_attention_scores` and `update_kv`; everything is in fp32.
The last `window` keys are excluded, since they are always kept: their entries are finite but have no meaning.
"""

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from alula.ops.compact import PagedKeys
from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.eight_bits import power_of_two_triton

TILE_BYTES = 32768
"""Shared memory for the queries (window × group) of one program; a longer window is split over programs."""


def importance(queries: Tensor, keys: PagedKeys, scaling: float, window: int, kernel: int) -> Tensor:
    """queries [R, Hq, W, D], keys of R, Hkv, n -> fp32 [R, Hkv, n]. `kernel` is odd; 1 does not pool."""
    if use_triton(queries):
        scores = mean_attention_triton(queries, keys, scaling, window)
    else:
        scores = mean_attention_torch(queries, keys.gathered, scaling, window)
    # The window's zeros cannot win against a probability, so pooling over them changes nothing.
    return max_pool1d(scores, kernel, stride=1, padding=kernel // 2) if kernel > 1 else scores


def mean_attention_torch(queries: Tensor, keys: Tensor, scaling: float, window: int) -> Tensor:
    # One sequence and layer at a time: the result is independent of the batch size.
    return torch.stack([_mean_attention(q, k, scaling, window) for q, k in zip(queries, keys)])


def _mean_attention(queries: Tensor, keys: Tensor, scaling: float, window: int) -> Tensor:
    grouped = queries.float().unflatten(0, (len(keys), -1))  # [Hkv, G, W, D]
    seen = keys[:, : keys.shape[1] - window].float()
    logits = torch.einsum("hgwd,hnd->hgwn", grouped, seen).amax(1) * scaling
    return pad(logits.softmax(-1).mean(1), (0, window))


def mean_attention_triton(queries: Tensor, keys: PagedKeys, scaling: float, window: int) -> Tensor:
    queries, pool, table, scales = queries.contiguous(), keys.pool, keys.table, keys.scales
    rows, kv_heads, n = keys.shape
    layers, _, _, page, dim = pool.shape
    q_heads, count = queries.shape[1:3]
    group = q_heads // kv_heads
    group_pow2 = triton.next_power_of_2(group)
    dim_pow2 = max(16, triton.next_power_of_2(dim))
    tile = min(128, TILE_BYTES // (dim_pow2 * queries.element_size()))
    block_w = min(triton.next_power_of_2(count), max(1, tile // group_pow2))
    block_w = max(block_w, 16 // group_pow2)  # the smallest tile that tl.dot takes has 16 rows
    parts = triton.cdiv(count, block_w)
    out = torch.empty(parts, rows, kv_heads, n, dtype=torch.float32, device=pool.device)
    _mean_attention_kernel[(rows * kv_heads, parts)](
        queries,
        pool,
        table,
        out,
        scales if scales is not None else pool,
        scales.stride(0) if scales is not None else 0,
        pool.stride(0),
        table.stride(0),
        n,
        n - window,
        scaling,
        LAYERS=layers,
        HEADS=kv_heads,
        PAGE=page,
        GROUP=group,
        GROUP_POW2=group_pow2,
        COUNT=count,
        BLOCK_W=block_w,
        DIM=dim,
        DIM_POW2=dim_pow2,
        BLOCK=64 if tile == 128 else 32,
        QUANTISED=scales is not None,
        num_warps=4 if group_pow2 * block_w <= 64 else 8,
    )
    return out[0] if parts == 1 else out.sum(0)


@triton.jit
def _group_logits(
    query,
    keys,
    table,
    scales,
    head,
    first,
    seen,
    scaling,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    BLOCK_W: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """max over the group of the logits of BLOCK keys: [BLOCK_W, BLOCK], −inf from key `seen` on."""
    j = first + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM_POW2)
    inside = (j < seen)[None, :] & (d < DIM)[:, None]
    page = tl.load(table + j // PAGE, mask=j < seen, other=0).to(tl.int64)
    slot = (page * HEADS + head) * PAGE + j % PAGE
    line = slot * DIM
    key = tl.load(keys + line[None, :] + d[:, None], mask=inside, other=0.0)
    if QUANTISED:
        key = key.to(query.dtype)
    logits = tl.max(tl.reshape(tl.dot(query, key, input_precision="ieee"), [GROUP_POW2, BLOCK_W, BLOCK]), 0)
    if QUANTISED:  # scales are positive: the largest stays the largest
        logits *= power_of_two_triton(tl.load(scales + slot, mask=j < seen, other=0))[None, :]
    return tl.where((j < seen)[None, :], logits * scaling, float("-inf"))


@triton.jit(do_not_specialize=["table", "table_row", "n", "seen"])
def _mean_attention_kernel(
    queries,
    keys,
    table,
    out,
    scales,
    scales_layer,
    layer_stride,
    table_row,
    n,
    seen,
    scaling,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """One KV head, up to BLOCK_W queries: the softmax's normaliser first, then the mean probability."""
    line = tl.program_id(0).to(tl.int64)
    head = line % HEADS
    keys += (line // HEADS) % LAYERS * layer_stride
    if QUANTISED:
        scales += (line // HEADS) % LAYERS * scales_layer
    table += line // (HEADS * LAYERS) * table_row
    row = tl.arange(0, GROUP_POW2 * BLOCK_W)
    g = tl.minimum(row // BLOCK_W, GROUP - 1)  # padding repeats a member of the group: the max stays
    w = tl.program_id(1) * BLOCK_W + row % BLOCK_W
    d = tl.arange(0, DIM_POW2)
    place = (line * GROUP + g) * COUNT + w
    inside = (w < COUNT)[:, None] & (d < DIM)[None, :]
    query = tl.load(queries + place[:, None] * DIM + d[None, :], mask=inside, other=0.0)

    peak = tl.full([BLOCK_W], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_W], tl.float32)
    for first in range(0, seen, BLOCK):
        logits = _group_logits(
            query,
            keys,
            table,
            scales,
            head,
            first,
            seen,
            scaling,
            HEADS,
            PAGE,
            DIM,
            DIM_POW2,
            BLOCK,
            GROUP_POW2,
            BLOCK_W,
            QUANTISED,
        )
        higher = tl.maximum(peak, tl.max(logits, 1))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(logits - higher[:, None]), 1)
        peak = higher

    real = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W) < COUNT
    weight = tl.where(real, 1.0 / (total * COUNT), 0.0)
    out += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + line) * n
    for first in range(0, n, BLOCK):
        logits = _group_logits(
            query,
            keys,
            table,
            scales,
            head,
            first,
            seen,
            scaling,
            HEADS,
            PAGE,
            DIM,
            DIM_POW2,
            BLOCK,
            GROUP_POW2,
            BLOCK_W,
            QUANTISED,
        )
        mean = tl.sum(tl.exp(logits - peak[:, None]) * weight[:, None], 0)
        j = first + tl.arange(0, BLOCK)
        tl.store(out + j, mean, mask=j < n)
