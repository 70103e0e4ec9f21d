"""Pages that each query of a selecting layer reads, as bits: `Visibility.pages_read` for all queries (Triton)."""

import torch
from torch import Tensor

from alula.distill.attention.visibility import Visibility
from alula.ops.dispatch import tl, triton
from alula.ops.select_pages import FIRST, LAST
from alula.ops.top_indices import choose_largest, ordered_bits

WORD = 32
"""Bits per word."""
SCORE_ELEMENTS = 1 << 27
"""Most page scores at a time, over rows, KV heads, queries and pages."""


def pages_read(
    visibility: Visibility, layer: int, query: Tensor, key: Tensor, score_elements: int = SCORE_ELEMENTS
) -> Tensor:
    """int32 [Hkv, words, T] for packed queries [T, Hq, D] and keys [T, Hkv, D] of a selecting layer.

    Bit p % 32 of word p // 32 says whether the token's query reads page p. Prompt queries read all.
    """
    summaries = visibility.summaries(layer, visibility.pad(key).transpose(1, 2))
    assert summaries is not None
    queries = visibility.pad(visibility.score_queries(query, summaries)).transpose(1, 2)
    rows, heads, full = summaries.shape[:3]
    words = query.new_empty(heads, full // WORD + 1, len(query), dtype=torch.int32)
    size = max(1, score_elements // (rows * heads * (full + 1)))
    for first in range(0, visibility.width, size):
        scores = queries[:, :, first : first + size] @ summaries.flatten(3).transpose(-1, -2)
        choose(visibility, scores, first, words)
    return words


def choose(visibility: Visibility, scores: Tensor, first: int, words: Tensor) -> None:
    """Write the words of the queries at positions `first` and on, by their scores fp32 [B, Hkv, C, full]."""
    assert visibility.select is not None
    rows, heads, count, full = scores.shape
    _, words_each, tokens = words.shape
    block = triton.next_power_of_2(WORD * words_each)
    _choose[(count, rows * heads)](
        scores,
        visibility.starts,
        visibility.prompts,
        visibility.budget,
        words,
        first,
        count,
        full,
        visibility.width,
        tokens,
        words_each,
        HEADS=heads,
        PAGE=visibility.select.block,
        BLOCK=block,
        FIRST_PAGES=FIRST,
        LAST_PAGES=LAST,
        num_warps=max(1, min(16, block // 1024)),
    )


@triton.jit(do_not_specialize=["first", "queries", "full", "width", "tokens", "words_each"])
def _choose(
    scores,
    starts,
    prompts,
    budget,
    words,
    first,
    queries,
    full,
    width,
    tokens,
    words_each,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST_PAGES: tl.constexpr,
    LAST_PAGES: tl.constexpr,
):
    """One query of one row and head."""
    query, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, head = line // HEADS, line % HEADS
    at, start = first + query, tl.load(starts + row)
    if at < tl.load(starts + row + 1) - start:
        held = at // PAGE + 1
        count = tl.minimum(tl.load(budget + row * width + at), held)
        i = tl.arange(0, BLOCK)
        chosen = i < held
        if (count < held) & (at >= tl.load(prompts + row)):
            score = tl.load(scores + (line * queries + query) * full + i, mask=chosen & (i < full), other=0.0)
            always = (i < FIRST_PAGES) | (i >= held - LAST_PAGES)
            chosen = choose_largest(ordered_bits(tl.where(always, float("inf"), score)), chosen, count)
        bits = tl.reshape(chosen.to(tl.int32), [BLOCK // 32, 32])
        word = tl.sum(bits << tl.arange(0, 32)[None, :], 1)
        w = tl.arange(0, BLOCK // 32)
        tl.store(words + (head * words_each + w) * tokens + start + at, word, mask=w < words_each)
