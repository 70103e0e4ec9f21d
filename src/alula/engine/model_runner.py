"""Runs the model: packed forward passes, decode steps (captured as CUDA graphs), evictions between them, swaps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.engine import attention
from alula.engine.batch_state import Results, Rows, on_device, put, sequence_key, to_host
from alula.engine.eviction import evict, upload
from alula.engine.features import Features
from alula.engine.fused_linear import fuse_projections, keep_one_of_each
from alula.engine.kv_cache import Cache
from alula.engine.prefill import Prompts, attend_prompts, packed, uncached
from alula.engine.scheduler import Chunk, Event, SwapOut
from alula.engine.sequence import Sequence
from alula.models.load import lm_logits
from alula.ops.acceptance import acceptance
from alula.ops.append import append
from alula.ops.paged_attention import accumulate_attention, paged_attention
from alula.ops.sample import proposal_logits, sample
from alula.ops.select_pages import select_pages

LOGITS_BYTES = 1 << 28
"""Logits beside those that are sampled from exist for this many bytes' worth of tokens at a time."""


@dataclass
class Decoded:
    """Results of a chunk of decode steps."""

    chunk: Chunk
    results: Results
    kept: list[tuple[Event, Tensor]]
    selected: list[list[tuple[Tensor, Tensor] | None]]


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
        if compiled:
            # All engines and learners of a process compile the same forward, and each leaves entries of its own.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
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
            return attend_prompts(self.cache, self._prompts, layer, query, key, value, scaling)
        assert self._decode is not None
        bucket, most, features = self._decode
        cache, rows = self.cache, self.rows
        ring = cache.ring[layer] if features.ring else None  # type: ignore[index]
        summaries = cache.summaries[layer] if features.selector else None  # type: ignore[index]
        keys, values = cache.keys[layer], cache.values[layer]
        append(
            query,
            key,
            value,
            keys,
            values,
            rows.table,
            rows.kv_len,
            rows.live,
            rows.position,
            rows.ring_size,
            ring,
            summaries,
        )
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
            accumulate_attention(
                query,
                keys,
                rows.table[:bucket, None],
                rows.tokens[:bucket, None],
                lse,
                scaling,
                min(most, accumulated.shape[2]),
                accumulated,
                wanted,
            )
        return out

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
        return self.forward_prompts(uncached(sequences, self.device), sequences)

    def forward_prompts(self, prompts: Prompts, sequences: list[list[int]], adapted: bool = False) -> Tensor:
        self._prompts = prompts
        try:
            return self.hidden(*packed(sequences, self.device), adapted)
        finally:
            self._prompts = None

    # -- preemption -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def swap_out(self, out: SwapOut) -> None:
        """Copy a sequence's KV to host memory, all of it: resuming is exact for every policy."""
        pages = on_device(np.asarray(out.pages, np.int64), self.device)
        saved = [to_host(self.cache.keys[:, pages]), to_host(self.cache.values[:, pages])]
        out.sequence.swapped = (*saved, self.rows.token[out.row].clone())

    @torch.inference_mode()
    def restore(self, sequence: Sequence, features: Features) -> None:
        keys, values, token = sequence.swapped
        pages = on_device(np.asarray(sequence.pages, np.int64), self.device)
        # a page fetched ahead of its tokens may have been saved: only those that hold tokens come back
        self.cache.keys[:, pages] = keys[:, : len(pages)].to(self.device, non_blocking=True)
        self.cache.values[:, pages] = values[:, : len(pages)].to(self.device, non_blocking=True)
        if features.selector:
            self.cache.summarise(pages[: sequence.kv_len // self.cache.page])
        self.rows.token[sequence.row] = token
        self.rows.enter(sequence, sequence_key(sequence), self.cache.page)
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
        events: dict[int, list[tuple[Event, Tensor]]] = {}
        for event, table in zip(chunk.events, upload(chunk.events, self.device)):
            events.setdefault(event.step, []).append((event, table))
        kept, selected = [], []
        for step in range(chunk.steps):
            for event, table in events.get(step, ()):
                chosen = self.evict(event, table)
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
            found = self.taught([part.sequence for part in chunk.parts], index.ravel())
            self.rows.teacher[:bucket, : chunk.steps] = found.view(bucket, chunk.steps, -1)  # type: ignore[index]

    def taught(self, sequences: list[Sequence], index: np.ndarray) -> Tensor:
        """Rows of the dense hidden states that the call's requests share."""
        source = next(s.request.teacher.hidden for s in sequences if s.request.teacher)
        if source.device == self.device:
            return source.index_select(0, on_device(index, self.device))
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

    @torch.inference_mode()
    def evict(self, event: Event, table: Tensor) -> Tensor:
        """The kept slots int32 [C, L, Hkv, keep] of the event's sequences, compacted."""
        return evict(self.cache, self.rows, event, table)
