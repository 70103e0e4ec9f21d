"""Selects the pages that a KV head reads: score the page summaries, keep the best `budget` pages.

block-topk (Sparrow): score = (mean of the group's queries) · (mean of the page's keys).
quest: score = mean over the group of Σ_d max(q_d · max_d, q_d · min_d), an upper bound of q·k in the page.
The first page and the last two are always read; a row whose budget covers its pages reads all of them.
"""

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.top_indices import choose_largest, ordered_bits, top_indices_torch, warps_for

FIRST, LAST = 1, 2


def select_pages(
    q: Tensor, summaries: Tensor, table: Tensor, tokens: Tensor, budget: Tensor, page: int, most_tokens: int
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, D], summaries [P, Hkv, 1 (mean) or 2 (min, max), D], table [B, W], tokens [B], budget [B] pages
    -> (pages int32 [B, Hkv, W'], tokens int32 [B, Hkv]) as `paged_attention` takes them."""
    if use_triton(q):
        return select_pages_triton(q, summaries, table, tokens, budget, page, most_tokens)
    return select_pages_torch(q, summaries, table, tokens, budget, page, most_tokens)


def score_pages_torch(q: Tensor, summaries: Tensor, table: Tensor) -> Tensor:
    """fp32 [B, Hkv, W]"""
    batch, q_heads, dim = q.shape
    kv_heads = summaries.shape[1]
    grouped = q.view(batch, kv_heads, q_heads // kv_heads, dim).float()
    summary = summaries[table.long()].float()  # [B, W, Hkv, 1|2, D]
    if summary.shape[3] == 1:
        return torch.einsum("bhd,bwhd->bhw", grouped.mean(2), summary[:, :, :, 0])
    low, high = summary.unbind(3)
    bound = torch.maximum(grouped[:, None] * low[:, :, :, None], grouped[:, None] * high[:, :, :, None])
    return bound.sum(-1).mean(-1).transpose(1, 2)


def select_pages_torch(
    q: Tensor, summaries: Tensor, table: Tensor, tokens: Tensor, budget: Tensor, page: int, most_tokens: int
) -> tuple[Tensor, Tensor]:
    width = -(-most_tokens // page)
    table = table[:, :width]
    held = (tokens + page - 1) // page
    scores = score_pages_torch(q, summaries, table)
    index = torch.arange(width, device=q.device)
    forced = (index < FIRST) | (index >= held[:, None] - LAST)
    scores = scores.masked_fill(forced[:, None], float("inf"))
    scores = scores.masked_fill((index >= held[:, None])[:, None], float("-inf"))
    count = torch.minimum(budget, held)
    kv_heads = summaries.shape[1]
    pages = torch.zeros(len(table), kv_heads, width, dtype=torch.int32, device=q.device)
    for row in range(len(table)):
        keep = int(count[row])
        chosen = top_indices_torch(scores[row], keep).long()
        pages[row, :, :keep] = table[row][chosen]
    read = (count - 1) * page + (tokens - (held - 1) * page)
    return pages, read[:, None].expand(-1, kv_heads).int().contiguous()


def select_pages_triton(
    q: Tensor, summaries: Tensor, table: Tensor, tokens: Tensor, budget: Tensor, page: int, most_tokens: int
) -> tuple[Tensor, Tensor]:
    batch, q_heads, dim = q.shape
    _, kv_heads, kinds, _ = summaries.shape
    width = -(-most_tokens // page)
    scores = torch.empty(batch, kv_heads, width, dtype=torch.float32, device=q.device)
    pages = torch.empty(batch, kv_heads, width, dtype=torch.int32, device=q.device)
    read = torch.empty(batch, kv_heads, dtype=torch.int32, device=q.device)
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
        KINDS=kinds,
        PAGE=page,
        BLOCK=block,
        num_warps=4,
    )
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
    KINDS: tl.constexpr,
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
        line = summaries + ((page * HEADS + head) * KINDS * DIM)[:, None] + d[None, :]
        inside = valid[:, None] & (d < DIM)[None, :]
        first = tl.load(line, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        if KINDS == 1:
            mean = tl.zeros([DIM_POW2], tl.float32)
            for g in tl.static_range(GROUP):
                mean += tl.load(q + row * q_row + (head * GROUP + g) * q_head + d, mask=d < DIM, other=0.0).to(
                    tl.float32
                )
            total = tl.sum(first * (mean / GROUP)[None, :], 1)
        else:
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
