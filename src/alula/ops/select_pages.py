"""Selects the pages that a KV head reads: score the page summaries, keep the best `budget` pages.

The first page and the last two are always read; a row whose budget covers its pages reads all of them.
The selectors and their formulas are in `alula.sparsity.select`.
"""

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.top_indices import best_first, choose_largest, ordered_bits, warps_for

FIRST, LAST = 1, 2


class Scorer(Protocol):
    """The part of a selector (`alula.sparsity.select`) that scores pages."""

    fused: ClassVar[bool]

    def score(self, queries: Tensor, summaries: Tensor) -> Tensor: ...


def select_pages(
    q: Tensor,
    summaries: Tensor,
    table: Tensor,
    tokens: Tensor,
    budget: Tensor,
    page: int,
    most_tokens: int,
    selector: Scorer,
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, D], summaries [P, Hkv, vectors, D], table [B, W], tokens [B], budget [B] pages
    -> (pages int32 [B, Hkv, W'], tokens int32 [B, Hkv]) as `paged_attention` takes them."""
    select = select_pages_triton if use_triton(q) else select_pages_torch
    return select(q, summaries, table, tokens, budget, page, most_tokens, selector)


def score_pages_torch(q: Tensor, summaries: Tensor, table: Tensor, selector: Scorer) -> Tensor:
    """fp32 [B, Hkv, W]"""
    batch, q_heads, dim = q.shape
    kv_heads = summaries.shape[1]
    grouped = q.view(batch, kv_heads, q_heads // kv_heads, dim).float()
    return selector.score(grouped, summaries[table.long()].float())


def select_pages_torch(
    q: Tensor,
    summaries: Tensor,
    table: Tensor,
    tokens: Tensor,
    budget: Tensor,
    page: int,
    most_tokens: int,
    selector: Scorer,
) -> tuple[Tensor, Tensor]:
    width = -(-most_tokens // page)
    table = table[:, :width]
    held = (tokens + page - 1) // page
    scores = score_pages_torch(q, summaries, table, selector)
    index = torch.arange(width, device=q.device)
    forced = (index < FIRST) | (index >= held[:, None] - LAST)
    scores = scores.masked_fill(forced[:, None], float("inf"))
    scores = scores.masked_fill((index >= held[:, None])[:, None], float("-inf"))
    count = torch.minimum(budget, held)
    kv_heads = summaries.shape[1]
    unused = index >= count[:, None, None]
    chosen = best_first(scores).masked_fill(unused, width).sort(-1).values.clamp(max=width - 1)
    pages = table[:, None].expand(-1, kv_heads, -1).gather(2, chosen).masked_fill(unused, 0)
    read = (count - 1) * page + (tokens - (held - 1) * page)
    return pages, read[:, None].expand(-1, kv_heads).int().contiguous()


def select_pages_triton(
    q: Tensor,
    summaries: Tensor,
    table: Tensor,
    tokens: Tensor,
    budget: Tensor,
    page: int,
    most_tokens: int,
    selector: Scorer,
) -> tuple[Tensor, Tensor]:
    batch, kv_heads, width = len(q), summaries.shape[1], -(-most_tokens // page)
    if selector.fused:
        scores = _fused_scores(q, summaries, table, tokens, budget, page, width)
    else:
        scores = score_pages_torch(q, summaries, table[:, :width], selector).contiguous()
    pages = torch.empty(batch, kv_heads, width, dtype=torch.int32, device=q.device)
    read = torch.empty(batch, kv_heads, dtype=torch.int32, device=q.device)
    block = triton.next_power_of_2(width)
    _choose_pages[(batch, kv_heads)](
        scores,
        table,
        tokens,
        budget,
        pages,
        read,
        table.stride(0),
        width,
        PAGE=page,
        BLOCK=block,
        FIRST_PAGES=FIRST,
        LAST_PAGES=LAST,
        num_warps=warps_for(block),
    )
    return pages, read


def _fused_scores(
    q: Tensor, summaries: Tensor, table: Tensor, tokens: Tensor, budget: Tensor, page: int, width: int
) -> Tensor:
    """Scores fp32 [B, Hkv, W] of the selectors whose formulas `_score_pages` holds."""
    batch, q_heads, dim = q.shape
    _, kv_heads, vectors, _ = summaries.shape
    scores = torch.empty(batch, kv_heads, width, dtype=torch.float32, device=q.device)
    block = 64
    _score_pages[(batch, kv_heads, triton.cdiv(width, block))](
        q,
        summaries,
        table,
        tokens,
        budget,
        scores,
        q.stride(0),
        q.stride(1),
        table.stride(0),
        width,
        GROUP=q_heads // kv_heads,
        HEADS=kv_heads,
        DIM=dim,
        DIM_POW2=triton.next_power_of_2(dim),
        VECTORS=vectors,
        PAGE=page,
        BLOCK=block,
        num_warps=4,
    )
    return scores


@triton.jit
def _score_pages(
    q,
    summaries,
    table,
    tokens,
    budget,
    scores,
    q_row,
    q_head,
    table_row,
    width,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    VECTORS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    held = tl.cdiv(tl.load(tokens + row), PAGE)
    # A row that reads all its pages needs no scores.
    if (block * BLOCK < held) & (tl.load(budget + row) < held):
        i = block * BLOCK + tl.arange(0, BLOCK)
        d = tl.arange(0, DIM_POW2)
        valid = i < held
        page = tl.load(table + row * table_row + i, mask=valid, other=0).to(tl.int64)
        line = summaries + ((page * HEADS + head) * VECTORS * DIM)[:, None] + d[None, :]
        inside = valid[:, None] & (d < DIM)[None, :]
        first = tl.load(line, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        if VECTORS == 1:  # block-topk
            mean = tl.zeros([DIM_POW2], tl.float32)
            for g in tl.static_range(GROUP):
                mean += tl.load(q + row * q_row + (head * GROUP + g) * q_head + d, mask=d < DIM, other=0.0).to(
                    tl.float32
                )
            total = tl.sum(first * (mean / GROUP)[None, :], 1)
        else:  # quest
            second = tl.load(line + DIM, mask=inside, other=0.0).to(tl.float32)
            for g in tl.static_range(GROUP):
                query = tl.load(q + row * q_row + (head * GROUP + g) * q_head + d, mask=d < DIM, other=0.0)
                query = query.to(tl.float32)[None, :]
                total += tl.sum(tl.maximum(query * first, query * second), 1)
            total /= GROUP
        tl.store(scores + (row * HEADS + head) * width + i, total, mask=valid)


@triton.jit
def _choose_pages(
    scores,
    table,
    tokens,
    budget,
    pages,
    read,
    table_row,
    width,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST_PAGES: tl.constexpr,
    LAST_PAGES: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    line = row * tl.num_programs(1) + head
    held_tokens = tl.load(tokens + row)
    held = tl.cdiv(held_tokens, PAGE)
    count = tl.minimum(tl.load(budget + row), held)
    i = tl.arange(0, BLOCK)
    valid = i < held
    page = tl.load(table + row * table_row + i, mask=valid, other=0)
    if count == held:
        tl.store(pages + line * width + i, page, mask=valid)
    else:
        score = tl.load(scores + line * width + i, mask=valid, other=float("-inf"))
        forced = (i < FIRST_PAGES) | (i >= held - LAST_PAGES)
        order = ordered_bits(tl.where(forced, float("inf"), score))
        chosen = choose_largest(order, valid, count)
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(pages + line * width + place, page, mask=chosen)
    tl.store(read + line, (count - 1) * PAGE + held_tokens - (held - 1) * PAGE)
