"""Attention of one new token per row over its pages.

`table[b, h, i]` is the i-th page that KV head h of row b reads, `tokens[b, h]` the number of tokens in those pages. A
middle dimension of 1 serves all heads (dense), one of `kv_heads` gives each head its own list (selection). Both
implementations reduce over pieces of the context. Their length depends on the number of rows and heads and on the row's
own length only, so a row's result is independent of the other rows' lengths.

The kernels compute logits and outputs transposed, [tokens, heads of a group] and [D, heads of a group]: a group of up
to eight query heads then fills the smallest tile of the tensor cores, which has sixteen rows and eight columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.eight_bits import power_of_two
from alula.ops.paged_attention_8_bits import split_8_bits
from alula.ops.pieces import MANY, Pieces, piece_length
from alula.ops.rotary import Rotary, rotated_tile, rotated_vector

TORCH_CHUNK = 128
"""Tokens that the torch form reads at a time."""
TORCH_VALUES = 1 << 19
"""Keys that it reads at a time, counted in numbers."""


class NewTokens(NamedTuple):
    """One token per row that attention itself rotates and appends before it reads it, as `alula.ops.append` would."""

    key: Tensor
    value: Tensor
    """[B, Hkv, D] each"""
    live: Tensor
    position: Tensor
    rotary: Rotary
    ring: Tensor | None
    ring_size: Tensor


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    tokens: Tensor,
    scaling: float,
    most_tokens: int,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, D], keys/values [P, Hkv, page, D] -> (out [B, Hq, D], logsumexp fp32 [B, Hq]).

    `most_tokens` is an upper bound of `tokens` known to the host: it sizes the launch without a device sync. `scales`
    uint8 [2, P, Hkv, page] are those of quantised keys and values (`alula.ops.eight_bits`).
    """
    if use_triton(q):
        return paged_attention_triton(q, keys, values, table, tokens, scaling, most_tokens, scales)
    return paged_attention_torch(q, keys, values, table, tokens, scaling, most_tokens, scales)


def paged_attention_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    tokens: Tensor,
    scaling: float,
    most_tokens: int,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """More rows than fit into the processor's cache are read a few at a time, those of similar length together."""
    group = max(1, TORCH_VALUES // (TORCH_CHUNK * keys.shape[1] * keys.shape[3]))
    if len(q) > group:
        out, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for rows in tokens.amax(-1).argsort(stable=True).split(group):
            out[rows], logsumexp[rows] = paged_attention_torch(
                q[rows], keys, values, table[rows], tokens[rows], scaling, most_tokens, scales
            )
        return out, logsumexp
    batch, q_heads, dim = q.shape
    _, kv_heads, page, _ = keys.shape
    per_chunk = max(1, TORCH_CHUNK // page)
    chunk = per_chunk * page
    head = torch.arange(kv_heads, device=q.device)[None, :, None]
    key_pages, value_pages = (cache.flatten(2).flatten(0, 1) for cache in (keys, values))  # of one head each
    grouped = q.view(batch, kv_heads, q_heads // kv_heads, dim).float() * scaling
    top = grouped.new_full((batch, kv_heads, grouped.shape[2], 1), float("-inf"))
    total = torch.zeros_like(top)
    acc = torch.zeros_like(grouped)
    offset = torch.arange(chunk, device=q.device)
    longest = min(most_tokens, int(tokens.max()))  # a selector reads few of the tokens that a row holds
    for first in range(0, -(-longest // page), per_chunk):
        pages = table[..., first : first + per_chunk].long()
        if pages.shape[-1] < per_chunk:
            pages = torch.nn.functional.pad(pages, (0, per_chunk - pages.shape[-1]))
        pages = pages.expand(batch, kv_heads, per_chunk)
        valid = (first * page + offset) < tokens[..., None]  # [B, H or 1, chunk]
        places = (pages * kv_heads + head).flatten()
        key, value = (
            of_head.index_select(0, places).view(batch, kv_heads, chunk, dim).float()
            for of_head in (key_pages, value_pages)
        )
        if scales is not None:
            key_scale, value_scale = power_of_two(scales[:, pages, head].reshape(2, batch, kv_heads, chunk, 1))
            key, value = key * key_scale, value * value_scale
        if not bool(valid.all()):
            value = zeroed(value, ~valid)  # unused slots hold old values
        logits = (grouped @ key.transpose(-1, -2)).masked_fill(~valid[:, :, None], float("-inf"))
        peak = torch.maximum(top, logits.amax(-1, keepdim=True))
        weights = torch.exp(logits - peak)
        rescale = torch.exp(top - peak)
        total = total * rescale + weights.sum(-1, keepdim=True)
        acc = acc * rescale + weights @ value
        top = peak
    out = (acc / total).view(batch, q_heads, dim).to(q.dtype)
    return out, (top + total.log()).view(batch, q_heads)


def zeroed(values: Tensor, tokens: Tensor) -> Tensor:
    """fp32 [..., T, D] with 0 at `tokens` [..., T], whatever is there. A broadcast `masked_fill` is slow on a CPU."""
    return (values.view(torch.int32) & (tokens.int() - 1)[..., None]).view(torch.float32)


def paged_attention_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    tokens: Tensor,
    scaling: float,
    most_tokens: int,
    scales: Tensor | None = None,
    new: NewTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """With `new`, which quantised KV does not take, q is still to be rotated."""
    batch, q_heads, dim = q.shape
    _, kv_heads, page, _ = keys.shape
    group = q_heads // kv_heads
    pieces = Pieces.of(batch * kv_heads, selected=tokens.shape[1] > 1, quantised=scales is not None)
    splits = pieces.most(most_tokens)
    out = torch.empty(batch, q_heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, q_heads, dtype=torch.float32, device=q.device)
    if splits == 1:  # merging one piece would change no bit of it
        part, part_lse = out.unsqueeze(2), lse.unsqueeze(2)
    else:
        part = torch.empty(batch, q_heads, splits, dim, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(batch, q_heads, splits, dtype=torch.float32, device=q.device)
    table_head = table.stride(1) if table.shape[1] > 1 else 0
    tokens_head = tokens.stride(1) if tokens.shape[1] > 1 else 0
    dim_pow2 = triton.next_power_of_2(dim)
    if scales is not None:
        split_8_bits(q, keys, values, scales, table, tokens, part, part_lse, scaling, pieces)
    else:
        block, warps, stages = tile(pieces.row_heads, dim * keys.dtype.itemsize)
        _split[(batch, kv_heads, splits)](
            q,
            keys,
            values,
            table,
            tokens,
            part,
            part_lse,
            q.stride(0),
            q.stride(1),
            table.stride(0),
            table_head,
            tokens.stride(0),
            tokens_head,
            scaling * 1.4426950408889634,
            splits,
            pieces.row_heads,
            *_new_arguments(q, new),
            GROUP=group,
            HEADS=kv_heads,
            DIM=dim,
            DIM_POW2=dim_pow2,
            PAGE=page,
            NEW=new is not None,
            NORM=new is not None and new.rotary.query_norm is not None,
            RING=new is not None and new.ring is not None,
            EPSILON=new.rotary.epsilon if new is not None else 0.0,
            BLOCK_G=max(8, triton.next_power_of_2(group)),
            BLOCK_N=block,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=warps,
            num_stages=stages,
            **pieces.constants,
        )
    if splits > 1:
        _merge[(batch, q_heads)](
            part,
            part_lse,
            tokens,
            out,
            lse,
            tokens.stride(0),
            tokens_head,
            splits,
            pieces.row_heads,
            GROUP=group,
            DIM=dim,
            DIM_POW2=dim_pow2,
            BLOCK_S=16,
            num_warps=2,
            **pieces.constants,
        )
    return out, lse


def _new_arguments(q: Tensor, new: NewTokens | None) -> tuple:
    if new is None:
        return (q,) * 10 + (0,) * 6
    rotary, ring = new.rotary, new.ring
    norms = (rotary.query_norm, rotary.key_norm) if rotary.query_norm is not None else (q, q)
    tensors = (new.key, new.value, new.live, new.position, rotary.cos, rotary.sin, *norms)
    strides = (*new.key.stride()[:2], *new.value.stride()[:2])
    if ring is None:
        return (*tensors, q, new.ring_size, *strides, 0, 0)
    return (*tensors, ring, new.ring_size, *strides, *ring.stride()[:2])


def appending_pays(q: Tensor, kv_heads: int) -> bool:
    """Whether attention should append new tokens itself. Many rows of wide heads keep the device busy as they are, and
    the start of every program is in their way."""
    return q.shape[-1] * q.dtype.itemsize <= 128 or len(q) * kv_heads <= 512


def tile(row_heads: int, vector_bytes: int) -> tuple[int, int, int]:
    """Tokens, warps and pipeline stages of a program. Three stages hold one tile of KV, since the page numbers take
    stages too. Five hold two: one is read while another is computed, which pays where a row's programs are long and too
    few to hide each other's latency. Programs of very many narrow heads are small: more of them run at once, and the
    last wave is shorter."""
    if row_heads > 1024 and vector_bytes <= 128:
        return 32, 1, 3
    return 64, 2, 5 if MANY <= row_heads < 512 and vector_bytes <= 256 else 3


# No specialisation on the numbers of pieces and rows.
@triton.jit(do_not_specialize=["splits", "row_heads"])
def _split(
    q,
    keys,
    values,
    table,
    tokens,
    part,
    part_lse,
    q_row,
    q_head,
    table_row,
    table_head,
    tokens_row,
    tokens_head,
    scale_log2,
    splits,
    row_heads,
    new_keys,
    new_values,
    live,
    position,
    cos,
    sin,
    query_norm,
    key_norm,
    ring,
    ring_size,
    key_row,
    key_head,
    value_row,
    value_head,
    ring_row,
    ring_head,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    NEW: tl.constexpr,
    NORM: tl.constexpr,
    RING: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr,
    SHORTEST: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tokens + row * tokens_row + head * tokens_head)
    piece = piece_length(count, row_heads, WHOLE, SHORTEST, DOUBLINGS, PROGRAMS)
    start = split * piece
    if start < count:
        end = tl.minimum(start + piece, count)
        g = tl.arange(0, BLOCK_G)
        d = tl.arange(0, DIM_POW2)
        in_dim = d < DIM
        q_heads = head * GROUP + g
        in_group = (g < GROUP)[:, None] & in_dim[None, :]
        line = q + row * q_row + q_heads[:, None] * q_head
        pages = table + row * table_row + head * table_head
        if NEW:
            at = tl.load(position + row)
            row_cos = tl.load(cos + at * DIM + d, mask=in_dim, other=0.0).to(tl.float32)
            row_sin = tl.load(sin + at * DIM + d, mask=in_dim, other=0.0).to(tl.float32)
            query = rotated_tile(
                line, in_group, query_norm, row_cos[None, :], row_sin[None, :], DIM, DIM_POW2, NORM, EPSILON
            )
            if end == count:  # the piece with the new token
                alive = tl.load(live + row) != 0
                page = tl.load(pages + (count - 1) // PAGE, mask=alive, other=0).to(tl.int64)
                home = ((page * HEADS + head) * PAGE + (count - 1) % PAGE) * DIM + d
                source = new_keys + row * key_row + head * key_head
                key = rotated_vector(source, key_norm, row_cos, row_sin, DIM, DIM_POW2, NORM, EPSILON)
                value = tl.load(new_values + row * value_row + head * value_head + d, mask=in_dim, other=0.0)
                tl.store(keys + home, key, mask=in_dim)
                tl.store(values + home, value, mask=in_dim)
                if RING:
                    size = tl.load(ring_size + row)
                    entry = ring + row.to(tl.int64) * ring_row + at % tl.maximum(size, 1) * DIM
                    wanted = in_group & (size > 0) & alive
                    tl.store(entry + q_heads[:, None] * ring_head + d[None, :], query, mask=wanted)
                tl.debug_barrier()  # other threads read what was written here
        else:
            query = tl.load(line + d[None, :], mask=in_group, other=0.0)
        query = tl.trans(query)
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        totals = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)
        acc = tl.zeros([DIM_POW2, BLOCK_G], tl.float32)
        n = tl.arange(0, BLOCK_N)
        # Slots are multiplied by the width of a vector as 64-bit numbers: one instruction computes an address.
        key_base, value_base = keys + d[None, :], values + d[:, None]
        for first in range(start, end, BLOCK_N):
            # The last tile repeats the last token instead of reading unused slots; its weight is zero there.
            t = tl.minimum(first + n, end - 1).to(tl.uint32)
            page = tl.load(pages + t // PAGE)
            slot = (page * (HEADS * PAGE) + (head * PAGE + (t % PAGE).to(tl.int32))).to(tl.int64) * DIM
            if DIM == DIM_POW2:
                key, value = tl.load(key_base + slot[:, None]), tl.load(value_base + slot[None, :])
            else:
                key = tl.load(key_base + slot[:, None], mask=in_dim[None, :], other=0.0)
                value = tl.load(value_base + slot[None, :], mask=in_dim[:, None], other=0.0)
            # Scaled before they are masked: a product fused with the difference below would not be the peak's.
            logits = tl.dot(key, query, input_precision=PRECISION) * scale_log2
            logits = tl.where((n < end - first)[:, None], logits, float("-inf"))
            peak = tl.maximum(top, tl.max(logits, 0))
            weights = tl.exp2(logits - peak[None, :])
            rescale = tl.exp2(top - peak)
            totals = totals * rescale[None, :] + weights
            acc = tl.dot(value, weights.to(value.dtype), acc * rescale[None, :], input_precision=PRECISION)
            top = peak
        total = tl.sum(totals, 0)
        line_out = (row * (HEADS * GROUP) + q_heads) * splits + split
        tl.store(
            part + line_out[None, :].to(tl.int64) * DIM + d[:, None],
            (acc / total[None, :]).to(part.dtype.element_ty),
            mask=(g < GROUP)[None, :] & in_dim[:, None],
        )
        tl.store(part_lse + line_out, (top + tl.log2(total)) * 0.6931471805599453, mask=g < GROUP)


@triton.jit(do_not_specialize=["splits", "row_heads"])
def _merge(
    part,
    part_lse,
    tokens,
    out,
    lse,
    tokens_row,
    tokens_head,
    splits,
    row_heads,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    WHOLE: tl.constexpr,
    SHORTEST: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row, q_head = tl.program_id(0), tl.program_id(1)
    count = tl.load(tokens + row * tokens_row + (q_head // GROUP) * tokens_head)
    used = tl.cdiv(count, piece_length(count, row_heads, WHOLE, SHORTEST, DOUBLINGS, PROGRAMS))
    line = (row * tl.num_programs(1) + q_head).to(tl.int64)
    d = tl.arange(0, DIM_POW2)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM_POW2], tl.float32)
    for first in range(0, used, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        piece_lse = tl.load(part_lse + line * splits + s, mask=s < used, other=float("-inf"))
        peak = tl.maximum(top, tl.max(piece_lse, 0))
        weights = tl.exp(piece_lse - peak)
        rescale = tl.exp(top - peak)
        piece = tl.load(
            part + (line * splits + s)[:, None] * DIM + d[None, :],
            mask=(s < used)[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        acc = acc * rescale + tl.sum(piece * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        top = peak
    tl.store(out + line * DIM + d, (acc / total).to(out.dtype.element_ty), mask=d < DIM)
    tl.store(lse + line, top + tl.log(total))
