"""The pieces of paged attention over quantised KV (`alula.ops.eight_bits`); `alula.ops.paged_attention` merges them.

A 16-bit model multiplies in float16, which holds integers of 8 bits and e4m3 exactly and into which a GPU converts e4m3
two at a time; a conversion to bfloat16 takes longer than reading the KV. Powers of two keep the other factors inside
float16's range: each query is divided by one of its own, weights and scales of values by that of the largest scale so
far. Two values of a token are read as one 16-bit word, which the tensor cores' loads can transpose: even and odd
dimensions are summed apart.
"""

from typing import Any

import torch
from torch import Tensor

from alula.ops.dispatch import interpreted, tl, triton
from alula.ops.eight_bits import power_of_two_triton
from alula.ops.pieces import Pieces, piece_length

HEADROOM = 14
"""The largest factor is scaled to 2^14 … 2^15, so that those 2^28 times smaller are normal numbers of float16."""


def split_8_bits(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor,
    table: Tensor,
    tokens: Tensor,
    part: Tensor,
    part_lse: Tensor,
    scaling: float,
    pieces: Pieces,
) -> None:
    """Attention over pieces: part [B, Hq, splits, D] and part_lse fp32 [B, Hq, splits]."""
    batch, q_heads, dim = q.shape
    _, kv_heads, page, _ = keys.shape
    group, splits = q_heads // kv_heads, part.shape[2]
    factor = tl.float32 if q.dtype == torch.float32 else tl.float16
    _split_8_bits[(batch, kv_heads, splits)](
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
        pieces.row_heads,
        GROUP=group,
        HEADS=kv_heads,
        DIM=dim,
        HALF=max(16, triton.next_power_of_2(dim) // 2),
        PAGE=page,
        BLOCK_G=max(8, triton.next_power_of_2(group)),
        BLOCK_N=32,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        HEADROOM=HEADROOM,
        FACTOR=factor,
        INT8=keys.dtype == torch.int8,
        **assembly(factor, keys.dtype),
        num_warps=1,
        num_stages=2,
        maxnreg=128,  # without spilling; more programs run at once
        **pieces.constants,
    )


INT8_KEYS = """{
    .reg .b32 bytes, more;
    xor.b32 bytes, $2, 0x80808080;
    mov.b32 more, 0x64806480;
    prmt.b32 $0, bytes, 0x64646464, 0x4140;
    prmt.b32 $1, bytes, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, $0, more;
    sub.rn.f16x2 $1, $1, more;
}"""
"""0x6400 is 1024 in float16, whose last bit is then 1. Flipping an integer's sign bit adds 128; as the last byte, it
makes the float16 1152 (0x6480) more than the integer."""

INT8_VALUES = """{
    .reg .b32 bytes, more;
    xor.b32 bytes, $1, 0x80808080;
    mov.b32 more, 0x64806480;
    prmt.b32 bytes, bytes, 0x64646464, %#x;
    sub.rn.f16x2 $0, bytes, more;
}"""

E4M3_VALUES = """{
    .reg .b32 bytes; .reg .b16 low, high;
    prmt.b32 bytes, $1, 0, %#x;
    mov.b32 {low, high}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, low;
}"""


def assembly(factor: Any, stored: torch.dtype) -> dict[str, str | None]:
    """How bytes become float16 in few instructions: of four keys, and the even or odd ones of two 16-bit words of
    values. None where the compiler does it: for float32, in the interpreter, and for keys in e4m3."""
    if factor is not tl.float16 or interpreted():
        return {"KEYS": None, "EVEN": None, "ODD": None}
    if stored == torch.int8:
        return {"KEYS": INT8_KEYS, "EVEN": INT8_VALUES % 0x4240, "ODD": INT8_VALUES % 0x4341}
    return {"KEYS": None, "EVEN": E4M3_VALUES % 0x4420, "ODD": E4M3_VALUES % 0x4431}


@triton.jit
def _value(pair, SHIFT: tl.constexpr, INT8: tl.constexpr, ASSEMBLY: tl.constexpr, FACTOR: tl.constexpr):
    """The values of the bytes at bit `SHIFT` of 16-bit words."""
    if ASSEMBLY is not None:
        return tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2)
    elif INT8:
        return (pair >> SHIFT).to(tl.int8).to(FACTOR)
    else:
        return (pair >> SHIFT).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(FACTOR)


@triton.jit
def _slots(pages, t, end, head, HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Slots of tokens `t` among all of the pool's for this head; those behind the piece are its last token's."""
    t = tl.minimum(t, end - 1).to(tl.uint32)
    page = tl.load(pages + t // PAGE)
    return page * (HEADS * PAGE) + (head * PAGE + (t % PAGE).to(tl.int32))


@triton.jit(do_not_specialize=["splits", "row_heads"])
def _split_8_bits(
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
    row_heads,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr,
    SHORTEST: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADROOM: tl.constexpr,
    FACTOR: tl.constexpr,
    INT8: tl.constexpr,
    KEYS: tl.constexpr,
    EVEN: tl.constexpr,
    ODD: tl.constexpr,
):
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tokens + row * tokens_row + head * tokens_head)
    piece = piece_length(count, row_heads, WHOLE, SHORTEST, DOUBLINGS, PROGRAMS)
    start = split * piece
    if start < count:
        end = tl.minimum(start + piece, count)
        g = tl.arange(0, BLOCK_G)
        d = tl.arange(0, 2 * HALF)
        h = tl.arange(0, HALF)
        n = tl.arange(0, BLOCK_N)
        q_heads = head * GROUP + g
        query = tl.load(
            q + row * q_row + q_heads[None, :] * q_head + d[:, None],
            mask=(g < GROUP)[None, :] & (d < DIM)[:, None],
            other=0.0,
        ).to(tl.float32)
        largest = tl.max(tl.abs(query), 0).to(tl.int32, bitcast=True) >> 23
        largest = tl.maximum(largest, HEADROOM + 1)
        query = (query * power_of_two_triton(254 + HEADROOM - largest)[None, :]).to(FACTOR)
        query_scale = scale_log2 * power_of_two_triton(largest - HEADROOM)
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        totals = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)
        even = tl.zeros([HALF, BLOCK_G], tl.float32)
        odd = tl.zeros([HALF, BLOCK_G], tl.float32)
        most = HEADROOM + 1  # exponent of the largest scale of values so far
        pages = table + row * table_row + head * table_head
        key_base, value_base = keys + d[None, :], values + h[:, None]
        next_slot = _slots(pages, start + n, end, head, HEADS, PAGE)
        next_key_scale, next_scale = tl.load(scales + next_slot), tl.load(scales + value_scales + next_slot)
        for first in range(start, end, BLOCK_N):
            key_scale, scale = next_key_scale, next_scale.to(tl.int32)
            next_slot = _slots(pages, first + BLOCK_N + n, end, head, HEADS, PAGE)
            next_key_scale, next_scale = tl.load(scales + next_slot), tl.load(scales + value_scales + next_slot)
            # Known from the tile before, but keys and values are copied ahead only from pages read in the same tile.
            slot = _slots(pages, first + n, end, head, HEADS, PAGE).to(tl.int64)
            if DIM == 2 * HALF:
                key = tl.load(key_base + slot[:, None] * DIM)
                pair = tl.load(value_base + slot[None, :] * HALF)
            else:
                key = tl.load(key_base + slot[:, None] * DIM, mask=(d < DIM)[None, :], other=0.0)
                pair = tl.load(value_base + slot[None, :] * (DIM // 2), mask=(h < DIM // 2)[:, None], other=0)
            if KEYS is not None:
                key = tl.inline_asm_elementwise(KEYS, "=r,=r,r", [key], dtype=tl.float16, is_pure=True, pack=4)
            logits = tl.dot(key.to(FACTOR), query, input_precision=PRECISION) * query_scale[None, :]
            logits *= power_of_two_triton(key_scale)[:, None]
            logits = tl.where((n < end - first)[:, None], logits, float("-inf"))
            peak = tl.maximum(top, tl.max(logits, 0))
            weights = tl.exp2(logits - peak[None, :])
            rescale = tl.exp2(top - peak)
            totals = totals * rescale[None, :] + weights
            larger = tl.maximum(most, tl.max(scale, 0))
            rescale *= power_of_two_triton(tl.maximum(most - larger + 127, 0))
            most = larger
            below = tl.maximum(scale - most + 127 + HEADROOM, 0)
            weights = (weights * power_of_two_triton(below)[:, None]).to(FACTOR)
            value = _value(pair, 0, INT8, EVEN, FACTOR)
            even = tl.dot(value, weights, even * rescale[None, :], input_precision=PRECISION)
            value = _value(pair, 8, INT8, ODD, FACTOR)
            odd = tl.dot(value, weights, odd * rescale[None, :], input_precision=PRECISION)
            top = peak
        total = tl.sum(totals, 0)
        line_out = (row * (HEADS * GROUP) + q_heads) * splits + split
        unit = power_of_two_triton(tl.where(most == 255, 255, most - HEADROOM))
        out = part + line_out[None, :].to(tl.int64) * DIM + 2 * h[:, None]
        inside = (g < GROUP)[None, :] & (h < DIM // 2)[:, None]
        tl.store(out, (even * unit / total[None, :]).to(part.dtype.element_ty), mask=inside)
        tl.store(out + 1, (odd * unit / total[None, :]).to(part.dtype.element_ty), mask=inside)
        tl.store(part_lse + line_out, (top + tl.log2(total)) * 0.6931471805599453, mask=g < GROUP)
