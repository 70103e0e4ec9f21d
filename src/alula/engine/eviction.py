"""One eviction on the device: score the cached keys, choose, copy what stays into fresh pages."""

import numpy as np
import torch
from torch import Tensor

from alula.engine.batch_state import Rows, on_device
from alula.engine.kv_cache import Cache
from alula.engine.scheduler import Event
from alula.ops.compact import PagedKeys, compact, install
from alula.sparsity.evict import build, keep
from alula.sparsity.evict.base import Cached

SCORING_BYTES = 1 << 30
"""Most bytes of gathered keys at a time."""


def upload(events: list[Event], device: torch.device) -> list[Tensor]:
    """For each event int32 [C, 1 + old + new]: batch row, pages to read, pages to write. All in one copy."""
    if not events:
        return []
    tables = [
        np.concatenate([np.asarray(event.rows, np.int32)[:, None], table_of(event.old), table_of(event.new)], 1)
        for event in events
    ]
    parts = on_device(np.concatenate([table.ravel() for table in tables]), device).split([t.size for t in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables)]


@torch.inference_mode()
def evict(cache: Cache, rows: Rows, event: Event, table: Tensor) -> Tensor:
    """Score, choose and compact, given what `upload` brought; returns the kept slots int32 [C, L, Hkv, keep]."""
    each = event.n * cache.geometry.kv_token_bytes // 2
    together = max(1, SCORING_BYTES // each)
    kept = [_evict_rows(cache, rows, event, part) for part in table.split(together)]
    return kept[0] if len(kept) == 1 else torch.cat(kept)


def _evict_rows(cache: Cache, rows: Rows, event: Event, table: Tensor) -> Tensor:
    geometry = cache.geometry
    settings = event.sequences[0].request.sparsity.evict
    assert settings is not None
    evictor = build(settings)
    read = 1 + max(map(len, event.old))
    row, old_pages, new_pages = table[:, 0], table[:, 1:read], table[:, read:]
    queries = attention_sums = None
    if evictor.queries:
        queries = of_rows(cache.ring[:, :, :, : evictor.queries], row)  # type: ignore[index]
    if evictor.accumulates:
        attention_sums = of_rows(cache.accumulated[..., : event.n], row)  # type: ignore[index]
    kv = Cached(
        paged=PagedKeys(cache.keys, old_pages, event.n),
        queries=queries,
        attention=attention_sums,
        scaling=cache.scaling,
        row_keys=rows.key[row].repeat_interleave(geometry.layers) if evictor.seeded else None,
        position=rows.position[row].long().repeat_interleave(geometry.layers) if evictor.seeded else None,
    )
    protected = event.sequences[0].prompt if settings.protect_prompt else 0
    kept = keep(evictor.score(kv), count=event.keep, sinks=settings.sinks, window=settings.window, protected=protected)
    kept = kept.view(len(row), geometry.layers, geometry.kv_heads, event.keep)
    compact(cache.keys, cache.values, kept, old_pages, new_pages)
    if any(sequence.request.sparsity.select for sequence in event.sequences):
        cache.summarise(new_pages[:, : event.keep // cache.page].flatten().long())
    if attention_sums is not None:
        moved = attention_sums.view(len(row), geometry.layers, geometry.kv_heads, -1).gather(3, kept.long())
        cache.accumulated[:, row] = 0  # type: ignore[index]
        cache.accumulated[:, row, :, : event.keep] = moved.transpose(0, 1)  # type: ignore[index]
    install(rows.table, rows.kv_len, row, new_pages, event.keep)
    return kept


def of_rows(state: Tensor, row: Tensor) -> Tensor:
    """[L, rows, ...] -> [C·L, ...]: what is kept beside the KV of some rows, in one launch."""
    return state.transpose(0, 1).index_select(0, row).flatten(0, 1)


def table_of(pages: list[list[int]]) -> np.ndarray:
    table = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for line, found in zip(table, pages):
        line[: len(found)] = found
    return table
