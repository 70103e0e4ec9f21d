"""Attention over what a sparse policy saw, forward and backward, without a mask in memory (Triton).

FlashAttention-2's recurrences over packed sequences, with visibility computed inside the tile: from `evicted_at` for
evictors, from a bit per query and page for selectors. A tile that no query of the block sees is skipped, so that the
work shrinks with the budget where what is kept lies together.
"""

from typing import Any

import torch
from torch import Tensor

from alula.distill.choice import WORD
from alula.ops.dispatch import tl, triton

BLOCK = 64
LOG2E = 1.4426950408889634
LENGTHS = ["width", "tokens", "words"]
"""Never specialised on: no kernel is compiled again for another micro-batch."""


def visible_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    prompts: Tensor,
    width: int,
    evicted_at: Tensor | None,
    chosen: Tensor | None,
    page: int,
    scaling: float,
) -> Tensor:
    """q [T, Hq, D], k and v [T, Hkv, D], rows of at most `width` tokens that begin at `starts` int32 [B + 1]
    -> [T, Hq, D].

    The query at t of its row sees the key at j <= t where t < prompts[b], or else t < evicted_at[b, h, j] (int32
    [B, Hkv, width]); and where bit j // page of `chosen` (int32 [Hkv, words, T], see `alula.distill.choice`) is set
    for it. Either may be None.
    """
    return _VisibleAttention.apply(q, k, v, starts, prompts, width, evicted_at, chosen, page, scaling)


class _VisibleAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        prompts: Tensor,
        width: int,
        evicted_at: Tensor | None,
        chosen: Tensor | None,
        page: int,
        scaling: float,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        tokens, heads, _ = q.shape
        out = torch.empty_like(q)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
        masks = (starts, prompts, q if evicted_at is None else evicted_at, q if chosen is None else chosen)
        ctx.constants = _constants(q, k, evicted_at, chosen, page)
        ctx.sizes = (width, tokens, 0 if chosen is None else chosen.shape[1])
        ctx.grid, ctx.scaling = (triton.cdiv(width, BLOCK), len(prompts)), scaling
        blocks, rows = ctx.grid
        _forward[(blocks, rows * heads)](q, k, v, *masks, out, lse, *ctx.sizes, scaling * LOG2E, **ctx.constants)
        ctx.save_for_backward(q, k, v, out, lse, *masks)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *masks = ctx.saved_tensors
        gradient = gradient.contiguous()
        dq, dk, dv, delta = (torch.empty_like(x) for x in (q, k, v, lse))
        shared = (lse, delta, *ctx.sizes, ctx.scaling * LOG2E, ctx.scaling)
        blocks, rows = ctx.grid
        inputs, options = (q, k, v, *masks, gradient), ctx.constants
        _backward_q[(blocks, rows * q.shape[1])](*inputs, out, dq, *shared, **options)
        _backward_kv[(blocks, rows * k.shape[1])](*inputs, dk, dv, *shared, **options)
        return dq, dk, dv, None, None, None, None, None, None, None


def _constants(q: Tensor, k: Tensor, evicted_at: Tensor | None, chosen: Tensor | None, page: int) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "HEADS": k.shape[1],
        "DIM": q.shape[2],
        "DIM_POW2": max(16, triton.next_power_of_2(q.shape[2])),
        "EVICTS": evicted_at is not None,
        "SELECTS": chosen is not None,
        "PAGE": page,
        "ONE_WORD": page % BLOCK == 0 or (BLOCK % page == 0 and BLOCK // page <= WORD),
        "BLOCK": BLOCK,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }


@triton.jit
def _visible(
    m, first, row, head, start, length, prompt, evicted_at, chosen, width, tokens, words,
    HEADS: tl.constexpr, EVICTS: tl.constexpr, SELECTS: tl.constexpr, PAGE: tl.constexpr, ONE_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """bool [queries, keys] of the queries at m and the keys from `first`. Queries beyond the row count for nothing."""
    n = first + tl.arange(0, BLOCK)
    seen = n[None, :] <= m[:, None]
    if EVICTS:
        gone = tl.load(evicted_at + (row * HEADS + head) * width + n, mask=n < length, other=0)
        seen = seen & ((m < prompt)[:, None] | (m[:, None] < gone[None, :]))
    if SELECTS:
        page, line = n // PAGE, chosen + head * words * tokens + start + m
        if ONE_WORD:  # the tile's pages share a word
            word = tl.load(line + first // PAGE // 32 * tokens, mask=m < length, other=0)[:, None]
        else:
            inside = (m < length)[:, None] & (n < length)[None, :]
            word = tl.load(line[:, None] + (page // 32)[None, :] * tokens, mask=inside, other=0)
        seen = seen & (((word >> (page % 32)[None, :]) & 1) != 0)
    return seen


@triton.jit(do_not_specialize=LENGTHS)
def _forward(
    q, k, v, starts, prompts, evicted_at, chosen, out, lse, width, tokens, words, scale_log2,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr, EVICTS: tl.constexpr,
    SELECTS: tl.constexpr, PAGE: tl.constexpr, ONE_WORD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, line = tl.program_id(0), tl.program_id(1)
    row, q_head = line // (HEADS * GROUP), (line % (HEADS * GROUP)).to(tl.int64)
    head, start, prompt = q_head // GROUP, tl.load(starts + row), tl.load(prompts + row)
    length = tl.load(starts + row + 1) - start
    if block * BLOCK < length:
        m = block * BLOCK + tl.arange(0, BLOCK)
        d = tl.arange(0, DIM_POW2)
        at_q = ((start + m) * (HEADS * GROUP) + q_head)[:, None] * DIM + d[None, :]
        mask_q = (m < length)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + at_q, mask=mask_q, other=0.0)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        for first in range(0, tl.minimum(block * BLOCK + BLOCK, length), BLOCK):
            seen = _visible(
                m, first, row, head, start, length, prompt, evicted_at, chosen, width, tokens, words,
                HEADS, EVICTS, SELECTS, PAGE, ONE_WORD, BLOCK,
            )  # fmt: skip
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                n = first + tl.arange(0, BLOCK)
                at_k = ((start + n) * HEADS + head)[:, None] * DIM + d[None, :]
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
        tl.store(lse + q_head * tokens + start + m, top + tl.log2(total), mask=m < length)


@triton.jit(do_not_specialize=LENGTHS)
def _backward_q(
    q, k, v, starts, prompts, evicted_at, chosen, gradient, out, dq, lse, delta, width, tokens, words, scale_log2,
    scaling,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr, EVICTS: tl.constexpr,
    SELECTS: tl.constexpr, PAGE: tl.constexpr, ONE_WORD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """And `delta`, the row sums that softmax's derivative subtracts, for `_backward_kv`."""
    block, line = tl.program_id(0), tl.program_id(1)
    row, q_head = line // (HEADS * GROUP), (line % (HEADS * GROUP)).to(tl.int64)
    head, start, prompt = q_head // GROUP, tl.load(starts + row), tl.load(prompts + row)
    length = tl.load(starts + row + 1) - start
    if block * BLOCK < length:
        m = block * BLOCK + tl.arange(0, BLOCK)
        d = tl.arange(0, DIM_POW2)
        at_q = ((start + m) * (HEADS * GROUP) + q_head)[:, None] * DIM + d[None, :]
        mask_q = (m < length)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + at_q, mask=mask_q, other=0.0)
        upstream = tl.load(gradient + at_q, mask=mask_q, other=0.0)
        norm = tl.load(lse + q_head * tokens + start + m, mask=m < length, other=0.0)
        result = tl.load(out + at_q, mask=mask_q, other=0.0)
        shift = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1)
        tl.store(delta + q_head * tokens + start + m, shift, mask=m < length)
        acc = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        for first in range(0, tl.minimum(block * BLOCK + BLOCK, length), BLOCK):
            seen = _visible(
                m, first, row, head, start, length, prompt, evicted_at, chosen, width, tokens, words,
                HEADS, EVICTS, SELECTS, PAGE, ONE_WORD, BLOCK,
            )  # fmt: skip
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                n = first + tl.arange(0, BLOCK)
                at_k = ((start + n) * HEADS + head)[:, None] * DIM + d[None, :]
                mask_k = (n < length)[:, None] & (d < DIM)[None, :]
                key = tl.load(k + at_k, mask=mask_k, other=0.0)
                value = tl.load(v + at_k, mask=mask_k, other=0.0)
                logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
                weights = tl.where(seen, tl.exp2(logits - norm[:, None]), 0.0)
                change = tl.dot(upstream, tl.trans(value), input_precision=PRECISION)
                slope = weights * (change - shift[:, None])
                acc += tl.dot(slope.to(key.dtype), key, input_precision=PRECISION)
        tl.store(dq + at_q, (acc * scaling).to(dq.dtype.element_ty), mask=mask_q)


@triton.jit(do_not_specialize=LENGTHS)
def _backward_kv(
    q, k, v, starts, prompts, evicted_at, chosen, gradient, dk, dv, lse, delta, width, tokens, words, scale_log2,
    scaling,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW2: tl.constexpr, EVICTS: tl.constexpr,
    SELECTS: tl.constexpr, PAGE: tl.constexpr, ONE_WORD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, line = tl.program_id(0), tl.program_id(1)
    row, head = line // HEADS, (line % HEADS).to(tl.int64)
    start, prompt = tl.load(starts + row), tl.load(prompts + row)
    length = tl.load(starts + row + 1) - start
    if block * BLOCK < length:
        n = block * BLOCK + tl.arange(0, BLOCK)
        d = tl.arange(0, DIM_POW2)
        at_k = ((start + n) * HEADS + head)[:, None] * DIM + d[None, :]
        mask_k = (n < length)[:, None] & (d < DIM)[None, :]
        key = tl.load(k + at_k, mask=mask_k, other=0.0)
        value = tl.load(v + at_k, mask=mask_k, other=0.0)
        acc_k = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        acc_v = tl.zeros([BLOCK, DIM_POW2], tl.float32)
        for first in range(block * BLOCK, length, BLOCK):
            m = first + tl.arange(0, BLOCK)
            seen = _visible(
                m, block * BLOCK, row, head, start, length, prompt, evicted_at, chosen, width, tokens, words,
                HEADS, EVICTS, SELECTS, PAGE, ONE_WORD, BLOCK,
            )  # fmt: skip
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                mask_q = (m < length)[:, None] & (d < DIM)[None, :]
                for member in range(GROUP):
                    q_head = head * GROUP + member
                    at_q = ((start + m) * (HEADS * GROUP) + q_head)[:, None] * DIM + d[None, :]
                    at_line = q_head * tokens + start + m
                    query = tl.load(q + at_q, mask=mask_q, other=0.0)
                    upstream = tl.load(gradient + at_q, mask=mask_q, other=0.0)
                    norm = tl.load(lse + at_line, mask=m < length, other=0.0)
                    shift = tl.load(delta + at_line, mask=m < length, other=0.0)
                    logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
                    weights = tl.where(seen, tl.exp2(logits - norm[:, None]), 0.0)
                    acc_v += tl.dot(tl.trans(weights.to(upstream.dtype)), upstream, input_precision=PRECISION)
                    change = tl.dot(upstream, tl.trans(value), input_precision=PRECISION)
                    slope = weights * (change - shift[:, None])
                    acc_k += tl.dot(tl.trans(slope.to(query.dtype)), query, input_precision=PRECISION)
        tl.store(dk + at_k, (acc_k * scaling).to(dk.dtype.element_ty), mask=mask_k)
        tl.store(dv + at_k, acc_v.to(dv.dtype.element_ty), mask=mask_k)
