"""Which keys the queries of a layer see, tile by tile, in the form that the attention kernels read (Triton).

A tile is 64 queries by 64 keys. Its mask is computed where it is used: from `evicted_at` for evictors, from a bit per
query and page for selectors. Empty tiles are found once and skipped, so the work shrinks with the budget if the kept
keys are contiguous. Lists of the other tiles, instead of a test in the loop, allow prefetching.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alula.distill.attention.page_choice import WORD, pages_read
from alula.distill.attention.visibility import Visibility
from alula.ops.dispatch import tl, triton

BLOCK = 64


class LayerVisibility(NamedTuple):
    """The query at t of row b sees the key at j <= t where t < prompts[b], or else t < evicted_at[b, h, j]; and where
    bit j // page of `chosen` is set for it."""

    starts: Tensor
    """int32 [B + 1]: where each row begins among the packed tokens, and where the last one ends."""
    prompts: Tensor
    """int32 [B]"""
    tokens: int
    """Tokens of all rows."""
    width: int
    """Length of the longest row."""
    evicted_at: Tensor | None
    """int32 [B, Hkv, width]"""
    chosen: Tensor | None
    """int32 [Hkv, words, T], see `alula.distill.attention.page_choice`."""
    page: int

    def arguments(self) -> tuple[Tensor | int, ...]:
        """Arguments of the kernels; a part that the policy lacks is a placeholder and never read."""
        placeholder = self.starts
        chosen = placeholder if self.chosen is None else self.chosen
        evicted_at = placeholder if self.evicted_at is None else self.evicted_at
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


class TileLists(NamedTuple):
    """Tiles with a visible key, int32 [B, Hkv, blocks, blocks], and their number [B, Hkv, blocks]."""

    of_queries: Tensor
    """Per block of queries: the blocks of keys that one of them sees, ascending."""
    queries: Tensor
    of_keys: Tensor
    """Per block of keys: the blocks of queries that see one of them, ascending."""
    keys: Tensor


@torch.no_grad()
def layer_visibility(
    visibility: Visibility, layer: int, query: Tensor, key: Tensor
) -> tuple[LayerVisibility, TileLists]:
    """Which packed keys [T, Hkv, D] of a layer the packed queries [T, Hq, D] see; cached in `visibility.layers`."""
    if layer not in visibility.layers:
        selects = visibility.selects(layer)
        chosen = pages_read(visibility, layer, query, key) if selects else None
        evicted_at = None if visibility.evicted_at is None else visibility.evicted_at[layer]
        page = visibility.select.block if visibility.select and selects else 1
        layer_ = LayerVisibility(
            visibility.starts, visibility.prompts, len(query), visibility.width, evicted_at, chosen, page
        )
        visibility.layers[layer] = layer_, tile_lists(layer_, key.shape[1])
    return visibility.layers[layer]


def tile_lists(layer: LayerVisibility, heads: int) -> TileLists:
    rows, blocks = len(layer.prompts), triton.cdiv(layer.width, BLOCK)
    some = torch.zeros(rows, heads, blocks, blocks, dtype=torch.uint8, device=layer.starts.device)
    _mark_tiles[(blocks, blocks, rows * heads)](some, *layer.arguments(), HEADS=heads, **layer.constants())
    lists = []
    for which in (some, some.transpose(2, 3).contiguous()):
        order = which.sort(dim=-1, descending=True, stable=True).indices
        lists += [order.int(), which.sum(-1, dtype=torch.int32)]
    return TileLists(*lists)


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
    """The mask of queries m and keys n, one of them a column and the other a row; `first` is the first key. Queries
    beyond the row's end are ignored."""
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
def _mark_tiles(
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
    """Mark the tiles in which some query sees some key."""
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
