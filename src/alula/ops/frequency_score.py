"""A query's logit with every cached key plus a weighted sum of the key's size at each RoPE frequency. All in fp32.

score[g, j] = q_g · k_j + Σ_f w_gf |k_jf|,   |k_jf|² = k_j[f]² + k_j[f + D/2]²
"""

import torch
from torch import Tensor

from alula.ops.compact import PagedKeys
from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.eight_bits import power_of_two_triton


def frequency_score(keys: PagedKeys, query: Tensor, weights: Tensor) -> Tensor:
    """keys of R, Hkv, n; query fp32 [R, Hq, D], weights fp32 [R, Hq, D/2] -> fp32 [R, Hq, n]."""
    if use_triton(keys.pool):
        return frequency_score_triton(keys, query, weights)
    return frequency_score_torch(keys.gathered, query, weights)


def frequency_score_torch(keys: Tensor, query: Tensor, weights: Tensor) -> Tensor:
    # One sequence and layer at a time: the result is independent of the batch size.
    return torch.stack([_frequency_score(k.float(), q, w) for k, q, w in zip(keys, query, weights)])


def _frequency_score(keys: Tensor, query: Tensor, weights: Tensor) -> Tensor:
    first, second = keys.chunk(2, -1)
    size = (first.square() + second.square()).sqrt()
    grouped, spread = (x.unflatten(0, (len(keys), -1)) for x in (query, weights))
    return (grouped @ keys.transpose(1, 2) + spread @ size.transpose(1, 2)).flatten(0, 1)


def frequency_score_triton(keys: PagedKeys, query: Tensor, weights: Tensor) -> Tensor:
    pool, table, scales = keys.pool, keys.table, keys.scales
    rows, heads, n = keys.shape
    layers, _, _, page, dim = pool.shape
    q_heads = query.shape[1]
    out = torch.empty(rows, q_heads, n, dtype=torch.float32, device=pool.device)
    block = 64
    _frequency_score_kernel[(triton.cdiv(n, block), rows * heads)](
        pool,
        table,
        query.contiguous(),
        weights.contiguous(),
        out,
        scales if scales is not None else pool,
        scales.stride(0) if scales is not None else 0,
        pool.stride(0),
        table.stride(0),
        n,
        LAYERS=layers,
        HEADS=heads,
        GROUP=q_heads // heads,
        GROUP_POW2=max(16, triton.next_power_of_2(q_heads // heads)),
        PAGE=page,
        HALF=dim // 2,
        HALF_POW2=max(16, triton.next_power_of_2(dim // 2)),
        BLOCK=block,
        QUANTISED=scales is not None,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["table", "table_row", "n"])
def _frequency_score_kernel(
    pool,
    table,
    query,
    weights,
    out,
    scales,
    scales_layer,
    layer_stride,
    table_row,
    n,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """BLOCK keys of one KV head of one sequence and layer, for all queries of its group."""
    line = tl.program_id(1).to(tl.int64)
    row, head = line // HEADS, line % HEADS
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.arange(0, HALF_POW2)
    g = tl.arange(0, GROUP_POW2)
    page = tl.load(table + row // LAYERS * table_row + j // PAGE, mask=j < n, other=0).to(tl.int64)
    slot = (page * HEADS + head) * PAGE + j % PAGE
    start = row % LAYERS * layer_stride + slot * (2 * HALF)
    inside = (f < HALF)[:, None] & (j < n)[None, :]
    first = tl.load(pool + start[None, :] + f[:, None], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(pool + start[None, :] + HALF + f[:, None], mask=inside, other=0.0).to(tl.float32)
    member = line * GROUP + g
    known = (g < GROUP)[:, None] & (f < HALF)[None, :]
    q_first = tl.load(query + member[:, None] * (2 * HALF) + f[None, :], mask=known, other=0.0)
    q_second = tl.load(query + member[:, None] * (2 * HALF) + HALF + f[None, :], mask=known, other=0.0)
    weight = tl.load(weights + member[:, None] * HALF + f[None, :], mask=known, other=0.0)
    score = tl.dot(q_first, first, input_precision="ieee")
    score = tl.dot(q_second, second, score, input_precision="ieee")
    score = tl.dot(weight, tl.sqrt(first * first + second * second), score, input_precision="ieee")
    if QUANTISED:  # both terms are linear in the key's scale
        scale = tl.load(scales + row % LAYERS * scales_layer + slot, mask=j < n, other=0)
        score *= power_of_two_triton(scale)[None, :]
    tl.store(out + member[:, None] * n + j[None, :], score, mask=(g < GROUP)[:, None] & (j < n)[None, :])
