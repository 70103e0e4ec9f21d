"""An eviction on the device: score the cached keys, choose, copy the kept tokens into new pages."""

import numpy as np
import torch
from torch import Tensor

from alula.engine.batch_state import BatchState, to_device
from alula.engine.block_manager import pages_for
from alula.engine.kv_cache import KVCache
from alula.engine.schedule_plan import EvictionEvent
from alula.engine.sequence import Sequence
from alula.ops.compact import compact, install
from alula.sparsity.evict import keep
from alula.sparsity.evict.base import Cached

SCORING_BYTES = 1 << 30
"""Keys are gathered and scored in chunks of at most this many bytes."""

MOST_CAPTURED_ROWS, MOST_CAPTURED_BYTES = 16, 1 << 27
"""Sequences of a captured eviction, and bytes of their keys: the graphs keep this memory."""


def upload_tables(events: list[EvictionEvent], device: torch.device) -> list[Tensor]:
    """Per event int32 [C, 1 + old + new]: batch row, pages to read, pages to write. One copy for all events."""
    if not events:
        return []
    tables = [
        np.concatenate([np.asarray(event.rows, np.int32)[:, None], page_table(event.old), page_table(event.new)], 1)
        for event in events
    ]
    parts = to_device(np.concatenate([table.ravel() for table in tables]), device).split([t.size for t in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables)]


@torch.inference_mode()
def evict(cache: KVCache, state: BatchState, event: EvictionEvent, table: Tensor) -> Tensor:
    """Score, choose and compact, given the event's table; returns the kept slots int32 [C, L, Hkv, keep]."""
    rows_per_chunk = max(1, SCORING_BYTES // row_bytes(cache, event))
    kept = [_evict_rows(cache, state, event, part) for part in table.split(rows_per_chunk)]
    return kept[0] if len(kept) == 1 else torch.cat(kept)


def row_bytes(cache: KVCache, event: EvictionEvent) -> int:
    """Bytes of the keys that an eviction scores, per sequence."""
    geometry = cache.geometry
    return event.n * geometry.layers * geometry.kv_heads * geometry.vector_bytes


def captured_rows(cache: KVCache, event: EvictionEvent) -> int:
    """The number of sequences, a power of two, for which an eviction like this one is captured as a graph; 0 if it is
    not. Large evictions do not wait for their launches. Protected prompts, and the first eviction of prompts longer
    than budget + buffer, would need a graph for each length, statistics of queries one for each version of the
    weights."""
    request, rows = event.sequences[0].request, 1 << (len(event.rows) - 1).bit_length()
    policy, evictor = request.sparsity.evict, request.evictor
    assert policy is not None
    assert evictor is not None
    small = rows <= MOST_CAPTURED_ROWS and rows * row_bytes(cache, event) <= MOST_CAPTURED_BYTES
    recurring = event.n == event.keep + policy.buffer and not policy.protect_prompt
    return rows if small and recurring and not evictor.calibrated else 0


@torch.inference_mode()
def compile_eviction(cache: KVCache, state: BatchState, sequence: Sequence) -> None:
    """Launch the kernels of a sequence's evictions once on the scratch page, which compiles them. No row changes."""
    evict, keep = sequence.request.sparsity.evict, sequence.max_kept()
    assert evict is not None
    old, new = ([[0] * pages_for(tokens, cache.page)] for tokens in (keep + evict.buffer, keep))
    event = EvictionEvent(0, [sequence], keep + evict.buffer, keep, old, new, rows=[0])
    table = upload_tables([event], cache.device)[0]
    row, old_pages, new_pages = _columns(event, table)
    kept, _ = _choose(cache, state, event, row, old_pages)
    _move(cache, state, event, kept, old_pages, new_pages)
    install(torch.zeros_like(state.table), torch.zeros_like(state.kv_len), row, new_pages, keep)


def _evict_rows(cache: KVCache, state: BatchState, event: EvictionEvent, table: Tensor) -> Tensor:
    geometry = cache.geometry
    row, old_pages, new_pages = _columns(event, table)
    kept, attention_sums = _choose(cache, state, event, row, old_pages)
    _move(cache, state, event, kept, old_pages, new_pages)
    if attention_sums is not None:
        moved = attention_sums.view(len(row), geometry.layers, geometry.kv_heads, -1).gather(3, kept.long())
        state.accumulated.index_fill_(1, row.long(), 0)  # type: ignore[union-attr]
        state.accumulated[:, row, :, : event.keep] = moved.transpose(0, 1)  # type: ignore[index]
    install(state.table, state.kv_len, row, new_pages, event.keep)
    return kept


def _move(
    cache: KVCache, state: BatchState, event: EvictionEvent, kept: Tensor, old_pages: Tensor, new_pages: Tensor
) -> None:
    """Copy the kept tokens into their new pages, with these pages' summaries."""
    compact(cache.keys, cache.values, kept, old_pages, new_pages, cache.scales)
    if state.kind.selector is not None:
        cache.summarise(state.kind.selector, new_pages[:, : event.keep // cache.page].flatten().long())


def _columns(event: EvictionEvent, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Batch rows [C], pages to read and pages to write [C, pages] of an event's table."""
    read = 1 + max(map(len, event.old))
    return table[:, 0], table[:, 1:read], table[:, read:]


def _choose(
    cache: KVCache, state: BatchState, event: EvictionEvent, row: Tensor, old_pages: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The slots to keep int32 [C, L, Hkv, keep], and the attention sums that chose them, if they did."""
    geometry = cache.geometry
    request = event.sequences[0].request
    settings, evictor = request.sparsity.evict, request.evictor
    assert settings is not None
    assert evictor is not None
    queries = attention_sums = None
    if evictor.queries:
        queries = rows_of(state.ring[:, :, :, : evictor.queries], row)  # type: ignore[index]
    if evictor.accumulates:
        attention_sums = rows_of(state.accumulated[..., : event.n], row)  # type: ignore[index]
    protected = event.sequences[0].prompt_len if settings.protect_prompt else 0
    kv = Cached(
        paged=cache.paged(0, old_pages, event.n),
        values=cache.paged(1, old_pages, event.n),
        queries=queries,
        attention=attention_sums,
        scaling=cache.scaling,
        row_keys=state.key[row].repeat_interleave(geometry.layers) if evictor.seeded else None,
        position=state.position[row].long().repeat_interleave(geometry.layers)
        if evictor.seeded or evictor.calibrated
        else None,
        statistics=cache.query_statistics if evictor.calibrated else None,
        keep=event.keep,
        sinks=settings.sinks,
        protected=protected,
    )
    kept = keep(evictor.score(kv), count=event.keep, sinks=settings.sinks, window=settings.window, protected=protected)
    return kept.view(len(row), geometry.layers, geometry.kv_heads, event.keep), attention_sums


def rows_of(state: Tensor, row: Tensor) -> Tensor:
    """[L, rows, ...] -> [C·L, ...]: the entries of the rows `row` [C], in one launch."""
    return state.transpose(0, 1).index_select(0, row).flatten(0, 1)


def page_table(pages: list[list[int]]) -> np.ndarray:
    """int32 [C, widest], padded with the scratch page."""
    table = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for line, row_pages in zip(table, pages):
        line[: len(row_pages)] = row_pages
    return table
