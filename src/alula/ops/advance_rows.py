"""What a decode step does to the state of its rows before the model runs and after a token is sampled."""

from typing import NamedTuple

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton

BLOCK = 1024


class RowState(NamedTuple):
    """State of the rows; every tensor is updated in place."""

    position: Tensor
    kv_len: Tensor
    remaining: Tensor
    """int32 [B] each: position of the last token, tokens of KV, tokens still to be decoded in this chunk"""
    live: Tensor
    context_len: Tensor
    """int32 [B] each: 1 for rows that decode in this step, and the KV tokens that they may read"""
    token: Tensor
    """int64 [B]: the last token"""
    forced: Tensor
    """int64 [B, steps]: given tokens, -1 where tokens are sampled"""
    column: Tensor
    """int64 [1]: the step"""
    stop: Tensor | None = None
    ended: Tensor | None = None
    """int64 [B, S], int32 [B]: tokens that end a row, and the rows that they ended; both or none"""


class Budgets(NamedTuple):
    """Pages that a selector may read: int32 [B, bins], by position in bins of int32 [B] tokens."""

    pages: Tensor
    bin_width: Tensor


def begin_step(rows: RowState, budgets: Budgets | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Set `live` and `context_len`. Returns int64 [B] the position of the next token, int64 [B] its given value or -1,
    and int32 [B] the pages that may be read."""
    if use_triton(rows.token):
        return begin_step_triton(rows, budgets)
    return begin_step_torch(rows, budgets)


def begin_step_torch(rows: RowState, budgets: Budgets | None) -> tuple[Tensor, Tensor, Tensor | None]:
    live = (rows.remaining > 0).int()
    if rows.ended is not None:
        live = live * (1 - rows.ended)
    rows.live.copy_(live)
    rows.context_len.copy_(rows.kv_len * live + 1)
    pages = None
    if budgets is not None:
        bins = torch.div(rows.position + 1, budgets.bin_width.clamp(min=1), rounding_mode="floor")
        bins = bins.clamp(max=budgets.pages.shape[1] - 1)
        pages = budgets.pages.gather(1, bins[:, None].long())[:, 0]
    return rows.position.long() + 1, rows.forced.index_select(1, rows.column)[:, 0], pages


def end_step(rows: RowState, token: Tensor, logprob: Tensor, out_token: Tensor, out_logprob: Tensor) -> None:
    """Note the tokens [B] and log-probs [B] of a step in its column of `out_*` [B, steps], and advance the rows."""
    if use_triton(token):
        end_step_triton(rows, token, logprob, out_token, out_logprob)
    else:
        end_step_torch(rows, token, logprob, out_token, out_logprob)


def end_step_torch(rows: RowState, token: Tensor, logprob: Tensor, out_token: Tensor, out_logprob: Tensor) -> None:
    out_token.index_copy_(1, rows.column, token[:, None])
    out_logprob.index_copy_(1, rows.column, logprob[:, None])
    if rows.ended is not None and rows.stop is not None:
        forced = rows.forced.index_select(1, rows.column)[:, 0]
        stopped = (token[:, None] == rows.stop).any(1) & (forced < 0)
        rows.ended.bitwise_or_(stopped.int() * rows.live)
    rows.token.copy_(torch.where(rows.live > 0, token, rows.token))
    rows.position.add_(rows.live)
    rows.kv_len.add_(rows.live)
    rows.remaining.sub_(rows.live)
    rows.column.add_(1)


def begin_step_triton(rows: RowState, budgets: Budgets | None) -> tuple[Tensor, Tensor, Tensor | None]:
    batch = len(rows.token)
    following, given = torch.empty(2, batch, dtype=torch.int64, device=rows.token.device)
    pages = None if budgets is None else torch.empty_like(rows.live)
    _begin[(triton.cdiv(batch, BLOCK),)](
        rows.position,
        rows.kv_len,
        rows.remaining,
        rows.ended if rows.ended is not None else rows.live,
        rows.live,
        rows.context_len,
        rows.forced,
        rows.column,
        budgets.pages if budgets is not None else rows.live,
        budgets.bin_width if budgets is not None else rows.live,
        following,
        given,
        pages if pages is not None else rows.live,
        batch,
        rows.forced.stride(0),
        budgets.pages.stride(0) if budgets is not None else 0,
        BINS=budgets.pages.shape[1] if budgets is not None else 0,
        STOPS=rows.ended is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return following, given, pages


def end_step_triton(rows: RowState, token: Tensor, logprob: Tensor, out_token: Tensor, out_logprob: Tensor) -> None:
    _end[(1,)](  # one program: the column moves on after all rows have read it
        rows.position,
        rows.kv_len,
        rows.remaining,
        rows.live,
        rows.token,
        rows.forced,
        rows.column,
        rows.stop if rows.stop is not None else rows.token,
        rows.ended if rows.ended is not None else rows.live,
        token,
        logprob,
        out_token,
        out_logprob,
        len(token),
        rows.forced.stride(0),
        out_token.stride(0),
        out_logprob.stride(0),
        STOPS=rows.stop.shape[1] if rows.stop is not None else 0,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit
def _begin(
    position,
    kv_len,
    remaining,
    ended,
    live,
    context_len,
    forced,
    column,
    budget,
    bin_width,
    following,
    given,
    pages,
    batch,
    forced_row,
    budget_row,
    BINS: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < batch
    alive = tl.load(remaining + row, mask=inside, other=0) > 0
    if STOPS:
        alive = alive & (tl.load(ended + row, mask=inside, other=0) == 0)
    alive = alive.to(tl.int32)
    tl.store(live + row, alive, mask=inside)
    tl.store(context_len + row, tl.load(kv_len + row, mask=inside, other=0) * alive + 1, mask=inside)
    after = tl.load(position + row, mask=inside, other=0) + 1
    tl.store(following + row, after.to(tl.int64), mask=inside)
    tl.store(given + row, tl.load(forced + row * forced_row + tl.load(column), mask=inside, other=-1), mask=inside)
    if BINS > 0:
        width = tl.maximum(tl.load(bin_width + row, mask=inside, other=1), 1)
        place = tl.minimum(after // width, BINS - 1)
        tl.store(pages + row, tl.load(budget + row * budget_row + place, mask=inside, other=0), mask=inside)


@triton.jit
def _end(
    position,
    kv_len,
    remaining,
    live,
    last,
    forced,
    column,
    stop,
    ended,
    token,
    logprob,
    out_token,
    out_logprob,
    batch,
    forced_row,
    token_row,
    logprob_row,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.load(column)
    for first in range(0, batch, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < batch
        alive = tl.load(live + row, mask=inside, other=0)
        new = tl.load(token + row, mask=inside, other=0)
        tl.store(out_token + row * token_row + step, new, mask=inside)
        tl.store(out_logprob + row * logprob_row + step, tl.load(logprob + row, mask=inside, other=0.0), mask=inside)
        tl.store(last + row, new, mask=inside & (alive > 0))
        tl.store(position + row, tl.load(position + row, mask=inside, other=0) + alive, mask=inside)
        tl.store(kv_len + row, tl.load(kv_len + row, mask=inside, other=0) + alive, mask=inside)
        tl.store(remaining + row, tl.load(remaining + row, mask=inside, other=0) - alive, mask=inside)
        if STOPS > 0:
            sampled = tl.load(forced + row * forced_row + step, mask=inside, other=0) < 0
            for i in range(STOPS):
                here = tl.load(stop + row * STOPS + i, mask=inside, other=-1) == new
                tl.store(ended + row, 1, mask=inside & here & sampled & (alive > 0))
    tl.debug_barrier()
    tl.store(column, step + 1)
