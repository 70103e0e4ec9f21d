"""Attention over the visible keys of a sparse policy, forward and backward, without a mask in memory (Triton).

FlashAttention-2's recurrences over packed sequences; each block of queries or keys visits the tiles of its list and
computes their masks as it goes (`alula.distill.attention.tiles`).
"""

from typing import Any

import torch
from torch import Tensor

from alula.distill.attention.tiles import BLOCK, LayerVisibility, TileLists, visible
from alula.ops.dispatch import tl, triton

LOG2E = 1.4426950408889634
LENGTHS = ["tokens", "width", "words"]
"""Never specialised on: no kernel is compiled again for another micro-batch."""


def visible_attention(
    q: Tensor, k: Tensor, v: Tensor, layer: LayerVisibility, lists: TileLists, scaling: float
) -> Tensor:
    """q [T, Hq, D], k and v [T, Hkv, D], packed -> [T, Hq, D]: softmax(scaling · q kᵀ where visible) v."""
    return _VisibleAttention.apply(q, k, v, layer, lists, scaling)


class _VisibleAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: LayerVisibility, lists: TileLists, scaling: float
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = attention_forward(q, k, v, layer, lists, scaling)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layer, ctx.lists, ctx.scaling = layer, lists, scaling
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        gradient = gradient.contiguous()
        return (*attention_backward(gradient, q, k, v, out, lse, ctx.layer, ctx.lists, ctx.scaling), None, None, None)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, layer: LayerVisibility, lists: TileLists, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention over contiguous tensors, and the logs (to base 2) of its normalisers, float32 [Hq, T]."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(layer.width, BLOCK), len(layer.prompts) * q.shape[1])
    _forward[grid](
        q,
        k,
        v,
        out,
        lse,
        lists.of_queries,
        lists.queries,
        *layer.arguments(),
        scaling * LOG2E,
        **constants(q, k, layer),
    )
    return out, lse


def attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layer: LayerVisibility,
    lists: TileLists,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, delta = (torch.empty_like(x) for x in (q, k, v, lse))
    blocks, rows = triton.cdiv(layer.width, BLOCK), len(layer.prompts)
    shared, given = (*layer.arguments(), scaling * LOG2E, scaling), constants(q, k, layer)
    _backward_q[blocks, rows * q.shape[1]](
        q, k, v, gradient, out, dq, lse, delta, lists.of_queries, lists.queries, *shared, **given
    )
    _backward_kv[blocks, rows * k.shape[1]](
        q, k, v, gradient, dk, dv, lse, delta, lists.of_keys, lists.keys, *shared, **given
    )
    return dq, dk, dv


def constants(q: Tensor, k: Tensor, layer: LayerVisibility) -> dict[str, Any]:
    narrow = q.element_size() == 2 and q.shape[2] <= 128  # more would not fit into registers and shared memory
    return layer.constants() | {
        "GROUP": q.shape[1] // k.shape[1],
        "HEADS": k.shape[1],
        "DIM": q.shape[2],
        "DIM_POW2": max(16, triton.next_power_of_2(q.shape[2])),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": 4 if narrow else 8,
        "num_stages": 2 if narrow else 1,
    }


@triton.jit(do_not_specialize=LENGTHS)
def _forward(
    q,
    k,
    v,
    out,
    lse,
    tiles,
    counts,
    starts,
    prompts,
    evicted_at,
    chosen,
    tokens,
    width,
    words,
    scale_log2,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    EVICTS: tl.constexpr,
    SELECTS: tl.constexpr,
    PAGE: tl.constexpr,
    ONE_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, row, q_head = tl.program_id(0), tl.program_id(1) // (HEADS * GROUP), tl.program_id(1) % (HEADS * GROUP)
    head, start, prompt = q_head // GROUP, tl.load(starts + row).to(tl.int64), tl.load(prompts + row)
    length = (tl.load(starts + row + 1) - start).to(tl.int32)
    line = (row * HEADS + head).to(tl.int64)
    evicted_at += line * width
    chosen += head.to(tl.int64) * words * tokens + start
    counts += line * tl.num_programs(0) + block
    tiles += (line * tl.num_programs(0) + block) * tl.num_programs(0)
    of_q, of_k = (start * (HEADS * GROUP) + q_head) * DIM, (start * HEADS + head) * DIM
    if block * BLOCK < length:
        m, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM_POW2)
        at_q = m[:, None] * (HEADS * GROUP * DIM) + d[None, :]
        mask_q = (m < length)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + of_q + at_q, mask=mask_q, other=0.0)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        for i in range(tl.load(counts)):
            first = tl.load(tiles + i) * BLOCK
            n = first + tl.arange(0, BLOCK)
            at_k = n[:, None] * (HEADS * DIM) + d[None, :]
            mask_k = (n < length)[:, None] & (d < DIM)[None, :]
            key = tl.load(k + of_k + at_k, mask=mask_k, other=0.0)
            logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
            seen = visible(
                m[:, None],
                n[None, :],
                first,
                length,
                prompt,
                evicted_at,
                chosen,
                tokens,
                EVICTS,
                SELECTS,
                PAGE,
                ONE_WORD,
            )
            logits = tl.where(seen, logits, float("-inf"))
            peak = tl.maximum(top, tl.max(logits, 1))
            base = tl.where(peak == float("-inf"), 0.0, peak)  # a query that has seen nothing yet
            weights = tl.exp2(logits - base[:, None])
            rescale = tl.exp2(top - base)
            total = total * rescale + tl.sum(weights, 1)
            value = tl.load(v + of_k + at_k, mask=mask_k, other=0.0)
            acc = acc * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
            top = peak
        total = tl.where(m < length, total, 1.0)
        tl.store(out + of_q + at_q, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask_q)
        tl.store(lse + q_head * tokens + start + m, top + tl.log2(total), mask=m < length)


@triton.jit(do_not_specialize=LENGTHS)
def _backward_q(
    q,
    k,
    v,
    gradient,
    out,
    dq,
    lse,
    delta,
    tiles,
    counts,
    starts,
    prompts,
    evicted_at,
    chosen,
    tokens,
    width,
    words,
    scale_log2,
    scaling,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    EVICTS: tl.constexpr,
    SELECTS: tl.constexpr,
    PAGE: tl.constexpr,
    ONE_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """And `delta`, the row sums that softmax's derivative subtracts, for `_backward_kv`."""
    block, row, q_head = tl.program_id(0), tl.program_id(1) // (HEADS * GROUP), tl.program_id(1) % (HEADS * GROUP)
    head, start, prompt = q_head // GROUP, tl.load(starts + row).to(tl.int64), tl.load(prompts + row)
    length = (tl.load(starts + row + 1) - start).to(tl.int32)
    line = (row * HEADS + head).to(tl.int64)
    evicted_at += line * width
    chosen += head.to(tl.int64) * words * tokens + start
    counts += line * tl.num_programs(0) + block
    tiles += (line * tl.num_programs(0) + block) * tl.num_programs(0)
    of_q, of_k = (start * (HEADS * GROUP) + q_head) * DIM, (start * HEADS + head) * DIM
    if block * BLOCK < length:
        m, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM_POW2)
        at_q = m[:, None] * (HEADS * GROUP * DIM) + d[None, :]
        mask_q = (m < length)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + of_q + at_q, mask=mask_q, other=0.0)
        upstream = tl.load(gradient + of_q + at_q, mask=mask_q, other=0.0)
        result = tl.load(out + of_q + at_q, mask=mask_q, other=0.0)
        shift = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1)
        norm = tl.load(lse + q_head * tokens + start + m, mask=m < length, other=0.0)
        tl.store(delta + q_head * tokens + start + m, shift, mask=m < length)
        acc = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        for i in range(tl.load(counts)):
            first = tl.load(tiles + i) * BLOCK
            n = first + tl.arange(0, BLOCK)
            at_k = n[:, None] * (HEADS * DIM) + d[None, :]
            mask_k = (n < length)[:, None] & (d < DIM)[None, :]
            key = tl.load(k + of_k + at_k, mask=mask_k, other=0.0)
            value = tl.load(v + of_k + at_k, mask=mask_k, other=0.0)
            logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
            seen = visible(
                m[:, None],
                n[None, :],
                first,
                length,
                prompt,
                evicted_at,
                chosen,
                tokens,
                EVICTS,
                SELECTS,
                PAGE,
                ONE_WORD,
            )
            weights = tl.where(seen, tl.exp2(logits - norm[:, None]), 0.0)
            change = tl.dot(upstream, tl.trans(value), input_precision=PRECISION)
            slope = weights * (change - shift[:, None])
            acc += tl.dot(slope.to(key.dtype), key, input_precision=PRECISION)
        tl.store(dq + of_q + at_q, (acc * scaling).to(dq.dtype.element_ty), mask=mask_q)


@triton.jit(do_not_specialize=LENGTHS)
def _backward_kv(
    q,
    k,
    v,
    gradient,
    dk,
    dv,
    lse,
    delta,
    tiles,
    counts,
    starts,
    prompts,
    evicted_at,
    chosen,
    tokens,
    width,
    words,
    scale_log2,
    scaling,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    EVICTS: tl.constexpr,
    SELECTS: tl.constexpr,
    PAGE: tl.constexpr,
    ONE_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles stand keys by queries here, as both products need them."""
    block, row, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    start, prompt = tl.load(starts + row).to(tl.int64), tl.load(prompts + row)
    length = (tl.load(starts + row + 1) - start).to(tl.int32)
    line = tl.program_id(1).to(tl.int64)
    evicted_at += line * width
    chosen += head.to(tl.int64) * words * tokens + start
    counts += line * tl.num_programs(0) + block
    tiles += (line * tl.num_programs(0) + block) * tl.num_programs(0)
    of_k = (start * HEADS + head) * DIM
    if block * BLOCK < length:
        n, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM_POW2)
        at_k = n[:, None] * (HEADS * DIM) + d[None, :]
        mask_k = (n < length)[:, None] & (d < DIM)[None, :]
        key = tl.load(k + of_k + at_k, mask=mask_k, other=0.0)
        value = tl.load(v + of_k + at_k, mask=mask_k, other=0.0)
        acc_k = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        acc_v = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        for i in range(tl.load(counts) * GROUP):
            m = tl.load(tiles + i // GROUP) * BLOCK + tl.arange(0, BLOCK)
            q_head = head * GROUP + i % GROUP
            of_q, of_line = (start * (HEADS * GROUP) + q_head) * DIM, q_head * tokens + start
            at_q = m[:, None] * (HEADS * GROUP * DIM) + d[None, :]
            mask_q = (m < length)[:, None] & (d < DIM)[None, :]
            query = tl.load(q + of_q + at_q, mask=mask_q, other=0.0)
            upstream = tl.load(gradient + of_q + at_q, mask=mask_q, other=0.0)
            norm = tl.load(lse + of_line + m, mask=m < length, other=0.0)
            shift = tl.load(delta + of_line + m, mask=m < length, other=0.0)
            logits = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale_log2
            seen = visible(
                m[None, :],
                n[:, None],
                block * BLOCK,
                length,
                prompt,
                evicted_at,
                chosen,
                tokens,
                EVICTS,
                SELECTS,
                PAGE,
                ONE_WORD,
            )
            weights = tl.where(seen, tl.exp2(logits - norm[None, :]), 0.0)
            acc_v += tl.dot(weights.to(upstream.dtype), upstream, input_precision=PRECISION)
            change = tl.dot(value, tl.trans(upstream), input_precision=PRECISION)
            slope = weights * (change - shift[None, :])
            acc_k += tl.dot(slope.to(query.dtype), query, input_precision=PRECISION)
        tl.store(dk + of_k + at_k, (acc_k * scaling).to(dk.dtype.element_ty), mask=mask_k)
        tl.store(dv + of_k + at_k, acc_v.to(dv.dtype.element_ty), mask=mask_k)
