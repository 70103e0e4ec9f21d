"""Extension: given tokens are appended to running sequences (the next turn of a session), many in one pass.

The result is that of forced decoding: passes are split at every eviction, and queries and attention sums run over the
given tokens. Under a selector given tokens read all that is held, as a prompt does.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alula.engine.attention import ExtendContext
from alula.engine.batch_state import BatchFeatures, BatchState, PendingResults, to_device, to_host
from alula.engine.eviction import upload_tables
from alula.engine.model_runner import ModelRunner
from alula.engine.prefill import KVSpan, cache_spans, end_stopped, packed, sample_next
from alula.engine.schedule_plan import EvictionEvent, Extension, Piece
from alula.engine.sequence import Sequence


@dataclass
class ExtendedTokens:
    """Results of an extension: the next token of every sequence."""

    extension: Extension
    version: int
    results: PendingResults
    kept: list[tuple[EvictionEvent, Tensor]]
    """Slots kept by each recorded eviction."""


@torch.inference_mode()
def extend(runner: ModelRunner, extension: Extension, version: int = 0) -> ExtendedTokens:
    """Write the KV of the given tokens, with the evictions that are due, and sample the token that follows them."""
    state = runner.batches[extension.kind]
    rows = to_device(np.asarray([part.row for part in extension.parts], np.int64), runner.device)
    hidden = torch.empty(len(extension.parts), runner.model.config.hidden_size, dtype=state.dtype, device=runner.device)
    state.upload_settings()
    kept = []
    for events, pieces in extension.rounds:
        for event, table in zip(events, upload_tables(events, runner.device)):
            state.position[table[:, 0]] = to_device(np.asarray(event.positions, np.int32), runner.device)
            slots = runner.evict(state, event, table)
            if any(s.request.record for s in event.sequences):
                kept.append((event, to_host(slots)))
        if pieces:
            last = _run(runner, state, pieces)
            ending = [i for i, piece in enumerate(pieces) if piece.last]
            places = [extension.parts.index(pieces[i].part) for i in ending]
            hidden[to_device(np.asarray(places, np.int64), runner.device)] = last[ending]
    sequences: list[Sequence] = [part.sequence for part in extension.parts]
    positions = [part.position + part.steps for part in extension.parts]
    features = BatchFeatures.of(sequences)
    token, results = sample_next(runner, sequences, positions, hidden, list(range(len(sequences))), features)
    state.token[rows] = token
    end_stopped(state, sequences, rows)
    return ExtendedTokens(extension, version, results, kept)


def _run(runner: ModelRunner, state: BatchState, pieces: list[Piece]) -> Tensor:
    """Hidden states [pieces, width] of the last token of each piece."""
    cache, device = runner.cache, runner.device
    starts = [piece.segment.kv_len for piece in pieces]
    spans = [KVSpan(p.segment.pages, start, start + len(p.tokens)) for p, start in zip(pieces, starts)]
    context = ExtendContext(**cache_spans(cache, spans))
    sequences = [piece.part.sequence for piece in pieces]
    if state.features.ring:
        first, kept = 0, []
        for piece, sequence in zip(pieces, sequences):
            evictor, count = sequence.request.evictor, len(piece.tokens)
            queries = evictor.queries if evictor else 0
            for i in range(max(0, count - queries), count):
                kept.append((first + i, piece.part.row, (piece.segment.position + i) % queries))
            first += count
        table = np.asarray(kept, np.int64).reshape(-1, 3)
        context.ring = state.ring
        context.ring_token, context.ring_row, context.ring_entry = (to_device(table[:, i], device) for i in range(3))
    if state.features.accumulated:
        context.attention_sums = [
            state.accumulated[:, piece.part.row] if s.request.evictor and s.request.evictor.accumulates else None  # type: ignore[index]
            for piece, s in zip(pieces, sequences)
        ]
    ids, positions = packed([p.tokens for p in pieces], device, [p.segment.position for p in pieces])
    hidden = runner.forward(ids, positions, context, state.kind.adapted)
    if state.kind.selector is not None:
        page = cache.page
        full = [p for span in spans for p in span.pages[span.start // page : span.stop // page]]
        cache.summarise(state.kind.selector, to_device(np.asarray(full, np.int64), device))
    return hidden[(context.cu_seqlens[1:] - 1).long()]
