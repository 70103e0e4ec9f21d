"""The pieces of paged attention over quantised KV (`alula.ops.fp8`); `alula.ops.paged_attention` merges them.

A 16-bit model multiplies in float16, which holds e4m3 exactly and into which a GPU converts it two at a time; a
conversion to bfloat16 takes longer than reading the KV. Powers of two keep the other factors inside float16's range:
each query is divided by one of its own, weights and scales of values by that of the largest scale in their tile. Two
values of a token are read as one 16-bit word, which the tensor cores' loads can transpose: even and odd dimensions are
summed apart.
"""

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton
from alula.ops.fp8 import power_of_two_triton

HEADROOM = 14
"""The largest factor is scaled to 2^14 … 2^15, so that those 2^28 times smaller are normal numbers of float16."""


def split_fp8(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor,
    table: Tensor,
    tokens: Tensor,
    part: Tensor,
    part_lse: Tensor,
    scaling: float,
    piece: int,
    whole: int,
) -> None:
    """Attention over pieces of `piece` tokens, contexts up to `whole` in one: part [B, Hq, splits, D] and part_lse fp32
    [B, Hq, splits]."""
    batch, q_heads, dim = q.shape
    _, kv_heads, page, _ = keys.shape
    group, splits = q_heads // kv_heads, part.shape[2]
    _split_fp8[(batch, kv_heads, splits)](
        q,
        keys,
        values.view(torch.int16),
        scales,
        table,
        tokens,
        part,
        part_lse,
        q.stride(0),
        q.stride(1),
        scales.stride(0),
        table.stride(0),
        table.stride(1) if table.shape[1] > 1 else 0,
        tokens.stride(0),
        tokens.stride(1) if tokens.shape[1] > 1 else 0,
        scaling * 1.4426950408889634,
        splits,
        GROUP=group,
        HEADS=kv_heads,
        DIM=dim,
        HALF=max(16, triton.next_power_of_2(dim) // 2),
        PAGE=page,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=64,
        PIECE=piece,
        WHOLE=whole,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        HEADROOM=HEADROOM,
        FACTOR=tl.float32 if q.dtype == torch.float32 else tl.float16,
        num_warps=2,
        num_stages=2,
    )


@triton.jit
def _e4m3(code, FACTOR: tl.constexpr):
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(FACTOR)


@triton.jit
def _places(pages, t, end, head, HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Slots of tokens `t` among all of the pool's for this head, and which of them are in the piece."""
    valid = t < end
    page = tl.load(pages + t // PAGE, mask=valid, other=0).to(tl.int64)
    return (page * HEADS + head) * PAGE + t % PAGE, valid


@triton.jit(do_not_specialize=["splits"])
def _split_fp8(
    q,
    keys,
    values,
    scales,
    table,
    tokens,
    part,
    part_lse,
    q_row,
    q_head,
    value_scales,
    table_row,
    table_head,
    tokens_row,
    tokens_head,
    scale_log2,
    splits,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADROOM: tl.constexpr,
    FACTOR: tl.constexpr,
):
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tokens + row * tokens_row + head * tokens_head)
    piece = tl.where(count <= WHOLE, WHOLE, PIECE)
    start = split * piece
    if start < count:
        end = tl.minimum(start + piece, count)
        g = tl.arange(0, BLOCK_M)
        d = tl.arange(0, 2 * HALF)
        h = tl.arange(0, HALF)
        in_dim = d < DIM
        q_heads = head * GROUP + g
        query = tl.load(
            q + row * q_row + q_heads[:, None] * q_head + d[None, :],
            mask=(g < GROUP)[:, None] & in_dim[None, :],
            other=0.0,
        ).to(tl.float32)
        largest = tl.max(tl.abs(query), 1).to(tl.int32, bitcast=True) >> 23
        largest = tl.maximum(largest, HEADROOM + 1)
        query = (query * power_of_two_triton(254 + HEADROOM - largest)[:, None]).to(FACTOR)
        query_scale = scale_log2 * power_of_two_triton(largest - HEADROOM)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        even = tl.zeros([BLOCK_M, HALF], tl.float32)
        odd = tl.zeros([BLOCK_M, HALF], tl.float32)
        pages = table + row * table_row + head * table_head
        next_place, next_valid = _places(pages, start + tl.arange(0, BLOCK_N), end, head, HEADS, PAGE)
        next_key_scale = tl.load(scales + next_place, mask=next_valid, other=0)
        next_scale = tl.load(scales + value_scales + next_place, mask=next_valid, other=0)
        for first in range(start, end, BLOCK_N):
            key_scale, scale = next_key_scale, next_scale.to(tl.int32)
            next_place, next_valid = _places(pages, first + BLOCK_N + tl.arange(0, BLOCK_N), end, head, HEADS, PAGE)
            next_key_scale = tl.load(scales + next_place, mask=next_valid, other=0)
            next_scale = tl.load(scales + value_scales + next_place, mask=next_valid, other=0)
            # Known from the tile before, but keys and values are copied ahead only from pages read in the same tile.
            place, valid = _places(pages, first + tl.arange(0, BLOCK_N), end, head, HEADS, PAGE)
            key = tl.load(keys + (place * DIM)[None, :] + d[:, None], mask=valid[None, :] & in_dim[:, None], other=0.0)
            logits = tl.dot(query, key.to(FACTOR), input_precision=PRECISION) * query_scale[:, None]
            logits *= power_of_two_triton(key_scale)[None, :]
            logits = tl.where(valid[None, :], logits, float("-inf"))
            peak = tl.maximum(top, tl.max(logits, 1))
            weights = tl.exp2(logits - peak[:, None])
            rescale = tl.exp2(top - peak)
            total = total * rescale + tl.sum(weights, 1)
            most = tl.maximum(tl.max(scale, 0), HEADROOM + 1)
            below = tl.maximum(scale - most + 127 + HEADROOM, 0)
            weights = (weights * power_of_two_triton(below)[None, :]).to(FACTOR)
            pair = tl.load(
                values + (place * (DIM // 2))[:, None] + h[None, :],
                mask=valid[:, None] & (h < DIM // 2)[None, :],
                other=0,
            )
            tile = power_of_two_triton(most - HEADROOM)
            read = tl.dot(weights, _e4m3(pair, FACTOR), input_precision=PRECISION)
            even = even * rescale[:, None] + read * tile
            read = tl.dot(weights, _e4m3(pair >> 8, FACTOR), input_precision=PRECISION)
            odd = odd * rescale[:, None] + read * tile
            top = peak
        acc = tl.reshape(tl.join(even, odd), [BLOCK_M, 2 * HALF])
        line_out = (row * (HEADS * GROUP) + q_heads) * splits + split
        tl.store(
            part + line_out[:, None].to(tl.int64) * DIM + d[None, :],
            (acc / total[:, None]).to(part.dtype.element_ty),
            mask=(g < GROUP)[:, None] & in_dim[None, :],
        )
        tl.store(part_lse + line_out, (top + tl.log2(total)) * 0.6931471805599453, mask=g < GROUP)
