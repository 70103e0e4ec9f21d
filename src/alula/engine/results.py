"""Reads results back from the device: tokens of sequences, finished rollouts, and records of what a policy saw.

The records are the position at which each token was evicted and the pages that each step read.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alula.engine.block_manager import pages_for
from alula.engine.extension import ExtendedTokens
from alula.engine.model_runner import DecodedChunk
from alula.engine.prefill import FirstTokens
from alula.engine.rollout import NEVER, Rollout, Span
from alula.engine.schedule_plan import Chunk, EvictionEvent, Part
from alula.engine.sequence import Sequence
from alula.engine.stop_strings import answer_text
from alula.models.geometry import Geometry


def collect(launched: FirstTokens | ExtendedTokens | DecodedChunk, geometry: Geometry, page: int) -> Iterator[Sequence]:
    """Read results, waiting for them if necessary; yields the sequences that end with them."""
    arrays = launched.results.arrays()
    if isinstance(launched, FirstTokens):
        for i, sequence in enumerate(launched.sequences):
            if sequence.finish is None and sequence.attempt == launched.attempts[i]:
                if not sequence.fixed:
                    sequence.tokens, sequence.logprobs, sequence.spans, sequence.topk = [], [], [], []
                    sequence.acceptance, sequence.hidden = [], []
                if sequence.request.record:
                    start_history(sequence, geometry)
                if extend(sequence, NewTokens.single(0, i, arrays, launched.version)):
                    yield sequence
        return
    for event, kept in launched.kept:
        record_evictions(event, kept.numpy())
    if isinstance(launched, ExtendedTokens):
        for i, part in enumerate(launched.extension.parts):
            sequence = part.sequence
            if sequence.finish is None and sequence.attempt == part.attempt:
                for segment in part.segments:
                    sequence.account(segment, segment.steps, given=True)
                if sequence.request.record and sequence.request.sparsity.select:
                    sequence.selected += [[None] * geometry.layers for _ in range(part.steps)]
                index = part.position + part.steps - sequence.prompt_len
                if missing := sequence.forced_tokens()[len(sequence.tokens) : index]:
                    append_given(sequence, missing)
                if extend(sequence, NewTokens.single(index, i, arrays, launched.version)):
                    yield sequence
        return
    tokens, logprobs = arrays["token"].tolist(), arrays["logprob"].tolist()
    others = arrays.keys() - {"token", "logprob"}
    for part in launched.chunk.parts:
        sequence = part.sequence
        if sequence.finish is None and sequence.attempt == part.attempt:  # else the results are discarded
            index, steps = part.position - sequence.prompt_len + 1, part.steps
            row = {name: arrays[name][part.row, :steps] for name in others}
            new = NewTokens(index, tokens[part.row][:steps], logprobs[part.row][:steps], launched.version, row)
            ended = extend(sequence, new)
            steps = min(steps, len(sequence.tokens) - index)
            record_selections(part, steps, launched.chunk, launched.selected, page)
            account(part, steps)
            if ended:
                yield sequence


@dataclass(slots=True)
class NewTokens:
    """Tokens of one sequence from `index` on, and what else was recorded of each."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    version: int
    arrays: dict[str, np.ndarray]

    @classmethod
    def single(cls, index: int, row: int, arrays: dict[str, np.ndarray], version: int) -> "NewTokens":
        """The token in row `row` of results that hold one token per sequence."""
        lines = {name: array[row : row + 1] for name, array in arrays.items()}
        return cls(index, lines.pop("token").tolist(), lines.pop("logprob").tolist(), version, lines)


def account(part: Part, steps: int) -> None:
    """Add the steps to the KV statistics, segment by segment."""
    for segment in part.segments:
        if steps <= 0:
            break
        part.sequence.account(segment, min(steps, segment.steps))
        steps -= segment.steps


def extend(sequence: Sequence, new: NewTokens) -> bool:
    """Add tokens up to the first that ends the sequence; returns whether one did.

    Tokens that are known already were forced, because the sequence runs again; they keep what was recorded first.
    """
    request, tokens, logprobs, arrays = sequence.request, new.tokens, new.logprobs, new.arrays
    if known := min(len(sequence.tokens) - new.index, len(tokens)):
        tokens, logprobs = tokens[known:], logprobs[known:]
        arrays = {name: array[known:] for name, array in arrays.items()}
    count = len(tokens)
    room = sequence.turn_start + request.sampling.max_new_tokens - len(sequence.tokens)
    if count >= room:
        count, sequence.finish = room, "length"
    if request.forced is None and not request.stop.isdisjoint(tokens[:count]):
        count, sequence.finish = 1 + next(i for i, token in enumerate(tokens) if token in request.stop), "stop"
    if request.stop_strings:
        turn = sequence.tokens[sequence.turn_start :] if sequence.turn_start else sequence.tokens
        end = request.stop_strings.end(turn, tokens[:count], request.sampling.min_new_tokens)
        if end is not None:
            count, sequence.finish = end, "stop"
    if not math.isfinite(sum(logprobs[:count])):
        count, sequence.finish = next(i for i, value in enumerate(logprobs) if not math.isfinite(value)), "error"
    sequence.tokens += tokens[:count]
    sequence.logprobs += logprobs[:count]
    add_span(sequence, count, new.version)
    if k := request.sampling.topk_logprobs:
        sequence.topk.append((arrays["topk_id"][:count, :k], arrays["topk_logprob"][:count, :k]))
    if request.teacher:
        sequence.acceptance += arrays["acceptance"][:count].tolist()
    if sequence.keeps_hidden:
        sequence.hidden.append(arrays["hidden"][:count].copy())
    return sequence.finish is not None


def add_span(sequence: Sequence, tokens: int, version: int | None) -> None:
    """Note which version sampled the newest tokens; None for given ones."""
    if sequence.spans and sequence.spans[-1].version == version:
        sequence.spans[-1].tokens += tokens
    elif tokens:
        sequence.spans.append(Span(tokens, version))


def give(sequence: Sequence, tokens: list[int], hidden_bytes: int) -> None:
    """Append the given tokens of a session's next turn."""
    first = sequence.prompt_len + len(sequence.tokens) - 1  # the last sampled token, whose KV is not cached yet
    sequence.attempt += 1  # results still to come are those of tokens after the turn's end
    sequence.given.append((first, first + 1 + len(tokens)))
    append_given(sequence, tokens)
    sequence.fixed = len(sequence.tokens)
    if sequence.keeps_hidden:
        sequence.hidden.append(np.zeros((len(tokens), hidden_bytes), np.uint8))
    if sequence.history is not None:
        lengthen_history(sequence)


def append_given(sequence: Sequence, tokens: list[int]) -> None:
    """Append tokens that were given. They have no log-prob; top-k and acceptance are padded."""
    request, count = sequence.request, len(tokens)
    sequence.tokens = sequence.tokens + tokens
    sequence.logprobs = sequence.logprobs + [math.nan] * count
    sequence.spans = [replace(span) for span in sequence.spans]
    add_span(sequence, count, None)
    if request.teacher:
        sequence.acceptance += [math.nan] * count
    if k := request.sampling.topk_logprobs:
        sequence.topk.append((np.zeros((count, k), np.int64), np.full((count, k), math.nan, np.float32)))


def as_rollout(sequence: Sequence, geometry: Geometry, dtype: torch.dtype, tokenizer: Any, version: int) -> Rollout:
    """The rollout of a finished sequence."""
    request = sequence.request
    assert sequence.finish is not None
    text = None
    if tokenizer is not None and request.forced is None:
        text = answer_text(sequence.tokens, sequence.finish, request.stop_strings, tokenizer)
    rollout = Rollout(
        prompt_ids=request.prompt_ids,
        token_ids=sequence.tokens,
        logprobs=None if request.sampling.filtered else torch.tensor(sequence.logprobs, dtype=torch.float32),
        finish=sequence.finish,
        kv=sequence.finish_accounting(geometry.kv_token_bytes),
        policy_version=version,
        spans=sequence.spans,
        request_id=request.id,
        session=sequence.session,
        prompt_index=request.prompt_index,
        sample_index=sequence.sample,
        sampling=request.sampling,
        sparsity=request.sparsity,
        text=text,
        selected=list(sequence.selected) or None,
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
        length = sequence.max_length
        sequence.history = np.full((geometry.layers, geometry.kv_heads, length), NEVER, np.int32)
        sequence.kept_positions = np.broadcast_to(
            np.arange(length, dtype=np.int32), (geometry.layers, geometry.kv_heads, length)
        )


def lengthen_history(sequence: Sequence) -> None:
    """Make room in the records for the next turn."""
    assert sequence.kept_positions is not None
    before, after = sequence.history.shape[-1], sequence.max_length
    if after <= before:
        return
    layout = (*sequence.history.shape[:2], after - before)
    sequence.history = np.concatenate([sequence.history, np.full(layout, NEVER, np.int32)], -1)
    newer = np.broadcast_to(np.arange(before, after, dtype=np.int32), layout)
    sequence.kept_positions = np.concatenate([sequence.kept_positions, newer], -1)


def record_evictions(event: EvictionEvent, kept: np.ndarray) -> None:
    """kept [C, L, Hkv, keep] are slots; `kept_positions` maps them to positions."""
    for i, sequence in enumerate(event.sequences):
        if sequence.history is None or sequence.finish is not None or sequence.attempt != event.attempts[i]:
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
