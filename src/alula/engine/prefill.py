"""Prefill: the packed forward pass of prompts, the first token of every rollout, and the start of rollouts in rows."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alula.engine.attention import PrefillContext
from alula.engine.batch_state import BatchFeatures, PendingResults, to_device
from alula.engine.model_runner import ModelRunner
from alula.engine.schedule_plan import Prefill, Start
from alula.engine.sequence import PrefillOutput, Sequence
from alula.ops.sample import proposal_logits, sample


@dataclass
class FirstTokens:
    """Results of a prefill: the first token of every rollout of its prompts."""

    sequences: list[Sequence]
    results: PendingResults


@torch.inference_mode()
def forward_packed(runner: ModelRunner, sequences: list[list[int]]) -> Tensor:
    """Dense hidden states of complete sequences, packed; nothing is cached."""
    context = PrefillContext(runner.cache, *boundaries(sequences, runner.device))
    return runner.forward(*packed(sequences, runner.device), context)


@torch.inference_mode()
def prefill(runner: ModelRunner, groups: list[Prefill], features: BatchFeatures) -> FirstTokens:
    """Write the prompts' KV and sample the first token of every rollout that waits for them."""
    prompts = [group.request.prompt_ids for group in groups]
    context = _context(runner, groups, features)
    hidden = runner.forward(*packed(prompts, runner.device), context, features.adapted)
    if features.selector:
        page = runner.cache.page
        full = [p for group, ids in zip(groups, prompts) for p in group.pages[: len(ids) // page]]
        runner.cache.summarise(to_device(np.asarray(full, np.int64), runner.device))
    return _sample_first(runner, groups, context, hidden[(context.cu_seqlens[1:] - 1).long()], features)


def _context(runner: ModelRunner, groups: list[Prefill], features: BatchFeatures) -> PrefillContext:
    cache, device = runner.cache, runner.device
    page, geometry = cache.page, cache.geometry
    prompts = [group.request.prompt_ids for group in groups]
    lengths = [len(ids) for ids in prompts]
    positions = np.concatenate([np.arange(n) for n in lengths])
    pages = np.concatenate([np.repeat(g.pages, page)[:n] for g, n in zip(groups, lengths)]).astype(np.int64)
    context = PrefillContext(
        cache,
        *boundaries(prompts, device),
        page=to_device(pages, device),
        slot=to_device(positions % page, device),
        lengths=lengths,
    )
    if features.ring:
        starts = np.cumsum([0, *lengths[:-1]])
        context.ring_index = to_device(ring_index(groups, starts, features.ring), device)
        layout = (geometry.layers, len(groups), geometry.query_heads, features.ring, geometry.head_dim)
        context.rings = torch.empty(layout, dtype=cache.dtype, device=device)
    if features.accumulates:
        context.attention_sums = [
            torch.empty(geometry.layers, geometry.kv_heads, n, device=device) if accumulates(g) else None
            for g, n in zip(groups, lengths)
        ]
    return context


def _sample_first(
    runner: ModelRunner, groups: list[Prefill], context: PrefillContext, hidden: Tensor, features: BatchFeatures
) -> FirstTokens:
    """Sample one token per rollout from the hidden states [G, width] at the prompts' ends."""
    sequences = [s for g in groups for s in g.sequences]
    samplings = [s.request.sampling for s in sequences]

    def column(values: list, dtype: type) -> Tensor:
        return to_device(np.asarray(values, dtype), runner.device)

    group_of = [i for i, g in enumerate(groups) for _ in g.sequences]
    index = column(group_of, np.int64)
    hidden, logits = hidden[index], runner.logits(hidden)[index]
    temperature = column([s.temperature for s in samplings], np.float32)
    proposal = None
    if features.proposal:
        banned = np.full((len(sequences), features.banned), -1, np.int64)
        for i, s in enumerate(sequences):
            if s.request.sampling.min_new_tokens:
                banned[i, : len(s.request.stop)] = sorted(s.request.stop)
        top_p, top_k = column([s.top_p for s in samplings], np.float32), column([s.top_k for s in samplings], np.int64)
        proposal = proposal_logits(logits, temperature, top_p, top_k, to_device(banned, runner.device))
    token, logprob = sample(
        logits,
        temperature,
        key=column([s.key for s in sequences], np.int64),
        position=column([s.prompt_len for s in sequences], np.int64),
        forced=column([s.request.forced[0] if s.request.forced else -1 for s in sequences], np.int64),
        proposal=proposal,
    )
    arrays = {"token": token, "logprob": logprob}
    if features.topk:
        scale = torch.where(temperature == 0, 1, temperature)[:, None]
        top = torch.log_softmax(logits / scale, -1).topk(features.topk)
        arrays |= {"topk_id": top.indices, "topk_logprob": top.values}
    if any(s.request.teacher for s in sequences):
        first = np.asarray([s.request.teacher.start if s.request.teacher else 0 for s in sequences], np.int64)
        arrays["acceptance"] = runner.acceptance(runner.teacher_hidden(sequences, first), logits, temperature)
    if features.hidden:
        arrays["hidden"] = hidden.view(torch.uint8)
    output = PrefillOutput(token, context.rings, context.attention_sums)
    for i, s in enumerate(sequences):
        s.prefilled = (output, i, group_of[i])
    return FirstTokens(sequences, PendingResults(arrays))


@torch.inference_mode()
def start_rows(runner: ModelRunner, starts: list[Start]) -> None:
    """Put rollouts into their rows: last prompt page, first token, recent queries, attention sums."""
    cache, state, device = runner.cache, runner.state, runner.device
    copies = np.asarray([s.copy for s in starts if s.copy], np.int64).reshape(-1, 2)
    if len(copies):
        cache.copy_pages(to_device(copies[:, 0], device), to_device(copies[:, 1], device))
    by_prefill: dict[int, list[Sequence]] = {}
    for start in starts:
        by_prefill.setdefault(id(start.sequence.prefilled[0]), []).append(start.sequence)
        state.enter(start.sequence, cache.page)
    for sequences in by_prefill.values():
        output = sequences[0].prefilled[0]
        table = np.asarray([(s.row, s.prefilled[1], s.prefilled[2]) for s in sequences], np.int64)
        row, drawn, group = (to_device(table[:, i], device) for i in range(3))
        state.token[row] = output.token[drawn]
        if output.rings is not None:
            cache.ring[:, row, :, : output.rings.shape[3]] = output.rings[:, group]  # type: ignore[index]
        for s in sequences:
            sums = None if output.attention_sums is None else output.attention_sums[s.prefilled[2]]
            if sums is not None:
                cache.accumulated[:, s.row] = 0  # type: ignore[index]
                cache.accumulated[:, s.row, :, : sums.shape[2]] = sums  # type: ignore[index]
            s.prefilled = None


def boundaries(sequences: list[list[int]], device: torch.device) -> tuple[Tensor, int]:
    """cu_seqlens int32 [G + 1] and the longest length."""
    lengths = [len(s) for s in sequences]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return to_device(ends, device), max(lengths)


def packed(sequences: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and positions, one sequence after another."""
    ids = np.concatenate([np.asarray(s, np.int64) for s in sequences])
    positions = np.concatenate([np.arange(len(s)) for s in sequences])
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
            line[position % queries] = start + position
    return index
