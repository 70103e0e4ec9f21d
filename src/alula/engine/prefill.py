"""Prefill: the packed forward pass of prompts, the first token of every rollout, and the start of rollouts in rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alula.engine.attention import PrefillContext
from alula.engine.batch_state import BatchFeatures, BatchState, PendingResults, to_device
from alula.engine.kv_cache import KVCache
from alula.engine.model_runner import LOGITS_BYTES, ModelRunner
from alula.engine.schedule_plan import Prefill, Start
from alula.engine.sequence import Prefilled, PrefillOutput, Sequence
from alula.ops.sample import proposal_logits, sample, top_logprobs
from alula.ops.sequence_attention import one_by_one
from alula.sparsity.footprint import UNLIMITED


@dataclass
class FirstTokens:
    """Results of a prefill: the first token of every rollout of its prompts."""

    sequences: list[Sequence]
    attempts: list[int]
    version: int
    results: PendingResults


@torch.inference_mode()
def forward_packed(runner: ModelRunner, sequences: list[list[int]]) -> Tensor:
    """Dense hidden states of complete sequences, packed; nothing is cached."""
    lengths, cache = [len(s) for s in sequences], runner.cache
    alone = one_by_one(lengths, cache.geometry.head_dim, cache.dtype, cache.device)
    context = PrefillContext(cache, *boundaries(lengths, cache.device), alone)
    return runner.forward(*packed(sequences, runner.device), context)


@torch.inference_mode()
def prefill(runner: ModelRunner, groups: list[Prefill], version: int = 0) -> FirstTokens:
    """Write the prompts' KV and sample the first token of every rollout that waits for them.

    All prompts use the same weights. Leading tokens whose KV is cached already are not computed again.
    """
    features = BatchFeatures.of(group.sequences[0] for group in groups)
    context = _context(runner, groups, features)
    computed = [group.request.prompt_ids[group.cached :] for group in groups]
    ids, positions = packed(computed, runner.device, [group.cached for group in groups])
    hidden = runner.forward(ids, positions, context, groups[0].request.kind.adapted)
    for selector in {group.request.kind.selector for group in groups} - {None}:
        full = [
            page
            for group in groups
            if group.request.kind.selector == selector
            for page in group.pages[: len(group.request.prompt_ids) // runner.cache.page]
        ]
        runner.cache.summarise(selector, to_device(np.asarray(full, np.int64), runner.device))  # type: ignore[arg-type]
    last = hidden[(context.cu_seqlens[1:] - 1).long()]
    sequences = [s for group in groups for s in group.sequences]
    index = [i for i, group in enumerate(groups) for _ in group.sequences]
    token, results = sample_next(runner, sequences, [s.prompt_len for s in sequences], last, index, features)
    output = PrefillOutput(token, context.rings, context.attention_sums)
    for i, (sequence, group) in enumerate(zip(sequences, index)):
        sequence.prefilled = Prefilled(output, i, group)
    return FirstTokens(sequences, [s.attempt for s in sequences], version, results)


def _context(runner: ModelRunner, groups: list[Prefill], features: BatchFeatures) -> PrefillContext:
    cache, device = runner.cache, runner.device
    geometry = cache.geometry
    spans = [KVSpan(g.pages, g.cached, len(g.request.prompt_ids)) for g in groups]
    context = PrefillContext(**cache_spans(cache, spans))
    if features.ring:
        starts = np.cumsum([0, *context.lengths[:-1]])
        context.ring_index = to_device(ring_index(groups, starts, features.ring), device)
        layout = (geometry.layers, len(groups), geometry.query_heads, features.ring, geometry.head_dim)
        context.rings = torch.empty(layout, dtype=cache.dtype, device=device)
    if features.accumulated:
        context.attention_sums = [
            torch.empty(geometry.layers, geometry.kv_heads, n, device=device) if accumulates(g) else None
            for g, n in zip(groups, context.lengths)
        ]
    return context


@dataclass
class KVSpan:
    """Tokens computed in one pass: they fill the slots `start` .. `stop`-1 of their sequence's pages."""

    pages: list[int]
    start: int
    stop: int


def cache_spans(cache: KVCache, spans: list[KVSpan]) -> dict[str, Any]:
    """Arguments of a `PrefillContext` for tokens that fill these slots and attend to all slots before them."""
    page, device = cache.page, cache.device
    lengths = [span.stop - span.start for span in spans]
    slots = [np.arange(span.stop) for span in spans]
    pages = [np.asarray(span.pages, np.int64)[slot // page] for span, slot in zip(spans, slots)]
    cu_seqlens, longest = boundaries(lengths, device)
    arguments: dict[str, Any] = {
        "cache": cache,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": longest,
        "page": to_device(np.concatenate([p[span.start :] for p, span in zip(pages, spans)]), device),
        "slot": to_device(np.concatenate([s[span.start :] for s, span in zip(slots, spans)]) % page, device),
        "lengths": lengths,
    }
    if any(span.start for span in spans):
        stops = [span.stop for span in spans]
        cu_seqlens_k, longest_k = boundaries(stops, device)
        arguments |= {
            "keys_page": to_device(np.concatenate(pages), device),
            "keys_slot": to_device(np.concatenate(slots) % page, device),
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_k": longest_k,
            "key_lengths": stops,
        }
    else:
        arguments["one_by_one"] = one_by_one(lengths, cache.geometry.head_dim, cache.dtype, device)
    return arguments


def sample_next(
    runner: ModelRunner,
    sequences: list[Sequence],
    positions: list[int],
    hidden: Tensor,
    index: list[int],
    features: BatchFeatures,
) -> tuple[Tensor, PendingResults]:
    """Sample the token at position `positions[i]` of every sequence from the hidden state `hidden[index[i]]`. Many
    rollouts of few prompts are sampled in parts, since each takes a row of logits."""
    logits = runner.logits(hidden)
    together = max(1, LOGITS_BYTES // (4 * logits.shape[1]))
    parts = [
        _sample_next(runner, sequences[part], positions[part], hidden, logits, index[part], features)
        for part in (slice(first, first + together) for first in range(0, len(sequences), together))
    ]
    arrays = parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return arrays["token"], PendingResults(arrays)


def _sample_next(
    runner: ModelRunner,
    sequences: list[Sequence],
    positions: list[int],
    hidden: Tensor,
    logits: Tensor,
    index: list[int],
    features: BatchFeatures,
) -> dict[str, Tensor]:
    samplings = [s.request.sampling for s in sequences]

    def column(values: list, dtype: type) -> Tensor:
        return to_device(np.asarray(values, dtype), runner.device)

    rows = column(index, np.int64)
    hidden, logits = hidden[rows], logits[rows]
    temperature = column([s.temperature for s in samplings], np.float32)
    proposal = None
    if features.proposal:
        banned = np.full((len(sequences), features.banned), -1, np.int64)
        for i, s in enumerate(sequences):
            if s.request.sampling.min_new_tokens:
                banned[i, : len(s.request.stop)] = sorted(s.request.stop)
        top_p = column([s.top_p for s in samplings], np.float32)
        top_k = column([min(s.top_k, UNLIMITED) for s in samplings], np.int64)
        proposal = proposal_logits(logits, temperature, top_p, top_k, to_device(banned, runner.device))
    done = [position - s.prompt_len for s, position in zip(sequences, positions)]
    token, logprob = sample(
        logits,
        temperature,
        key=column([s.key for s in sequences], np.int64),
        position=column(positions, np.int64),
        forced=column([next(iter(s.forced_tokens()[i : i + 1]), -1) for s, i in zip(sequences, done)], np.int64),
        proposal=proposal,
    )
    arrays = {"token": token, "logprob": logprob}
    if features.topk:
        top, ids = top_logprobs(logits, temperature, features.topk)
        arrays |= {"topk_id": ids, "topk_logprob": top}
    if features.teacher:
        taught = [i for i, s in enumerate(sequences) if s.request.teacher]
        teachers = [sequences[i].request.teacher for i in taught]
        dense = hidden.clone()
        dense[column(taught, np.int64)] = runner.teacher_hidden(
            teachers,  # type: ignore[arg-type]
            [done[i] for i in taught],
            [1] * len(taught),
        )
        arrays["acceptance"] = runner.acceptance(dense, logits, temperature)
    if features.hidden:
        arrays["hidden"] = hidden.view(torch.uint8)
    return arrays


@torch.inference_mode()
def start_rows(runner: ModelRunner, starts: list[Start]) -> None:
    """Put rollouts into their rows: last prompt page, first token, recent queries, attention sums."""
    cache, device = runner.cache, runner.device
    copies = np.asarray([s.copy for s in starts if s.copy], np.int64).reshape(-1, 2)
    if len(copies):
        cache.copy_pages(to_device(copies[:, 0], device), to_device(copies[:, 1], device))
    same: dict[tuple, list[Sequence]] = {}
    for start in starts:
        assert start.sequence.prefilled is not None
        same.setdefault((start.sequence.request.kind, id(start.sequence.prefilled.output)), []).append(start.sequence)
    for (kind, _), sequences in same.items():
        state = runner.batches[kind]
        prefilled = [s.prefilled for s in sequences if s.prefilled is not None]
        output = prefilled[0].output
        table = np.asarray([(s.row, p.rollout, p.prompt) for s, p in zip(sequences, prefilled)], np.int64)
        row, drawn, prompt = (to_device(table[:, i], device) for i in range(3))
        state.token[row] = output.token[drawn]
        end_stopped(state, sequences, row)
        if output.rings is not None and state.ring is not None:
            width = min(output.rings.shape[3], state.ring.shape[3])
            state.ring[:, row, :, :width] = output.rings[:, prompt, :, :width]
        for s, p in zip(sequences, prefilled):
            assert s.row is not None
            state.enter(s, s.row, cache.page)
            sums = None if output.attention_sums is None else output.attention_sums[p.prompt]
            if sums is not None:
                state.set_sums(s.row, sums)  # type: ignore[arg-type]
            s.prefilled = None


def end_stopped(state: BatchState, sequences: list[Sequence], rows: Tensor) -> None:
    """Let the rows of sessions end whose newest token was sampled and is a stop token."""
    state.ended.index_fill_(0, rows, 0)  # `ended[rows] = 0` would copy the 0 to the device, and wait
    if state.features.stops:
        stop = np.full((len(sequences), state.features.stops), -1, np.int64)
        for line, s in zip(stop, sequences):
            if s.request.session and s.position - s.prompt_len >= len(s.forced_tokens()):
                line[: len(s.request.stop)] = sorted(s.request.stop)
        state.ended[rows] = (state.token[rows][:, None] == to_device(stop, state.device)).any(1).int()


def boundaries(lengths: list[int], device: torch.device) -> tuple[Tensor, int]:
    """cu_seqlens int32 [G + 1] and the longest length."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return to_device(ends, device), max(lengths)


def packed(sequences: list[list[int]], device: torch.device, starts: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Token ids and positions, one sequence after another; each begins at its position in `starts`."""
    ids = np.concatenate([np.asarray(s, np.int64) for s in sequences])
    positions = np.concatenate([np.arange(n, n + len(s)) for s, n in zip(sequences, starts or [0] * len(sequences))])
    return to_device(ids, device), to_device(positions, device)


def accumulates(group: Prefill) -> bool:
    return group.request.evictor is not None and group.request.evictor.accumulates


def ring_index(groups: list[Prefill], starts: np.ndarray, size: int) -> np.ndarray:
    """[G, size]: the packed token whose query each entry of a prompt's ring holds; entry = position % queries kept."""
    index = np.repeat(starts[:, None], size, 1).astype(np.int64)
    for line, group, start in zip(index, groups, starts):
        queries = group.request.evictor.queries if group.request.evictor else 0
        length = len(group.request.prompt_ids)
        for position in range(max(0, length - queries), length):
            line[position % queries] = start + position - group.cached
    return index
