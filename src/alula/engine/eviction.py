"""One eviction on the device: score the cached keys, choose, copy what stays into fresh pages."""

import numpy as np
import torch
from torch import Tensor

from alula.engine.cache import Cache
from alula.engine.rows import Rows
from alula.engine.scheduler import Event
from alula.engine.transfer import on_device
from alula.ops.compact import compact, gather_keys, install
from alula.sparsity.evict import build, keep
from alula.sparsity.evict.base import Cached

SCORING_BYTES = 1 << 30
"""Most bytes of gathered keys at a time."""


@torch.inference_mode()
def evict(cache: Cache, rows: Rows, event: Event) -> Tensor:
    """Score, choose and compact; returns the kept slots int32 [C, L, Hkv, keep]."""
    each = event.n * cache.shape.token_bytes // 2
    together = max(1, SCORING_BYTES // each)
    kept = [_evict_rows(cache, rows, event, i, i + together) for i in range(0, len(event.rows), together)]
    return kept[0] if len(kept) == 1 else torch.cat(kept)


def _evict_rows(cache: Cache, rows: Rows, event: Event, first: int, last: int) -> Tensor:
    shape = cache.shape
    settings = event.sequences[0].request.sparsity.evict
    assert settings is not None
    evictor = build(settings)
    old, new = (table_of(pages[first:last]) for pages in (event.old, event.new))
    index = np.asarray(event.rows[first:last], np.int32)[:, None]
    upload = on_device(np.concatenate([index, old, new], 1), cache.device)
    row = upload[:, 0]
    old_pages, new_pages = upload[:, 1 : 1 + old.shape[1]], upload[:, 1 + old.shape[1] :]
    queries = attention_sums = None
    if evictor.queries:
        queries = of_rows(cache.ring[:, :, :, : evictor.queries], row)  # type: ignore[index]
    if evictor.accumulates:
        attention_sums = of_rows(cache.accumulated[..., : event.n], row)  # type: ignore[index]
    kv = Cached(
        keys=gather_keys(cache.keys, old_pages, event.n).flatten(0, 1),
        queries=queries,
        attention=attention_sums,
        scaling=shape.scaling,
        layers=shape.layers,
        row_keys=rows.key[row].repeat_interleave(shape.layers) if evictor.seeded else None,
        position=rows.position[row].long().repeat_interleave(shape.layers) if evictor.seeded else None,
    )
    protected = event.sequences[0].prompt if settings.protect_prompt else 0
    kept = keep(evictor.score(kv), count=event.keep, sinks=settings.sinks, window=settings.window, protected=protected)
    kept = kept.view(len(row), shape.layers, shape.kv_heads, event.keep)
    compact(cache.keys, cache.values, kept, old_pages, new_pages)
    if cache.summaries is not None:
        cache.summarise(new_pages[:, : event.keep // cache.page].flatten().long())
    if attention_sums is not None:
        moved = attention_sums.view(len(row), shape.layers, shape.kv_heads, -1).gather(3, kept.long())
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
