"""Reads results back from the device: tokens of sequences, finished rollouts, and records of what a policy saw.

The records are the position at which each token was evicted and the pages that each step read.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alula.engine.block_manager import pages_for
from alula.engine.model_runner import DecodedChunk
from alula.engine.prefill import FirstTokens
from alula.engine.rollout import NEVER, Rollout
from alula.engine.schedule_plan import Chunk, EvictionEvent, Part
from alula.engine.sequence import Sequence
from alula.models.geometry import Geometry


def collect(launched: FirstTokens | DecodedChunk, geometry: Geometry, page: int) -> Iterator[Sequence]:
    """Read results, waiting for them if necessary; yields the sequences that end with them."""
    arrays = launched.results.arrays()
    if isinstance(launched, FirstTokens):
        for i, sequence in enumerate(launched.sequences):
            if sequence.finish is None:
                sequence.tokens, sequence.logprobs, sequence.topk = [], [], []
                sequence.acceptance, sequence.hidden = [], []
                if sequence.request.record:
                    start_history(sequence, geometry)
                if extend(sequence, {name: array[i : i + 1] for name, array in arrays.items()}):
                    yield sequence
        return
    for event, kept in launched.kept:
        record_evictions(event, kept.numpy())
    for part in launched.chunk.parts:
        sequence = part.sequence
        if sequence.finish is None:  # results of a sequence that has already ended are discarded
            before = len(sequence.tokens)
            ended = extend(sequence, {name: a[part.row, : part.steps] for name, a in arrays.items()})
            new_tokens = len(sequence.tokens) - before
            record_selections(part, new_tokens, launched.chunk, launched.selected, page)
            account(part, new_tokens)
            if ended:
                yield sequence


def account(part: Part, new_tokens: int) -> None:
    """Add the new tokens to the KV statistics, segment by segment."""
    for segment in part.segments:
        if new_tokens <= 0:
            break
        steps = min(new_tokens, segment.steps)
        part.sequence.account(segment, steps)
        new_tokens -= steps


def extend(sequence: Sequence, arrays: dict[str, np.ndarray]) -> bool:
    """Append new tokens up to the first that ends the sequence; returns whether one did."""
    request = sequence.request
    tokens, logprobs = arrays["token"].tolist(), arrays["logprob"]
    count = len(tokens)
    room = request.sampling.max_new_tokens - len(sequence.tokens)
    if count >= room:
        count, sequence.finish = room, "length"
    if request.forced is None and not request.stop.isdisjoint(tokens[:count]):
        count, sequence.finish = 1 + next(i for i, token in enumerate(tokens) if token in request.stop), "stop"
    finite = np.isfinite(logprobs[:count])
    if not finite.all():
        count, sequence.finish = int(finite.argmin()), "error"
    sequence.tokens += tokens[:count]
    sequence.logprobs += logprobs[:count].tolist()
    if k := request.sampling.topk_logprobs:
        sequence.topk.append((arrays["topk_id"][:count, :k], arrays["topk_logprob"][:count, :k]))
    if request.teacher:
        sequence.acceptance += arrays["acceptance"][:count].tolist()
    if sequence.keeps_hidden:
        sequence.hidden.append(arrays["hidden"][:count].copy())
    return sequence.finish is not None


def as_rollout(sequence: Sequence, geometry: Geometry, dtype: torch.dtype, tokenizer: Any, version: int) -> Rollout:
    """The rollout of a finished sequence."""
    request = sequence.request
    assert sequence.finish is not None
    text = None
    if tokenizer is not None and request.forced is None:
        text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    rollout = Rollout(
        prompt_ids=request.prompt_ids,
        token_ids=sequence.tokens,
        logprobs=None if request.sampling.filtered else torch.tensor(sequence.logprobs, dtype=torch.float32),
        finish=sequence.finish,
        kv=sequence.finish_accounting(geometry.kv_token_bytes),
        policy_version=version,
        prompt_index=request.prompt_index,
        sample_index=sequence.sample,
        sampling=request.sampling,
        sparsity=request.sparsity,
        text=text,
        selected=sequence.selected or None,
    )
    if sequence.topk:
        rollout.topk_ids = torch.from_numpy(np.concatenate([ids for ids, _ in sequence.topk]))
        rollout.topk_logprobs = torch.from_numpy(np.concatenate([values for _, values in sequence.topk]))
    if sequence.acceptance:
        rollout.acceptance = torch.tensor(sequence.acceptance, dtype=torch.float32)
    if sequence.hidden:
        rollout.hidden = torch.from_numpy(np.concatenate(sequence.hidden)).view(dtype)
    if sequence.history is not None:
        rollout.history = seen_history(sequence)
    return rollout


def start_history(sequence: Sequence, geometry: Geometry) -> None:
    """Begin to record evictions: nothing is evicted, and slot i holds position i."""
    if sequence.evicts:
        length = sequence.prompt_len + sequence.request.sampling.max_new_tokens
        sequence.history = np.full((geometry.layers, geometry.kv_heads, length), NEVER, np.int32)
        sequence.kept_positions = np.broadcast_to(
            np.arange(length, dtype=np.int32), (geometry.layers, geometry.kv_heads, length)
        )


def record_evictions(event: EvictionEvent, kept: np.ndarray) -> None:
    """kept [C, L, Hkv, keep] are slots; `kept_positions` maps them to positions."""
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


def record_selections(part: Part, steps: int, chunk: Chunk, selected: list, page: int) -> None:
    """selected[step][layer] are physical pages and token counts; the row's page table maps them to blocks."""
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
    """The history as the rollout's queries saw it: evictions planned past its end do not count."""
    length = sequence.prompt_len + len(sequence.tokens)
    history = sequence.history[..., :length]
    return torch.from_numpy(np.where(history < length - 1, history, np.int32(NEVER)))
