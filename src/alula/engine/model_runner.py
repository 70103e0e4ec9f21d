"""Runs the model: forward passes, decode steps (captured as CUDA graphs), evictions between them, swaps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.engine.attention import AttentionContext, DecodeContext, attention_context, install
from alula.engine.batch_state import BatchFeatures, BatchState, PendingResults, copy_to, to_device, to_host
from alula.engine.eviction import evict, upload_tables
from alula.engine.fused_linear import fuse_projections, merge_equal_products
from alula.engine.kv_cache import KVCache
from alula.engine.schedule_plan import Chunk, EvictionEvent, SwapOut
from alula.engine.sequence import Sequence
from alula.models.load import lm_logits
from alula.ops.acceptance import acceptance
from alula.ops.sample import proposal_logits, sample

LOGITS_BYTES = 1 << 28
"""Logits that are not sampled from are computed in chunks of at most this many bytes."""

Selected = list[tuple[Tensor, Tensor] | None]


@dataclass
class DecodedChunk:
    """Results of a chunk of decode steps."""

    chunk: Chunk
    results: PendingResults
    kept: list[tuple[EvictionEvent, Tensor]]
    """Slots kept by each recorded eviction."""
    selected: list[Selected]
    """What a selector read in each step (`DecodeContext.selected`)."""


class ModelRunner:
    def __init__(
        self,
        model: PreTrainedModel,
        sparse_model: PreTrainedModel | None,
        cache: KVCache,
        state: BatchState,
        *,
        buckets: tuple[int, ...],
        graphs: bool,
        compiled: bool,
    ) -> None:
        self.model, self.sparse_model = model, sparse_model
        self.cache, self.state, self.buckets = cache, state, buckets
        self.device = cache.device
        self.head = model.get_output_embeddings()
        if compiled:
            # All engines and learners of a process compile the same forward, and each adds its own cache entries.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for each in filter(None, (model, sparse_model)):
            install(each)
            if compiled:
                options: dict[str, Any] = {"post_grad_custom_pre_pass": merge_equal_products}
                for layer in each.base_model.layers:  # type: ignore[union-attr]
                    fuse_projections(layer)
                    layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, options=options)
        self.use_graphs = graphs
        self._graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self._graph_pool = torch.cuda.graph_pool_handle() if graphs else None

    # -- the model --------------------------------------------------------------------------------------

    def forward(self, ids: Tensor, positions: Tensor, context: AttentionContext, adapted: bool = False) -> Tensor:
        """Last hidden states [T, width] of tokens [T]; attention goes through `context`."""
        model = self.sparse_model if adapted and self.sparse_model is not None else self.model
        with attention_context(context):
            out = model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        return out.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return lm_logits(hidden, self.head.weight, getattr(self.head, "bias", None))

    # -- decoding ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, chunk: Chunk, features: BatchFeatures) -> DecodedChunk:
        """Launch a chunk: its swaps, then its steps with the evictions due before each."""
        for out in chunk.swap_out:
            self.swap_out(out)
        bucket = self.bucket_for(1 + max(part.row for part in chunk.parts))
        max_kv_len = self.padded_kv_len(chunk.max_kv_len)
        graph = self.graph_for(bucket, max_kv_len, features)
        copy_to(self.state.table[:, : chunk.table.shape[1]], chunk.table)
        self.state.upload(chunk.position, chunk.kv_len, chunk.remaining, chunk.forced)
        if features.teacher:
            self._upload_teacher(chunk, bucket)
        events: dict[int, list[tuple[EvictionEvent, Tensor]]] = {}
        for event, table in zip(chunk.events, upload_tables(chunk.events, self.device)):
            events.setdefault(event.step, []).append((event, table))
        kept, selected = [], []
        for step in range(chunk.steps):
            for event, table in events.get(step, ()):
                slots = self.evict(event, table)
                if any(s.request.record for s in event.sequences):
                    kept.append((event, to_host(slots)))
            if graph is not None:
                graph.replay()
            else:
                selected.append(self.step(bucket, max_kv_len, features))
        return DecodedChunk(chunk, self._results(bucket, chunk.steps, features), kept, selected)

    def _results(self, bucket: int, steps: int, features: BatchFeatures) -> PendingResults:
        state = self.state
        arrays = {"token": state.out_token[:bucket, :steps], "logprob": state.out_logprob[:bucket, :steps]}
        if features.topk:
            arrays |= {
                "topk_id": state.out_topk_id[:bucket, :steps, : features.topk],
                "topk_logprob": state.out_topk_logprob[:bucket, :steps, : features.topk],
            }
        if features.teacher:
            arrays["acceptance"] = state.out_acceptance[:bucket, :steps]
        if state.out_hidden is not None and features.hidden:
            arrays["hidden"] = state.out_hidden[:bucket, :steps].view(torch.uint8)
        return PendingResults(arrays)

    def bucket_for(self, rows: int) -> int:
        """The padded batch size for this many rows."""
        return next((b for b in self.buckets if b >= rows), rows)

    def padded_kv_len(self, tokens: int) -> int:
        """The context size rounded up to a power of two on CUDA, so that a few graphs cover all lengths."""
        capacity = self.state.table.shape[1] * self.cache.page
        return tokens if self.device.type == "cpu" else min(max(512, 1 << (tokens - 1).bit_length()), capacity)

    def step(self, bucket: int, max_kv_len: int, features: BatchFeatures) -> Selected:
        """One decode step of rows 0 .. bucket-1. Everything it reads and writes stays on the device.

        Returns what a selector read, layer by layer, if that is recorded.
        """
        state = self.state
        live = (state.remaining[:bucket] > 0).int()
        state.live[:bucket] = live
        state.context_len[:bucket] = state.kv_len[:bucket] * live + 1
        page_budget = None
        if features.selector:
            bins = torch.div(state.position[:bucket] + 1, state.bin_width[:bucket].clamp(min=1), rounding_mode="floor")
            bins = bins.clamp(max=features.schedule_bins - 1)
            page_budget = state.budget[:bucket].gather(1, bins[:, None].long())[:, 0]
        context = DecodeContext(self.cache, state, features, bucket, max_kv_len, page_budget)
        hidden = self.forward(state.token[:bucket], state.position[:bucket], context, features.adapted)
        logits = self.logits(hidden)
        proposal = None
        if features.proposal:
            early = (state.position[:bucket] + 1 < state.stop_from[:bucket])[:, None]
            banned = torch.where(early, state.banned[:bucket], -1)
            proposal = proposal_logits(
                logits, state.temperature[:bucket], state.top_p[:bucket], state.top_k[:bucket], banned
            )
        forced = state.forced[:bucket].index_select(1, state.column)[:, 0]
        counter = state.position[:bucket].long() + 1
        token, logprob = sample(logits, state.temperature[:bucket], state.key[:bucket], counter, forced, proposal)
        state.out_token[:bucket].index_copy_(1, state.column, token[:, None])
        state.out_logprob[:bucket].index_copy_(1, state.column, logprob[:, None])
        if features.topk:
            scale = torch.where(state.temperature[:bucket] == 0, 1, state.temperature[:bucket])[:, None]
            top = torch.log_softmax(logits / scale, -1).topk(features.topk)
            state.out_topk_id[:bucket, :, : features.topk].index_copy_(1, state.column, top.indices[:, None])
            state.out_topk_logprob[:bucket, :, : features.topk].index_copy_(1, state.column, top.values[:, None])
        if state.out_hidden is not None and features.hidden:
            state.out_hidden[:bucket].index_copy_(1, state.column, hidden[:, None])
        if state.teacher is not None and features.teacher:
            dense = state.teacher[:bucket].index_select(1, state.column)[:, 0]
            alpha = self.acceptance(dense, logits, state.temperature[:bucket])
            state.out_acceptance[:bucket].index_copy_(1, state.column, alpha[:, None])
        state.token[:bucket] = torch.where(live > 0, token, state.token[:bucket])
        state.ints[:2, :bucket] += live  # position and kv_len
        state.remaining[:bucket] -= live
        state.column += 1
        return context.selected

    def graph_for(self, bucket: int, max_kv_len: int, features: BatchFeatures) -> torch.cuda.CUDAGraph | None:
        """The captured decode step for this batch and context size, captured now if it is new."""
        if not self.use_graphs or features.record_selected:
            return None
        key = (bucket, max_kv_len, features, self.cache.generation, self.state.generation)
        if key not in self._graphs:
            if any(k[3:] != key[3:] for k in self._graphs):  # buffers were reallocated: those graphs are invalid
                self._graphs.clear()
                self._graph_pool = torch.cuda.graph_pool_handle()
            # No row is live while warming up and capturing: writes go to the scratch page.
            self.state.remaining.zero_()
            self.state.column.zero_()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step(bucket, max_kv_len, features)
            torch.cuda.current_stream().wait_stream(stream)
            self.state.column.zero_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._graph_pool):
                self.step(bucket, max_kv_len, features)
            self._graphs[key] = graph
        return self._graphs[key]

    @torch.inference_mode()
    def evict(self, event: EvictionEvent, table: Tensor) -> Tensor:
        """Run an eviction; returns the kept slots int32 [C, L, Hkv, keep] of its sequences."""
        return evict(self.cache, self.state, event, table)

    # -- preemption -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def swap_out(self, out: SwapOut) -> None:
        """Copy all KV of a sequence to host memory, so that resuming is exact under every policy."""
        pages = to_device(np.asarray(out.pages, np.int64), self.device)
        saved = [to_host(self.cache.keys[:, pages]), to_host(self.cache.values[:, pages])]
        out.sequence.swapped = (*saved, self.state.token[out.row].clone())

    @torch.inference_mode()
    def restore(self, sequence: Sequence, features: BatchFeatures) -> None:
        """Copy a swapped sequence's KV into its new pages."""
        keys, values, token = sequence.swapped
        pages = to_device(np.asarray(sequence.pages, np.int64), self.device)
        # a page allocated ahead of its tokens may have been saved: only pages that hold tokens come back
        self.cache.keys[:, pages] = keys[:, : len(pages)].to(self.device, non_blocking=True)
        self.cache.values[:, pages] = values[:, : len(pages)].to(self.device, non_blocking=True)
        if features.selector:
            self.cache.summarise(pages[: sequence.kv_len // self.cache.page])
        self.state.token[sequence.row] = token
        self.state.enter(sequence, self.cache.page)
        sequence.swapped = None

    # -- acceptance -------------------------------------------------------------------------------------

    def acceptance(self, dense: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
        """α fp32 [B] from the dense policy's hidden states [B, width] and sparse logits [B, V], in chunks of rows."""
        scale = torch.where(temperature == 0, 1, temperature)[:, None]
        rows = max(1, LOGITS_BYTES // (4 * logits.shape[1]))
        parts = zip(dense.split(rows), logits.split(rows), scale.split(rows))
        return torch.cat([acceptance(self.logits(p), q, t) for p, q, t in parts])

    def _upload_teacher(self, chunk: Chunk, bucket: int) -> None:
        """Copy the dense hidden states that predict this chunk's tokens into their rows."""
        index = np.zeros((bucket, chunk.steps), np.int64)
        for part in chunk.parts:
            if teacher := part.sequence.request.teacher:
                done = part.position - part.sequence.prompt_len + 1
                index[part.row, : part.steps] = teacher.start + done + np.arange(part.steps)
        if any(part.sequence.request.teacher for part in chunk.parts):
            hidden = self.teacher_hidden([part.sequence for part in chunk.parts], index.ravel())
            self.state.teacher[:bucket, : chunk.steps] = hidden.view(bucket, chunk.steps, -1)  # type: ignore[index]

    def teacher_hidden(self, sequences: list[Sequence], index: np.ndarray) -> Tensor:
        """Rows `index` of the dense hidden states that all requests of the call share."""
        source = next(s.request.teacher.hidden for s in sequences if s.request.teacher)
        if source.device == self.device:
            return source.index_select(0, to_device(index, self.device))
        return source.index_select(0, torch.from_numpy(index)).pin_memory().to(self.device, non_blocking=True)
