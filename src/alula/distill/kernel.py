"""Attention over what a sparse policy saw, forward and backward, without a mask in memory (Triton).

FlashAttention-2's recurrences, with visibility computed inside the tile: from `evicted_at` for evictors, from a byte
per query and page for selectors. A tile that no query of the block sees is skipped, so that the work shrinks with the
budget where what is kept lies together.
"""

from typing import Any

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton

BLOCK = 64
LOG2E = 1.4426950408889634


def visible_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    prompts: Tensor,
    evicted_at: Tensor | None,
    read: Tensor | None,
    page: int,
    scaling: float,
) -> Tensor:
    """q [B, L, Hq, D], k and v [B, L, Hkv, D], padded rows of `lengths` int32 [B] -> [B, L, Hq, D], zeros beyond.

    The query at t sees the key at j <= t where t < prompts[b], or else t < evicted_at[b, h, j] (int32 [B, Hkv, L])
    and read[b, h, t, j // page] (uint8 [B, Hkv, L, pages]); either may be None.
    """
    return _VisibleAttention.apply(q, k, v, lengths, prompts, evicted_at, read, page, scaling)


class _VisibleAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor,
        prompts: Tensor,
        evicted_at: Tensor | None,
        read: Tensor | None,
        page: int,
        scaling: float,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        rows, width, heads, _ = q.shape
        out = torch.zeros_like(q)
        lse = torch.zeros(rows, heads, width, dtype=torch.float32, device=q.device)
        masks = (lengths, prompts, q if evicted_at is None else evicted_at, q if read is None else read)
        constants = _constants(q, k, evicted_at, read, page)
        grid = (triton.cdiv(width, BLOCK), rows * heads)
        pages = 0 if read is None else read.shape[3]
        _forward[grid](q, k, v, *masks, out, lse, width, pages, scaling * LOG2E, **constants)
        ctx.save_for_backward(q, k, v, out, lse, *masks)
        ctx.constants, ctx.pages, ctx.scaling = constants, pages, scaling
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *masks = ctx.saved_tensors
        rows, width, heads, _ = q.shape
        gradient = gradient.contiguous()
        # the row sums that softmax's derivative subtracts
        delta = (gradient.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        shared = (lse, delta, width, ctx.pages, ctx.scaling * LOG2E, ctx.scaling)
        blocks = triton.cdiv(width, BLOCK)
        _backward_q[(blocks, rows * heads)](q, k, v, *masks, gradient, dq, *shared, **ctx.constants)
        _backward_kv[(blocks, rows * k.shape[2])](q, k, v, *masks, gradient, dk, dv, *shared, **ctx.constants)
        return dq, dk, dv, None, None, None, None, None, None


def _constants(q: Tensor, k: Tensor, evicted_at: Tensor | None, read: Tensor | None, page: int) -> dict[str, Any]:
    return {
        "GROUP": q.shape[2] // k.shape[2],
        "HEADS": k.shape[2],
        "DIM": q.shape[3],
        "DIM_POW2": max(16, triton.next_power_of_2(q.shape[3])),
        "EVICTS": evicted_at is not None,
        "SELECTS": read is not None,
        "PAGE": page,
        "BLOCK": BLOCK,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }


@triton.jit
def _visible(
    m, n, line, length, prompt, evicted_at, read, width, pages,
    EVICTS: tl.constexpr, SELECTS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """bool [queries, keys]; `line` is row · kv_heads + kv_head."""
    inside = (m < length)[:, None] & (n < length)[None, :]
    seen = inside & (n[None, :] <= m[:, None])
    prefill = (m < prompt)[:, None]
    if EVICTS:
        gone = tl.load(evicted_at + line * width + n, mask=n < length, other=0)
        seen = seen & (prefill | (m[:, None] < gone[None, :]))
    if SELECTS:
        place = (line * width + m)[:, None] * pages + (n // PAGE)[None, :]
        chosen = tl.load(read + place, mask=seen, other=0)
        seen = seen & (prefill | (chosen != 0))
    return seen


@triton.jit
def _forward(
    q, k, v, lengths, prompts, evicted_at, read, out, lse, width, pages, scale_log2,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr, EVICTS: tl.constexpr,
    SELECTS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, line_q = tl.program_id(0), tl.program_id(1)
    row, q_head = line_q // (HEADS * GROUP), line_q % (HEADS * GROUP)
    head = q_head // GROUP
    length, prompt = tl.load(lengths + row), tl.load(prompts + row)
    if block * BLOCK < length:
        m = block * BLOCK + tl.arange(0, BLOCK)
        d = tl.arange(0, DIM_POW2)
        line = (row * HEADS + head).to(tl.int64)
        at_q = ((row * width + m).to(tl.int64) * (HEADS * GROUP) + q_head)[:, None] * DIM + d[None, :]
        mask_q = (m < length)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + at_q, mask=mask_q, other=0.0)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        for first in range(0, tl.minimum(block * BLOCK + BLOCK, length), BLOCK):
            n = first + tl.arange(0, BLOCK)
            seen = _visible(m, n, line, length, prompt, evicted_at, read, width, pages, EVICTS, SELECTS, PAGE)
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                at_k = ((row * width + n).to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
                mask_k = (n < length)[:, None] & (d < DIM)[None, :]
                key = tl.load(k + at_k, mask=mask_k, other=0.0)
                logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
                logits = tl.where(seen, logits, float("-inf"))
                peak = tl.maximum(top, tl.max(logits, 1))
                base = tl.where(peak == float("-inf"), 0.0, peak)  # a query that has seen nothing yet
                weights = tl.exp2(logits - base[:, None])
                rescale = tl.exp2(top - base)
                total = total * rescale + tl.sum(weights, 1)
                value = tl.load(v + at_k, mask=mask_k, other=0.0)
                acc = acc * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
                top = peak
        total = tl.where(m < length, total, 1.0)
        tl.store(out + at_q, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask_q)
        tl.store(lse + line_q.to(tl.int64) * width + m, top + tl.log2(total), mask=m < length)


@triton.jit
def _backward_q(
    q, k, v, lengths, prompts, evicted_at, read, gradient, dq, lse, delta, width, pages, scale_log2, scaling,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr, EVICTS: tl.constexpr,
    SELECTS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, line_q = tl.program_id(0), tl.program_id(1)
    row, q_head = line_q // (HEADS * GROUP), line_q % (HEADS * GROUP)
    head = q_head // GROUP
    length, prompt = tl.load(lengths + row), tl.load(prompts + row)
    if block * BLOCK < length:
        m = block * BLOCK + tl.arange(0, BLOCK)
        d = tl.arange(0, DIM_POW2)
        line = (row * HEADS + head).to(tl.int64)
        at_q = ((row * width + m).to(tl.int64) * (HEADS * GROUP) + q_head)[:, None] * DIM + d[None, :]
        mask_q = (m < length)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + at_q, mask=mask_q, other=0.0)
        upstream = tl.load(gradient + at_q, mask=mask_q, other=0.0)
        norm = tl.load(lse + line_q.to(tl.int64) * width + m, mask=m < length, other=0.0)
        shift = tl.load(delta + line_q.to(tl.int64) * width + m, mask=m < length, other=0.0)
        acc = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        for first in range(0, tl.minimum(block * BLOCK + BLOCK, length), BLOCK):
            n = first + tl.arange(0, BLOCK)
            seen = _visible(m, n, line, length, prompt, evicted_at, read, width, pages, EVICTS, SELECTS, PAGE)
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                at_k = ((row * width + n).to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
                mask_k = (n < length)[:, None] & (d < DIM)[None, :]
                key = tl.load(k + at_k, mask=mask_k, other=0.0)
                value = tl.load(v + at_k, mask=mask_k, other=0.0)
                logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
                weights = tl.where(seen, tl.exp2(logits - norm[:, None]), 0.0)
                change = tl.dot(upstream, tl.trans(value), input_precision=PRECISION)
                slope = weights * (change - shift[:, None])
                acc += tl.dot(slope.to(key.dtype), key, input_precision=PRECISION)
        tl.store(dq + at_q, (acc * scaling).to(dq.dtype.element_ty), mask=mask_q)


@triton.jit
def _backward_kv(
    q, k, v, lengths, prompts, evicted_at, read, gradient, dk, dv, lse, delta, width, pages, scale_log2, scaling,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr, EVICTS: tl.constexpr,
    SELECTS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, line_kv = tl.program_id(0), tl.program_id(1)
    row, head = line_kv // HEADS, line_kv % HEADS
    length, prompt = tl.load(lengths + row), tl.load(prompts + row)
    if block * BLOCK < length:
        n = block * BLOCK + tl.arange(0, BLOCK)
        d = tl.arange(0, DIM_POW2)
        line = line_kv.to(tl.int64)
        at_k = ((row * width + n).to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
        mask_k = (n < length)[:, None] & (d < DIM)[None, :]
        key = tl.load(k + at_k, mask=mask_k, other=0.0)
        value = tl.load(v + at_k, mask=mask_k, other=0.0)
        acc_k = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        acc_v = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        for first in range(block * BLOCK, length, BLOCK):
            m = first + tl.arange(0, BLOCK)
            seen = _visible(m, n, line, length, prompt, evicted_at, read, width, pages, EVICTS, SELECTS, PAGE)
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                mask_q = (m < length)[:, None] & (d < DIM)[None, :]
                for member in range(GROUP):
                    q_head = head * GROUP + member
                    at_q = ((row * width + m).to(tl.int64) * (HEADS * GROUP) + q_head)[:, None] * DIM + d[None, :]
                    at_row = (row * (HEADS * GROUP) + q_head).to(tl.int64) * width + m
                    query = tl.load(q + at_q, mask=mask_q, other=0.0)
                    upstream = tl.load(gradient + at_q, mask=mask_q, other=0.0)
                    norm = tl.load(lse + at_row, mask=m < length, other=0.0)
                    shift = tl.load(delta + at_row, mask=m < length, other=0.0)
                    logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
                    weights = tl.where(seen, tl.exp2(logits - norm[:, None]), 0.0)
                    acc_v += tl.dot(tl.trans(weights.to(upstream.dtype)), upstream, input_precision=PRECISION)
                    change = tl.dot(upstream, tl.trans(value), input_precision=PRECISION)
                    slope = weights * (change - shift[:, None])
                    acc_k += tl.dot(tl.trans(slope.to(query.dtype)), query, input_precision=PRECISION)
        tl.store(dk + at_k, (acc_k * scaling).to(dk.dtype.element_ty), mask=mask_k)
        tl.store(dv + at_k, acc_v.to(dv.dtype.element_ty), mask=mask_k)
