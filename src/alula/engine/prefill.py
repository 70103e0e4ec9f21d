"""Prompts: their packed forward pass, the first token of every rollout, and how rollouts enter their rows."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from alula.engine.batch_state import Results, on_device, sequence_key
from alula.engine.features import Features
from alula.engine.kv_cache import Cache
from alula.engine.scheduler import Prefill, Start
from alula.engine.sequence import Request, Sequence
from alula.ops.packed_attention import packed_attention
from alula.ops.sample import proposal_logits, sample
from alula.sparsity.evict import build

if TYPE_CHECKING:
    from alula.engine.model_runner import Runner


@dataclass
class Prompts:
    """A packed forward pass: where each token goes, and what each prompt leaves for the rollouts that start from it."""

    page: Tensor
    slot: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    tail: Tensor | None = None
    """int64 [G, W]: token whose query stands at each place of a prompt's ring"""
    lengths: list[int] = field(default_factory=list)
    rings: Any = None
    """[L, G, Hq, W, D]"""
    attention: Any = None
    """per prompt fp32 [L, Hkv, P] attention received inside the prompt, or None where nobody needs it (H2O does)"""
    token: Any = None
    logprob: Any = None


@dataclass
class First:
    """Results of a prefill: the first token of every rollout of its prompts."""

    sequences: list[Sequence]
    results: Results


def uncached(sequences: list[list[int]], device: torch.device) -> Prompts:
    """Whole sequences of which nothing is kept."""
    nowhere = torch.empty(0, dtype=torch.int64, device=device)
    return Prompts(nowhere, nowhere, *boundaries(sequences, device))


def boundaries(sequences: list[list[int]], device: torch.device) -> tuple[Tensor, int]:
    lengths = [len(s) for s in sequences]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return on_device(ends, device), max(lengths)


def packed(sequences: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and positions, one sequence after another."""
    ids = np.concatenate([np.asarray(s, np.int64) for s in sequences])
    positions = np.concatenate([np.arange(len(s)) for s in sequences])
    return on_device(ids, device), on_device(positions, device)


def attend_prompts(
    cache: Cache, p: Prompts, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Dense attention inside each prompt; its KV goes to its pages, its last queries to its ring."""
    if len(p.page):
        cache.keys[layer][p.page, :, p.slot] = key
        cache.values[layer][p.page, :, p.slot] = value
    if p.tail is not None:
        p.rings[layer] = query[p.tail].transpose(1, 2)
    if p.attention is not None:
        start = 0
        for sums, length in zip(p.attention, p.lengths):
            span = slice(start, start + length)
            if sums is not None:
                sums[layer] = attention_received(query[span], key[span], scaling)
            start += length
    return packed_attention(query, key, value, p.cu_seqlens, p.max_seqlen, scaling)


@torch.inference_mode()
def prefill(runner: "Runner", groups: list[Prefill], features: Features) -> First:
    """Write the prompts' KV and draw the first token of every rollout that waits on them."""
    cache, device = runner.cache, runner.device
    page, geometry = cache.page, cache.geometry
    prompts = [g.request.prompt_ids for g in groups]
    lengths = [len(p) for p in prompts]
    at = np.concatenate([np.arange(n) for n in lengths])
    pages = np.concatenate([np.repeat(g.pages, page)[:n] for g, n in zip(groups, lengths)]).astype(np.int64)
    p = Prompts(on_device(pages, device), on_device(at % page, device), *boundaries(prompts, device), lengths=lengths)
    if features.ring:
        starts = np.cumsum([0, *lengths[:-1]])
        p.tail = on_device(ring_places(groups, starts, features.ring), device)
        layout = (geometry.layers, len(groups), geometry.query_heads, features.ring, geometry.head_dim)
        p.rings = torch.empty(layout, dtype=cache.dtype, device=device)
    if features.accumulates:
        p.attention = [
            torch.empty(geometry.layers, geometry.kv_heads, n, device=device) if accumulates(g.request) else None
            for g, n in zip(groups, lengths)
        ]
    hidden = runner.forward_prompts(p, prompts, features.adapted)
    if features.selector:
        full = [q for g, n in zip(groups, lengths) for q in g.pages[: n // page]]
        cache.summarise(on_device(np.asarray(full, np.int64), device))
    return _draw_first(runner, groups, p, hidden[(p.cu_seqlens[1:] - 1).long()], features)


def _draw_first(runner: "Runner", groups: list[Prefill], p: Prompts, hidden: Tensor, features: Features) -> First:
    sequences = [s for g in groups for s in g.sequences]
    samplings = [s.request.sampling for s in sequences]

    def column(values: list, dtype: type) -> Tensor:
        return on_device(np.asarray(values, dtype), runner.device)

    owner = [i for i, g in enumerate(groups) for _ in g.sequences]
    index = column(owner, np.int64)
    hidden, logits = hidden[index], runner.logits(hidden)[index]
    temperature = column([s.temperature for s in samplings], np.float32)
    proposal = None
    if features.proposal:
        banned = np.full((len(sequences), features.banned), -1, np.int64)
        for i, s in enumerate(sequences):
            if s.request.sampling.min_new_tokens:
                banned[i, : len(s.request.stop)] = sorted(s.request.stop)
        top_p, top_k = column([s.top_p for s in samplings], np.float32), column([s.top_k for s in samplings], np.int64)
        proposal = proposal_logits(logits, temperature, top_p, top_k, on_device(banned, runner.device))
    p.token, p.logprob = sample(
        logits,
        temperature,
        key=column([sequence_key(s) for s in sequences], np.int64),
        counter=column([s.prompt for s in sequences], np.int64),
        forced=column([s.request.forced[0] if s.request.forced else -1 for s in sequences], np.int64),
        proposal=proposal,
    )
    arrays = {"token": p.token, "logprob": p.logprob}
    if features.topk:
        scale = torch.where(temperature == 0, 1, temperature)[:, None]
        top = torch.log_softmax(logits / scale, -1).topk(features.topk)
        arrays |= {"topk_id": top.indices, "topk_logprob": top.values}
    if any(s.request.teacher for s in sequences):
        first = np.asarray([s.request.teacher.start if s.request.teacher else 0 for s in sequences], np.int64)
        arrays["acceptance"] = runner.overlap(runner.taught(sequences, first), logits, temperature)
    if features.hidden:
        arrays["hidden"] = hidden.view(torch.uint8)
    for i, s in enumerate(sequences):
        s.first = (p, i, owner[i])
    return First(sequences, Results(arrays))


@torch.inference_mode()
def enter_rows(runner: "Runner", starts: list[Start]) -> None:
    """Put rollouts into their rows: last prompt page, first token, recent queries."""
    cache, rows, device = runner.cache, runner.rows, runner.device
    copies = np.asarray([s.copy for s in starts if s.copy], np.int64).reshape(-1, 2)
    if len(copies):
        cache.copy_pages(on_device(copies[:, 0], device), on_device(copies[:, 1], device))
    by_prefill: dict[int, list[Sequence]] = {}
    for start in starts:
        by_prefill.setdefault(id(start.sequence.first[0]), []).append(start.sequence)
        rows.enter(start.sequence, sequence_key(start.sequence), cache.page)
    for sequences in by_prefill.values():
        p = sequences[0].first[0]
        table = np.asarray([(s.row, s.first[1], s.first[2]) for s in sequences], np.int64)
        row, drawn, group = (on_device(table[:, i], device) for i in range(3))
        rows.token[row] = p.token[drawn]
        if p.rings is not None:
            cache.ring[:, row, :, : p.rings.shape[3]] = p.rings[:, group]  # type: ignore[index]
        for s in sequences:
            sums = None if p.attention is None else p.attention[s.first[2]]
            if sums is not None:
                cache.accumulated[:, s.row] = 0  # type: ignore[index]
                cache.accumulated[:, s.row, :, : sums.shape[2]] = sums  # type: ignore[index]
            s.first = None


def accumulates(request: Request) -> bool:
    evict = request.sparsity.evict
    return evict is not None and build(evict).accumulates


def ring_places(groups: list[Prefill], starts: np.ndarray, size: int) -> np.ndarray:
    """[G, size]: which packed token's query each place of a prompt's ring holds: position % ring size."""
    places = np.repeat(starts[:, None], size, 1).astype(np.int64)
    for line, group, start in zip(places, groups, starts):
        settings = group.request.sparsity.evict
        wanted = build(settings).queries if settings else 0
        length = len(group.request.prompt_ids)
        for position in range(max(0, length - wanted), length):
            line[position % wanted] = start + position
    return places


def attention_received(query: Tensor, key: Tensor, scaling: float, block: int = 512) -> Tensor:
    """fp32 [Hkv, P]: Σ over queries, and over the heads of a group, of causal softmax attention inside a prompt."""
    length, q_heads, dim = query.shape
    kv_heads = key.shape[1]
    q = query.view(length, kv_heads, q_heads // kv_heads, dim).permute(1, 2, 0, 3).float() * scaling
    k = key.transpose(0, 1).float()[:, None]
    total = torch.zeros(kv_heads, length, device=query.device)
    for first in range(0, length, block):
        logits = q[:, :, first : first + block] @ k.transpose(-1, -2)
        later = (
            torch.arange(length, device=query.device)
            > torch.arange(first, first + logits.shape[2], device=query.device)[:, None]
        )
        total += torch.softmax(logits.masked_fill(later, float("-inf")), -1).sum((1, 2))
    return total
