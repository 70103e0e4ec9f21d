"""Records of what a sparse policy saw: when each token was evicted, which pages were read."""

import numpy as np
import torch
from torch import Tensor

from alula.engine.cache import Shape
from alula.engine.pages import pages_for
from alula.engine.rollout import NEVER
from alula.engine.scheduler import Chunk, Event, Part
from alula.engine.sequence import Sequence


def start_history(sequence: Sequence, shape: Shape) -> None:
    if sequence.evicts:
        length = sequence.prompt + sequence.request.sampling.max_new_tokens
        sequence.history = np.full((shape.layers, shape.kv_heads, length), NEVER, np.int32)
        sequence.kept_positions = np.broadcast_to(
            np.arange(length, dtype=np.int32), (shape.layers, shape.kv_heads, length)
        )


def note_evictions(event: Event, kept: np.ndarray) -> None:
    """kept [C, L, Hkv, keep] are slots; the sequence's own table turns them into positions."""
    for i, sequence in enumerate(event.sequences):
        if sequence.history is None or sequence.finish is not None:
            continue
        positions = sequence.kept_positions
        assert positions is not None
        stay = np.zeros((*positions.shape[:2], event.n), bool)
        np.put_along_axis(stay, kept[i].astype(np.int64), True, -1)
        layer, head, slot = np.nonzero(~stay)
        sequence.history[layer, head, positions[layer, head, slot]] = event.positions[i]
        held = np.take_along_axis(positions[..., : event.n], kept[i].astype(np.int64), -1)
        newer = np.arange(event.positions[i], sequence.history.shape[-1], dtype=np.int32)
        newer = np.broadcast_to(newer, (*held.shape[:2], len(newer)))
        sequence.kept_positions = np.concatenate([held, newer], -1)


def note_selections(part: Part, steps: int, chunk: Chunk, selected: list, page: int) -> None:
    """selected[step][layer] are physical pages and tokens; the row's table at that step turns them into blocks."""
    sequence = part.sequence
    if not (sequence.request.record and sequence.request.sparsity.select):
        return
    table = chunk.table[part.row].tolist()
    moved = {e.step: e.new[e.rows.index(part.row)] for e in chunk.events if part.row in e.rows}
    for step, layers in enumerate(selected[:steps]):
        table = moved.get(step, table)
        block = {p: i for i, p in enumerate(table) if p}
        read: list[Tensor | None] = []
        for layer in layers:
            if layer is None:
                read.append(None)
                continue
            pages, tokens = layer[0][part.row], int(layer[1][part.row, 0])
            heads = pages[:, : pages_for(tokens, page)].tolist()
            read.append(torch.tensor([[block[p] for p in head] for head in heads], dtype=torch.int32))
        sequence.selected.append(read)


def seen_history(sequence: Sequence) -> Tensor:
    """What the rollout's own queries saw: evictions planned past its end are none."""
    length = sequence.prompt + len(sequence.tokens)
    history = sequence.history[..., :length]
    return torch.from_numpy(np.where(history < length - 1, history, np.int32(NEVER)))
