"""Squared length of keys or values in a few directions: Σ_i (x_j · g_i)², for every cached token j. All in fp32."""

import torch
from torch import Tensor

from alula.ops.compact import PagedKeys
from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.eight_bits import power_of_two_triton


def projected_norm(paged: PagedKeys, directions: Tensor) -> Tensor:
    """x of R, Hkv, n and directions fp32 [R, D, r], the same for all heads -> fp32 [R, Hkv, n]."""
    if use_triton(paged.pool):
        return projected_norm_triton(paged, directions)
    return projected_norm_torch(paged.gathered, directions)


def projected_norm_torch(x: Tensor, directions: Tensor) -> Tensor:
    # One sequence and layer at a time: the result is independent of the batch size.
    return torch.stack([(one.float() @ g).square().sum(-1) for one, g in zip(x, directions)])


def projected_norm_triton(paged: PagedKeys, directions: Tensor) -> Tensor:
    pool, table, scales = paged.pool, paged.table, paged.scales
    rows, heads, n = paged.shape
    layers, _, _, page, dim = pool.shape
    count = directions.shape[-1]
    out = torch.empty(rows, heads, n, dtype=torch.float32, device=pool.device)
    block = 64
    _projected_norm[(triton.cdiv(n, block), rows * heads)](
        pool,
        table,
        directions,
        out,
        scales if scales is not None else pool,
        scales.stride(0) if scales is not None else 0,
        pool.stride(0),
        table.stride(0),
        n,
        LAYERS=layers,
        HEADS=heads,
        PAGE=page,
        DIM=dim,
        DIM_POW2=max(16, triton.next_power_of_2(dim)),
        COUNT=count,
        COUNT_POW2=max(16, triton.next_power_of_2(count)),
        BLOCK=block,
        QUANTISED=scales is not None,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["table", "table_row", "n"])
def _projected_norm(
    pool,
    table,
    directions,
    out,
    scales,
    scales_layer,
    layer_stride,
    table_row,
    n,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """BLOCK tokens of one head of one sequence and layer."""
    line = tl.program_id(1).to(tl.int64)
    row, head = line // HEADS, line % HEADS
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM_POW2)
    i = tl.arange(0, COUNT_POW2)
    page = tl.load(table + row // LAYERS * table_row + j // PAGE, mask=j < n, other=0).to(tl.int64)
    slot = (page * HEADS + head) * PAGE + j % PAGE
    start = row % LAYERS * layer_stride + slot * DIM
    x = tl.load(pool + start[:, None] + d[None, :], mask=(j < n)[:, None] & (d < DIM)[None, :], other=0.0)
    inside = (d < DIM)[:, None] & (i < COUNT)[None, :]
    g = tl.load(directions + (row * DIM + d[:, None]) * COUNT + i[None, :], mask=inside, other=0.0)
    projected = tl.dot(x.to(tl.float32), g, input_precision="ieee")
    if QUANTISED:
        projected *= power_of_two_triton(tl.load(scales + row % LAYERS * scales_layer + slot, mask=j < n, other=0))[
            :, None
        ]
    tl.store(out + line * n + j, tl.sum(projected * projected, 1), mask=j < n)
