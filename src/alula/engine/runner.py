"""Runs the model: packed prefill, decode steps (captured as CUDA graphs), evictions between them, swaps."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.engine import attention
from alula.engine.cache import Cache
from alula.engine.features import Features
from alula.engine.fuse import fuse_projections, keep_one_of_each
from alula.engine.rows import Rows, put, rollout_key
from alula.engine.scheduler import Chunk, Event, Prefill, Start, SwapOut
from alula.engine.sequence import Request, Sequence
from alula.mismatch.acceptance import acceptance
from alula.model import lm_logits
from alula.ops.append import append
from alula.ops.compact import compact, gather_keys
from alula.ops.packed_attention import packed_attention
from alula.ops.paged_attention import accumulate_attention, paged_attention
from alula.ops.sample import proposal_logits, sample
from alula.ops.select_pages import select_pages
from alula.sparsity.evict import build, keep
from alula.sparsity.evict.base import Cached

SCORING_BYTES = 1 << 30
"""Most bytes of gathered keys at a time while evicting."""
LOGITS_BYTES = 1 << 28
"""Logits beside those that are sampled from exist for this many bytes' worth of tokens at a time."""


@dataclass
class Prompts:
    """A packed prefill: where each token goes, and what each prompt leaves for the rollouts that start from it."""

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
    results: "Results"


@dataclass
class Decoded:
    """Results of a chunk of decode steps."""

    chunk: Chunk
    results: "Results"
    kept: list[tuple[Event, Tensor]]
    selected: list[list[tuple[Tensor, Tensor] | None]]


class Results:
    """Tensors on their way to the host: `arrays` waits for them, and for nothing launched later."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._hosted = {name: to_host(tensor) for name, tensor in tensors.items()}
        self._done = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._done = torch.cuda.Event()
            self._done.record()

    def arrays(self) -> dict[str, np.ndarray]:
        if self._done is not None:
            self._done.synchronize()
        return {name: tensor.numpy() for name, tensor in self._hosted.items()}


class Runner:
    def __init__(
        self,
        model: PreTrainedModel,
        sparse_model: PreTrainedModel | None,
        cache: Cache,
        rows: Rows,
        *,
        buckets: tuple[int, ...],
        graphs: bool,
        compiled: bool,
    ) -> None:
        self.model, self.cache, self.rows, self.buckets = model, cache, rows, buckets
        self.device = cache.device
        self.sparse_model = sparse_model
        self.head = model.get_output_embeddings()
        for each in filter(None, (model, sparse_model)):
            attention.install(each)
            if compiled:
                options: dict[str, Any] = {"post_grad_custom_pre_pass": keep_one_of_each}
                for layer in each.base_model.layers:  # type: ignore[union-attr]
                    fuse_projections(layer)
                    layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, options=options)
        self.use_graphs = graphs
        self._graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._prompts: Prompts | None = None
        self._decode: tuple[int, int, Features] | None = None
        self._selected: list[tuple[Tensor, Tensor] | None] = []

    # -- the model calls back here, layer by layer ------------------------------------------------------

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if self._prompts is not None:
            return self._attend_prompts(self._prompts, layer, query, key, value, scaling)
        assert self._decode is not None
        bucket, most, features = self._decode
        cache, rows = self.cache, self.rows
        ring = cache.ring[layer] if features.ring else None  # type: ignore[index]
        summaries = cache.summaries[layer] if features.selector else None  # type: ignore[index]
        keys, values = cache.keys[layer], cache.values[layer]
        append(query, key, value, keys, values, rows.table, rows.kv_len, rows.live, rows.position, rows.ring_size,
               ring, summaries)  # fmt: skip
        table, tokens = rows.table[:bucket, None], rows.tokens[:bucket, None]
        if summaries is not None and layer >= features.dense_layers:
            table, tokens = select_pages(
                query, summaries, rows.table[:bucket], rows.tokens[:bucket], self._budget, cache.page, most
            )
            if features.record_selected:
                self._selected.append((table.cpu(), tokens.cpu()))
        elif features.record_selected:
            self._selected.append(None)
        out, lse = paged_attention(query, keys, values, table, tokens, scaling, most)
        if features.accumulates:
            accumulated = cache.accumulated[layer]  # type: ignore[index]
            wanted = rows.accumulates[:bucket] * rows.live[:bucket]
            accumulate_attention(query, keys, rows.table[:bucket, None], rows.tokens[:bucket, None], lse, scaling,
                                 min(most, accumulated.shape[2]), accumulated, wanted)  # fmt: skip
        return out

    def _attend_prompts(
        self, p: Prompts, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        if len(p.page):
            self.cache.keys[layer][p.page, :, p.slot] = key
            self.cache.values[layer][p.page, :, p.slot] = value
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

    def hidden(self, ids: Tensor, positions: Tensor, adapted: bool = False) -> Tensor:
        """Last hidden states [T, width] of packed tokens; attention goes through `attend`."""
        model = self.sparse_model if adapted and self.sparse_model is not None else self.model
        with attention.active(self):
            out = model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        return out.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return lm_logits(hidden, self.head.weight, getattr(self.head, "bias", None))

    # -- prompts ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward_packed(self, sequences: list[list[int]]) -> Tensor:
        """Dense hidden states of whole sequences, packed; nothing is cached."""
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        self._prompts = Prompts(empty, empty, *self._boundaries(sequences))
        try:
            return self.hidden(*self._packed(sequences))
        finally:
            self._prompts = None

    def _boundaries(self, sequences: list[list[int]]) -> tuple[Tensor, int]:
        lengths = [len(s) for s in sequences]
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return self._device(ends), max(lengths)

    def _packed(self, sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
        ids = np.concatenate([np.asarray(s, np.int64) for s in sequences])
        positions = np.concatenate([np.arange(len(s)) for s in sequences])
        return self._device(ids), self._device(positions)

    def _device(self, array: np.ndarray) -> Tensor:
        out = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, device=self.device)
        put(out, array)
        return out

    @torch.inference_mode()
    def prefill(self, groups: list[Prefill], features: Features) -> First:
        """Write the prompts' KV and draw the first token of every rollout that waits on them."""
        page = self.cache.page
        prompts = [g.request.prompt_ids for g in groups]
        lengths = [len(p) for p in prompts]
        at = np.concatenate([np.arange(n) for n in lengths])
        pages = np.concatenate([np.repeat(g.pages, page)[:n] for g, n in zip(groups, lengths)]).astype(np.int64)
        p = Prompts(self._device(pages), self._device(at % page), *self._boundaries(prompts), lengths=lengths)
        shape, starts = self.cache.shape, np.cumsum([0, *lengths[:-1]])
        if features.ring:
            p.tail = self._device(ring_places(groups, starts, features.ring))
            p.rings = torch.empty(shape.layers, len(groups), shape.q_heads, features.ring, shape.head_dim,
                                  dtype=shape.dtype, device=self.device)  # fmt: skip
        if features.accumulates:
            p.attention = [
                torch.empty(shape.layers, shape.kv_heads, n, device=self.device) if accumulates(g.request) else None
                for g, n in zip(groups, lengths)
            ]
        self._prompts = p
        try:
            hidden = self.hidden(*self._packed(prompts), adapted=features.adapted)
        finally:
            self._prompts = None
        if features.selector:
            full = [q for g, n in zip(groups, lengths) for q in g.pages[: n // page]]
            self.cache.summarise(self._device(np.asarray(full, np.int64)))
        return self._draw_first(groups, p, hidden[(p.cu_seqlens[1:] - 1).long()], features)

    def _draw_first(self, groups: list[Prefill], p: Prompts, hidden: Tensor, features: Features) -> First:
        sequences = [s for g in groups for s in g.sequences]
        owner = np.concatenate([np.full(len(g.sequences), i) for i, g in enumerate(groups)])
        hidden, logits = (x[self._device(owner)] for x in (hidden, self.logits(hidden)))
        samplings = [s.request.sampling for s in sequences]
        key = self._device(np.asarray([self.key(s) for s in sequences], np.int64))
        counter = self._device(np.asarray([s.prompt for s in sequences], np.int64))
        forced = self._device(
            np.asarray([s.request.forced[0] if s.request.forced else -1 for s in sequences], np.int64)
        )
        temperature = self._device(np.asarray([s.temperature for s in samplings], np.float32))
        proposal = None
        if features.proposal:
            banned = np.full((len(sequences), features.banned), -1, np.int64)
            for i, s in enumerate(sequences):
                if s.request.sampling.min_new_tokens:
                    banned[i, : len(s.request.stop)] = sorted(s.request.stop)
            proposal = proposal_logits(
                logits, temperature, self._device(np.asarray([s.top_p for s in samplings], np.float32)),
                self._device(np.asarray([s.top_k for s in samplings], np.int64)), self._device(banned),
            )  # fmt: skip
        p.token, p.logprob = sample(logits, temperature, key, counter, forced, proposal)
        arrays = {"token": p.token, "logprob": p.logprob}
        if features.topk:
            top = torch.log_softmax(logits / torch.where(temperature == 0, 1, temperature)[:, None], -1).topk(
                features.topk
            )
            arrays |= {"topk_id": top.indices, "topk_logprob": top.values}
        if any(s.request.teacher for s in sequences):
            first = np.asarray([s.request.teacher.start if s.request.teacher else 0 for s in sequences], np.int64)
            arrays["acceptance"] = self.overlap(self._taught(sequences, first), logits, temperature)
        if features.hidden:
            arrays["hidden"] = hidden.view(torch.uint8)
        for i, s in enumerate(sequences):
            s.first = (p, i, int(owner[i]))
        return First(sequences, Results(arrays))

    @staticmethod
    def key(sequence: Sequence) -> int:
        request = sequence.request
        if request.key is not None:
            return request.key
        return rollout_key(request.sampling.seed, request.prompt_index, sequence.sample)

    @torch.inference_mode()
    def start(self, starts: list[Start], features: Features) -> None:
        """Put rollouts into their rows: last prompt page, first token, recent queries."""
        copies = np.asarray([s.copy for s in starts if s.copy], np.int64).reshape(-1, 2)
        if len(copies):
            self.cache.copy_pages(self._device(copies[:, 0]), self._device(copies[:, 1]))
        by_prefill: dict[int, list[Sequence]] = {}
        for start in starts:
            by_prefill.setdefault(id(start.sequence.first[0]), []).append(start.sequence)
            self.rows.enter(start.sequence, self.key(start.sequence), self.cache.page)
        for sequences in by_prefill.values():
            p = sequences[0].first[0]
            rows = self._device(np.asarray([s.row for s in sequences], np.int64))
            self.rows.token[rows] = p.token[self._device(np.asarray([s.first[1] for s in sequences], np.int64))]
            groups = self._device(np.asarray([s.first[2] for s in sequences], np.int64))
            if p.rings is not None:
                self.cache.ring[:, rows, :, : p.rings.shape[3]] = p.rings[:, groups]  # type: ignore[index]
            if p.attention is not None:
                for s in sequences:
                    sums = p.attention[s.first[2]]
                    if sums is not None:
                        self.cache.accumulated[:, s.row] = 0  # type: ignore[index]
                        self.cache.accumulated[:, s.row, :, : sums.shape[2]] = sums  # type: ignore[index]
            for s in sequences:
                s.first = None

    # -- preemption -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def swap_out(self, out: SwapOut) -> None:
        """Copy a sequence's KV to host memory, all of it: resuming is exact for every policy."""
        pages = self._device(np.asarray(out.pages, np.int64))
        saved = [to_host(self.cache.keys[:, pages]), to_host(self.cache.values[:, pages])]
        out.sequence.swapped = (*saved, self.rows.token[out.row].clone())

    @torch.inference_mode()
    def restore(self, sequence: Sequence, features: Features) -> None:
        keys, values, token = sequence.swapped
        pages = self._device(np.asarray(sequence.pages, np.int64))
        # a page fetched ahead of its tokens may have been saved: only those that hold tokens come back
        self.cache.keys[:, pages] = keys[:, : len(pages)].to(self.device, non_blocking=True)
        self.cache.values[:, pages] = values[:, : len(pages)].to(self.device, non_blocking=True)
        if features.selector:
            self.cache.summarise(pages[: sequence.kv_len // self.cache.page])
        self.rows.token[sequence.row] = token
        self.rows.enter(sequence, self.key(sequence), self.cache.page)
        sequence.swapped = None

    # -- decoding ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, chunk: Chunk, features: Features) -> Decoded:
        """Launch a chunk: its swaps, then its steps with the evictions due before each."""
        for out in chunk.swap_out:
            self.swap_out(out)
        bucket = self._bucket(1 + max(part.row for part in chunk.parts))
        most = self._context(chunk.most_tokens)
        graph = self._graph(bucket, most, features)
        put(self.rows.table[:, : chunk.table.shape[1]], chunk.table)
        self.rows.upload(chunk.position, chunk.kv_len, chunk.remaining, chunk.forced)
        if features.teacher:
            self._teach(chunk, bucket)
        events: dict[int, list[Event]] = {}
        for event in chunk.events:
            events.setdefault(event.step, []).append(event)
        kept, selected = [], []
        for step in range(chunk.steps):
            for event in events.get(step, ()):
                chosen = self.evict(event)
                if any(s.request.record for s in event.sequences):
                    kept.append((event, to_host(chosen)))
            if graph is not None:
                graph.replay()
            else:
                self._selected = []
                self._step(bucket, most, features)
                selected.append(self._selected)
        rows, steps = self.rows, chunk.steps
        arrays = {"token": rows.out_token[:bucket, :steps], "logprob": rows.out_logprob[:bucket, :steps]}
        if features.topk:
            arrays |= {
                "topk_id": rows.out_topk_id[:bucket, :steps, : features.topk],
                "topk_logprob": rows.out_topk_logprob[:bucket, :steps, : features.topk],
            }
        if features.teacher:
            arrays["acceptance"] = rows.out_acceptance[:bucket, :steps]
        if rows.out_hidden is not None and features.hidden:
            arrays["hidden"] = rows.out_hidden[:bucket, :steps].view(torch.uint8)
        return Decoded(chunk, Results(arrays), kept, selected)

    def _bucket(self, rows: int) -> int:
        return next((b for b in self.buckets if b >= rows), rows)

    def _context(self, tokens: int) -> int:
        """Context sizes are rounded up to powers of two, so that a few graphs serve all."""
        capacity = self.rows.table.shape[1] * self.cache.page
        return tokens if self.device.type == "cpu" else min(max(512, 1 << (tokens - 1).bit_length()), capacity)

    def _step(self, bucket: int, most: int, features: Features) -> None:
        """One decode step of rows 0 .. bucket-1; everything it reads and writes stays on the device."""
        rows = self.rows
        live = (rows.remaining[:bucket] > 0).int()
        rows.live[:bucket] = live
        rows.tokens[:bucket] = rows.kv_len[:bucket] * live + 1
        if features.selector:
            bins = torch.div(rows.position[:bucket] + 1, rows.bin_width[:bucket].clamp(min=1), rounding_mode="floor")
            bins = bins.clamp(max=features.schedule_bins - 1)
            self._budget = rows.budget[:bucket].gather(1, bins[:, None].long())[:, 0]
        self._decode = (bucket, most, features)
        hidden = self.hidden(rows.token[:bucket], rows.position[:bucket], features.adapted)
        self._decode = None
        logits = self.logits(hidden)
        proposal = None
        if features.proposal:
            early = (rows.position[:bucket] + 1 < rows.free_from[:bucket])[:, None]
            banned = torch.where(early, rows.banned[:bucket], -1)
            proposal = proposal_logits(
                logits, rows.temperature[:bucket], rows.top_p[:bucket], rows.top_k[:bucket], banned
            )
        forced = rows.forced[:bucket].index_select(1, rows.column)[:, 0]
        counter = rows.position[:bucket].long() + 1
        token, logprob = sample(logits, rows.temperature[:bucket], rows.key[:bucket], counter, forced, proposal)
        rows.out_token[:bucket].index_copy_(1, rows.column, token[:, None])
        rows.out_logprob[:bucket].index_copy_(1, rows.column, logprob[:, None])
        if features.topk:
            scale = torch.where(rows.temperature[:bucket] == 0, 1, rows.temperature[:bucket])[:, None]
            top = torch.log_softmax(logits / scale, -1).topk(features.topk)
            rows.out_topk_id[:bucket, :, : features.topk].index_copy_(1, rows.column, top.indices[:, None])
            rows.out_topk_logprob[:bucket, :, : features.topk].index_copy_(1, rows.column, top.values[:, None])
        if rows.out_hidden is not None and features.hidden:
            rows.out_hidden[:bucket].index_copy_(1, rows.column, hidden[:, None])
        if rows.teacher is not None and features.teacher:
            dense = rows.teacher[:bucket].index_select(1, rows.column)[:, 0]
            alpha = self.overlap(dense, logits, rows.temperature[:bucket])
            rows.out_acceptance[:bucket].index_copy_(1, rows.column, alpha[:, None])
        rows.token[:bucket] = torch.where(live > 0, token, rows.token[:bucket])
        rows.ints[:2, :bucket] += live  # position and kv_len
        rows.remaining[:bucket] -= live
        rows.column += 1

    def overlap(self, dense: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
        """α fp32 [B] of the dense policy's hidden states [B, width] and sparse logits [B, V]; few rows at a time."""
        scale = torch.where(temperature == 0, 1, temperature)[:, None]
        rows = max(1, LOGITS_BYTES // (4 * logits.shape[1]))
        parts = zip(dense.split(rows), logits.split(rows), scale.split(rows))
        return torch.cat([acceptance(self.logits(p), q, t) for p, q, t in parts])

    def _teach(self, chunk: Chunk, bucket: int) -> None:
        """Bring the dense hidden states that predict this chunk's tokens into their rows."""
        index = np.zeros((bucket, chunk.steps), np.int64)
        for part in chunk.parts:
            if teacher := part.sequence.request.teacher:
                done = part.position - part.sequence.prompt + 1
                index[part.row, : part.steps] = teacher.start + done + np.arange(part.steps)
        if any(part.sequence.request.teacher for part in chunk.parts):
            found = self._taught([part.sequence for part in chunk.parts], index.ravel())
            self.rows.teacher[:bucket, : chunk.steps] = found.view(bucket, chunk.steps, -1)  # type: ignore[index]

    def _taught(self, sequences: list[Sequence], index: np.ndarray) -> Tensor:
        """Rows of the dense hidden states that the call's requests share."""
        source = next(s.request.teacher.hidden for s in sequences if s.request.teacher)
        if source.device == self.device:
            return source.index_select(0, self._device(index))
        return source.index_select(0, torch.from_numpy(index)).pin_memory().to(self.device, non_blocking=True)

    def _graph(self, bucket: int, most: int, features: Features) -> torch.cuda.CUDAGraph | None:
        """The captured step for this batch and context size, captured now if it is new."""
        if not self.use_graphs or features.record_selected:
            return None
        name = (bucket, most, features, self.cache.generation, self.rows.generation)
        if name not in self._graphs:
            if any(k[3:] != name[3:] for k in self._graphs):  # buffers were reallocated: those graphs are dead
                self._graphs.clear()
                self._pool = torch.cuda.graph_pool_handle()
            # Nothing is live while warming up and capturing: what is written goes to page 0.
            self.rows.remaining.zero_()
            self.rows.column.zero_()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(bucket, most, features)
            torch.cuda.current_stream().wait_stream(stream)
            self.rows.column.zero_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(bucket, most, features)
            self._graphs[name] = graph
        return self._graphs[name]

    # -- eviction ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def evict(self, event: Event) -> Tensor:
        """Score, choose and compact; returns the kept slots int32 [C, L, Hkv, keep]."""
        shape = self.cache.shape
        each = event.n * shape.token_bytes // 2
        together = max(1, SCORING_BYTES // each)
        kept = [self._evict_rows(event, i, i + together) for i in range(0, len(event.rows), together)]
        return torch.cat(kept)

    def _evict_rows(self, event: Event, first: int, last: int) -> Tensor:
        cache, rows, shape = self.cache, self.rows, self.cache.shape
        settings = event.sequences[0].request.sparsity.evict
        assert settings is not None
        evictor = build(settings)
        old, new = (table_of(pages[first:last]) for pages in (event.old, event.new))
        index = np.asarray(event.rows[first:last], np.int32)[:, None]
        upload = self._device(np.concatenate([index, old, new], 1))
        row = upload[:, 0].long()
        old_pages, new_pages = upload[:, 1 : 1 + old.shape[1]], upload[:, 1 + old.shape[1] :]
        queries = attention_sums = None
        if evictor.queries:
            queries = cache.ring[:, row, :, : evictor.queries].transpose(0, 1).flatten(0, 1)  # type: ignore[index]
        if evictor.accumulates:
            attention_sums = cache.accumulated[:, row, :, : event.n].transpose(0, 1).flatten(0, 1)  # type: ignore[index]
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
        kept = keep(
            evictor.score(kv), count=event.keep, sinks=settings.sinks, window=settings.window, protected=protected
        )
        kept = kept.view(len(row), shape.layers, shape.kv_heads, event.keep)
        compact(cache.keys, cache.values, kept, old_pages, new_pages)
        if cache.summaries is not None:
            cache.summarise(new_pages[:, : event.keep // cache.page].flatten().long())
        if attention_sums is not None:
            moved = attention_sums.view(len(row), shape.layers, shape.kv_heads, -1).gather(3, kept.long())
            cache.accumulated[:, row] = 0  # type: ignore[index]
            cache.accumulated[:, row, :, : event.keep] = moved.transpose(0, 1)  # type: ignore[index]
        rows.table[row, : new_pages.shape[1]] = new_pages
        rows.kv_len[row] = event.keep
        return kept


def table_of(pages: list[list[int]]) -> np.ndarray:
    table = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for line, found in zip(table, pages):
        line[: len(found)] = found
    return table


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


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, made in the stream's order; on CUDA it is there once the stream has passed."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
