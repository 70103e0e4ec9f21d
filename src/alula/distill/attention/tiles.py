"""What the queries of a layer see, tile by tile, as the attention kernels read it (Triton).

A tile is 64 queries by 64 keys. Its mask is computed where it is used: from `evicted_at` for evictors, from a bit per
query and page for selectors. Tiles that nobody sees are found once and never visited, so that the work shrinks with
the budget where what is kept lies together; lists of the others, instead of a test in the loop, let the loop load
ahead.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alula.distill.attention.page_choice import WORD, pages_read
from alula.distill.attention.visibility import View
from alula.ops.dispatch import tl, triton

BLOCK = 64


class Seen(NamedTuple):
    """The query at t of row b sees the key at j <= t where t < prompts[b], or else t < evicted_at[b, h, j]; and where
    bit j // page of `chosen` is set for it."""

    starts: Tensor
    """int32 [B + 1]: where each row begins among the packed tokens, and where the last one ends."""
    prompts: Tensor
    """int32 [B]"""
    tokens: int
    """Of all rows."""
    width: int
    """Of the longest row."""
    evicted_at: Tensor | None
    """int32 [B, Hkv, width]"""
    chosen: Tensor | None
    """int32 [Hkv, words, T], see `alula.distill.attention.page_choice`."""
    page: int

    def arguments(self) -> tuple[Tensor | int, ...]:
        """Of `visible` and its callers; what a policy has not is never read."""
        nothing = self.starts
        chosen = nothing if self.chosen is None else self.chosen
        evicted_at = nothing if self.evicted_at is None else self.evicted_at
        words = 0 if self.chosen is None else self.chosen.shape[1]
        return self.starts, self.prompts, evicted_at, chosen, self.tokens, self.width, words

    def constants(self) -> dict[str, int | bool]:
        return {
            "EVICTS": self.evicted_at is not None,
            "SELECTS": self.chosen is not None,
            "PAGE": self.page,
            "ONE_WORD": self.page % BLOCK == 0 or (BLOCK % self.page == 0 and BLOCK // self.page <= WORD),
            "BLOCK": BLOCK,
        }


class Lists(NamedTuple):
    """Tiles with something to see, int32 [B, Hkv, blocks, blocks], and how many [B, Hkv, blocks]."""

    of_queries: Tensor
    """By block of queries, the blocks of keys that one of them sees, ascending."""
    queries: Tensor
    of_keys: Tensor
    """By block of keys, the blocks of queries that see one of them, ascending."""
    keys: Tensor


@torch.no_grad()
def look(view: View, layer: int, query: Tensor, key: Tensor) -> tuple[Seen, Lists]:
    """What packed queries [T, Hq, D] see of packed keys [T, Hkv, D] in a layer; kept in the view."""
    if layer not in view.seen:
        selects = view.selects(layer)
        chosen = pages_read(view, layer, query, key) if selects else None
        evicted_at = None if view.evicted_at is None else view.evicted_at[layer]
        page = view.select.block if view.select and selects else 1
        seen = Seen(view.starts, view.prompts, len(query), view.width, evicted_at, chosen, page)
        view.seen[layer] = seen, tile_lists(seen, key.shape[1])
    return view.seen[layer]


def tile_lists(seen: Seen, heads: int) -> Lists:
    rows, blocks = len(seen.prompts), triton.cdiv(seen.width, BLOCK)
    some = torch.zeros(rows, heads, blocks, blocks, dtype=torch.uint8, device=seen.starts.device)
    _find[(blocks, blocks, rows * heads)](some, *seen.arguments(), HEADS=heads, **seen.constants())
    found = []
    for which in (some, some.transpose(2, 3).contiguous()):
        order = which.sort(dim=-1, descending=True, stable=True).indices
        found += [order.int(), which.sum(-1, dtype=torch.int32)]
    return Lists(*found)


@triton.jit
def visible(
    m,
    n,
    first,
    length,
    prompt,
    evicted_at,
    chosen,
    tokens,
    EVICTS: tl.constexpr,
    SELECTS: tl.constexpr,
    PAGE: tl.constexpr,
    ONE_WORD: tl.constexpr,
):
    """The mask of queries m and keys n, one a column and the other a row; `first` is the first key. Queries beyond
    the row count for nothing."""
    seen = n <= m
    if EVICTS:
        seen = seen & ((m < prompt) | (m < tl.load(evicted_at + n, mask=n < length, other=0)))
    if SELECTS:
        page = n // PAGE
        if ONE_WORD:  # the tile's pages share a word
            word = tl.load(chosen + first // PAGE // 32 * tokens + m, mask=m < length, other=0)
        else:
            word = tl.load(chosen + page // 32 * tokens + m, mask=(m < length) & (n < length), other=0)
        seen = seen & (((word >> (page % 32)) & 1) != 0)
    return seen


# Lengths are never specialised on: no kernel is compiled again for another micro-batch.
@triton.jit(do_not_specialize=["tokens", "width", "words"])
def _find(
    some,
    starts,
    prompts,
    evicted_at,
    chosen,
    tokens,
    width,
    words,
    HEADS: tl.constexpr,
    EVICTS: tl.constexpr,
    SELECTS: tl.constexpr,
    PAGE: tl.constexpr,
    ONE_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whether a query of the block sees a key of the block."""
    keys, queries, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2) // HEADS, tl.program_id(2) % HEADS
    start = tl.load(starts + row).to(tl.int64)
    length = (tl.load(starts + row + 1) - start).to(tl.int32)
    if (keys <= queries) & (queries * BLOCK < length):
        m, n = queries * BLOCK + tl.arange(0, BLOCK)[:, None], keys * BLOCK + tl.arange(0, BLOCK)[None, :]
        evicted_at += (row * HEADS + head).to(tl.int64) * width
        chosen += head.to(tl.int64) * words * tokens + start
        seen = visible(
            m,
            n,
            keys * BLOCK,
            length,
            tl.load(prompts + row),
            evicted_at,
            chosen,
            tokens,
            EVICTS,
            SELECTS,
            PAGE,
            ONE_WORD,
        )
        found = tl.max(tl.max((seen & (m < length)).to(tl.int32), 1), 0)
        line = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + queries
        tl.store(some + line * tl.num_programs(0) + keys, found.to(tl.uint8))
