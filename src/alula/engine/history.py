"""Records of what a sparse policy saw: when each token was evicted, which pages were read."""

import numpy as np

from alula.engine.cache import Shape
from alula.engine.rollout import NEVER
from alula.engine.scheduler import Event
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


def note_selections(sequence: Sequence, row: int, steps: int, selected: list) -> None:
    """Per decode step and layer: the (pages, tokens) each KV head read, or None where the layer reads all."""
    if sequence.request.record and sequence.request.sparsity.select:
        for step in selected[:steps]:
            sequence.selected.append(
                [None if layer is None else (layer[0][row].clone(), layer[1][row].clone()) for layer in step]
            )
