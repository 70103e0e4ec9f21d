"""Runs the model: forward passes, and decode steps (captured as CUDA graphs) with the evictions between them."""

from collections.abc import Collection, Container
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.engine.attention import AttentionContext, DecodeContext, attention_context, install
from alula.engine.batch_state import BatchState, PendingResults, StepSize, copy_to, to_device, to_host
from alula.engine.cuda_graphs import CUDAGraphs
from alula.engine.eviction import captured_rows, compile_eviction, evict, upload_tables
from alula.engine.fused_decoder import FusedDecoder, fusible
from alula.engine.fused_linear import fuse_projections, merge_equal_products
from alula.engine.kv_cache import KVCache
from alula.engine.schedule_plan import Chunk, EvictionEvent, padded_rows
from alula.engine.sequence import MOST_KINDS, BatchKind, Sequence, Teacher
from alula.engine.virtual_memory import ReleasableBuffers
from alula.models.load import lm_logits
from alula.ops.acceptance import acceptance
from alula.ops.advance_rows import Budgets, begin_step, end_step
from alula.ops.sample import proposal_logits, sample, top_logprobs
from alula.sparsity.policy import Evict

LOGITS_BYTES = 1 << 28
"""Logits that are not sampled from are computed in chunks of at most this many bytes."""

Selected = list[tuple[Tensor, Tensor] | None]


@dataclass
class DecodedChunk:
    """Results of a chunk of decode steps."""

    chunk: Chunk
    version: int
    """The policy version that sampled."""
    results: PendingResults
    kept: list[tuple[EvictionEvent, Tensor]]
    """Slots kept by each recorded eviction."""
    selected: list[Selected]
    """What a selector read in each step (`DecodeContext.selected`)."""


@dataclass
class CapturedEviction:
    """A graph that evicts what its table says: one launch instead of a dozen."""

    graph: torch.cuda.CUDAGraph
    table: Tensor
    kept: Tensor

    def replay(self, table: Tensor) -> Tensor:
        """The last sequence is repeated in the rows that are left: it writes the same values again."""
        rows = len(table)
        self.table[:rows] = table
        if rows < len(self.table):
            self.table[rows:] = table[-1]
        self.graph.replay()
        return self.kept[:rows]


class ModelRunner:
    def __init__(
        self,
        model: PreTrainedModel,
        sparse_model: PreTrainedModel | None,
        cache: KVCache,
        *,
        rows: int,
        max_length: int,
        steps: int,
        buckets: tuple[int, ...],
        graphs: bool,
        compiled: bool,
    ) -> None:
        self.model, self.sparse_model = model, sparse_model
        self.cache, self.buckets, self.max_length = cache, buckets, max_length
        self.positions = max_length
        """Positions that fused decode steps know."""
        self.batches: dict[BatchKind, BatchState] = {}
        """The rows of each kind."""
        hidden = model.config.hidden_size
        self._layout = (cache.geometry, rows, max_length // cache.page, steps, cache.device, cache.dtype, hidden)
        self.device = cache.device
        self.head = model.get_output_embeddings()
        for each in filter(None, (model, sparse_model)):
            install(each)
            for layer in each.base_model.layers if compiled else ():  # type: ignore[union-attr]
                fuse_projections(layer)
        self._fused: dict[bool, FusedDecoder] = {}
        """The decoders of models with known layers, for the dense (False) and the sparse (True) weights."""
        if compiled:
            self.fuse_layers()
            self._compile_others()
        self.use_graphs = graphs
        self.graphs = CUDAGraphs(cache.device, graphs)
        """Decode steps, and captured evictions: None for one whose capture failed."""
        self._compiled_evictions: set[Evict] = set()

    def batch(self, kind: BatchKind, in_use: Container[BatchKind] = ()) -> BatchState:
        """The rows of a kind, allocated if they are new; buffers of kinds not `in_use` may be dropped for them."""
        if kind not in self.batches:
            unused = [other for other in self.batches if other not in in_use]
            for other in unused[: max(0, len(self.batches) + 1 - MOST_KINDS)]:
                del self.batches[other]
                self.graphs.drop(other)
            self.cache.prepare(kind.selector)
            self.batches[kind] = BatchState(kind, *self._layout, resident=self.cache.resident)
        return self.batches[kind]

    def buffers(self) -> list[ReleasableBuffers]:
        """The memory of KV and rows, which the engine can lend."""
        return [self.cache.buffers, *(state.buffers for state in self.batches.values())]

    # -- the model --------------------------------------------------------------------------------------

    def fuse_layers(self) -> None:
        """Run models with known layers through `FusedDecoder`."""
        models = {False: self.model, True: self.sparse_model}
        known = {adapted: m for adapted, m in models.items() if m is not None and fusible(m)}
        self._fused = {adapted: FusedDecoder(m, self.positions) for adapted, m in known.items()}

    def reserve_positions(self, length: int) -> None:
        """Let decode steps reach the end of a text of this length. Under an evictor it may exceed `max_length`."""
        if length > self.positions:
            self.positions = 1 << (length - 1).bit_length()
            if self._fused:
                self.fuse_layers()
                self.graphs.clear()

    def _compile_others(self) -> None:
        # All engines and learners of a process compile the same forward, and each adds its own cache entries.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        options: dict[str, Any] = {"post_grad_custom_pre_pass": merge_equal_products}
        for adapted, model in ((False, self.model), (True, self.sparse_model)):
            if model is not None and adapted not in self._fused:
                for layer in model.base_model.layers:  # type: ignore[union-attr]
                    layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, options=options)

    def forward(self, ids: Tensor, positions: Tensor, context: AttentionContext, adapted: bool = False) -> Tensor:
        """Last hidden states [T, width] of tokens [T]; attention goes through `context`."""
        adapted = adapted and self.sparse_model is not None
        if adapted in self._fused:
            return self._fused[adapted].forward(ids, positions, context)
        model = self.sparse_model if adapted and self.sparse_model is not None else self.model
        with attention_context(context):
            out = model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        return out.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return lm_logits(hidden, self.head.weight, getattr(self.head, "bias", None))

    # -- decoding ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, chunk: Chunk, version: int = 0) -> DecodedChunk:
        """Launch a chunk: its steps with the evictions due before each."""
        state = self.batches[chunk.kind]
        size = self.step_size(state, [part.row for part in chunk.parts], chunk.max_kv_len)
        graph = self.graph_for(state, size)
        copy_to(state.table[:, : chunk.table.shape[1]], chunk.table)
        state.upload(chunk.position, chunk.kv_len, chunk.remaining, chunk.forced)
        if state.features.teacher:
            self._upload_teacher(state, chunk)
        events: dict[int, list[tuple[EvictionEvent, Tensor]]] = {}
        for event, table in zip(chunk.events, upload_tables(chunk.events, self.device)):
            events.setdefault(event.step, []).append((event, table))
        kept, selected = [], []
        for step in range(chunk.steps):
            for event, table in events.get(step, ()):
                slots = self.evict(state, event, table)
                if any(s.request.record for s in event.sequences):
                    kept.append((event, to_host(slots)))
            if graph is not None:
                graph.replay()
            else:
                selected.append(self.step(state, size))
        return DecodedChunk(chunk, version, self._results(state, size.rows, chunk.steps), kept, selected)

    def _results(self, state: BatchState, bucket: int, steps: int) -> PendingResults:
        features = state.features
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

    def step_size(self, state: BatchState, rows: Collection[int], kv_len: int) -> StepSize:
        """The size of decode steps of these rows, which hold up to `kv_len` tokens."""
        kv_len = self._padded(kv_len)
        read = kv_len if state.selector is None else self._padded(state.pages_read(rows) * self.cache.page)
        return StepSize(padded_rows(1 + max(rows), self.buckets), kv_len, min(kv_len, read))

    def _padded(self, tokens: int) -> int:
        """A length rounded up to a power of two on CUDA, so that a few graphs cover all lengths."""
        return tokens if self.device.type == "cpu" else min(max(512, 1 << (tokens - 1).bit_length()), self.max_length)

    def step(self, state: BatchState, size: StepSize) -> Selected:
        """One decode step of the first rows. Everything it reads and writes stays on the device.

        Returns what a selector read, layer by layer, if that is recorded.
        """
        bucket = size.rows
        features, rows = state.features, state.row_state(bucket)
        budgets = Budgets(state.budget[:bucket], state.bin_width[:bucket]) if state.selector is not None else None
        counter, forced, page_budget = begin_step(rows, budgets)
        context = DecodeContext(self.cache, state, size, page_budget)
        hidden = self.forward(state.token[:bucket], state.position[:bucket], context, state.kind.adapted)
        logits = self.logits(hidden)
        proposal = None
        if features.proposal:
            early = (state.position[:bucket] + 1 < state.stop_from[:bucket])[:, None]
            banned = torch.where(early, state.banned[:bucket], -1)
            proposal = proposal_logits(
                logits, state.temperature[:bucket], state.top_p[:bucket], state.top_k[:bucket], banned
            )
        token, logprob = sample(logits, state.temperature[:bucket], state.key[:bucket], counter, forced, proposal)
        if features.topk:
            top, ids = top_logprobs(logits, state.temperature[:bucket], features.topk)
            state.out_topk_id[:bucket, :, : features.topk].index_copy_(1, state.column, ids[:, None])
            state.out_topk_logprob[:bucket, :, : features.topk].index_copy_(1, state.column, top[:, None])
        if state.out_hidden is not None and features.hidden:
            state.out_hidden[:bucket].index_copy_(1, state.column, hidden[:, None])
        if state.teacher is not None and features.teacher:
            dense = state.teacher[:bucket].index_select(1, state.column)[:, 0]
            alpha = self.acceptance(dense, logits, state.temperature[:bucket])
            state.out_acceptance[:bucket].index_copy_(1, state.column, alpha[:, None])
        end_step(rows, token, logprob, state.out_token[:bucket], state.out_logprob[:bucket])
        return context.selected

    def graph_for(self, state: BatchState, size: StepSize) -> torch.cuda.CUDAGraph | None:
        """The captured decode step of this size, captured now if it is new."""
        if not self.use_graphs or state.features.record_selected:
            return None
        key = (state.kind, state.generation, size, state.features.graph_key)
        if key in self.graphs:
            return self.graphs[key]
        # No row is live while warming up and capturing: writes go to the scratch page.
        state.remaining.zero_()
        state.column.zero_()

        def warm_up() -> None:
            self.step(state, size)
            state.column.zero_()

        graph, _ = self.graphs.capture(key, lambda: self.step(state, size), warm_up)
        self.graphs[key] = graph
        return graph

    def prepare_eviction(self, sequence: Sequence) -> None:
        """Compile the kernels of a sequence's policy before its first eviction, while no row waits for them."""
        policy, evictor = sequence.request.sparsity.evict, sequence.request.evictor
        if policy is None or evictor is None or policy in self._compiled_evictions:
            return
        # statistics of queries (TriAttention) may not be measured yet
        evicts = sequence.max_kept() + policy.buffer <= sequence.max_kv_tokens() and not evictor.calibrated
        if evicts and self.device.type == "cuda" and self.cache.resident:
            compile_eviction(self.cache, self.batches[sequence.request.kind], sequence)
            self._compiled_evictions.add(policy)

    @torch.inference_mode()
    def evict(self, state: BatchState, event: EvictionEvent, table: Tensor) -> Tensor:
        """Run an eviction; returns the kept slots int32 [C, L, Hkv, keep] of its sequences, valid until
        the next eviction or decode step."""
        rows = captured_rows(self.cache, event) if self.use_graphs else 0
        if not rows:
            return evict(self.cache, state, event, table)
        policy, old_pages = event.sequences[0].request.sparsity.evict, max(map(len, event.old))
        key = (state.kind, state.generation, policy, event.n, event.keep, rows, old_pages, table.shape[1])
        if key in self.graphs:
            captured = self.graphs[key]
            return captured.replay(table) if captured else evict(self.cache, state, event, table)
        table_copy = table[torch.arange(rows, device=self.device).clamp(max=len(table) - 1)]
        work, done = partial(evict, self.cache, state, event, table_copy), []
        try:
            graph, kept = self.graphs.capture(key, work, lambda: done.append(work()))
            self.graphs[key] = CapturedEviction(graph, table_copy, kept)
        except RuntimeError:  # no memory, or a method that cannot be captured
            if not done:
                raise
            self.graphs[key] = None
        return done[0][: len(table)]

    # -- acceptance -------------------------------------------------------------------------------------

    def acceptance(self, dense: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
        """α fp32 [B] from the dense policy's hidden states [B, width] and sparse logits [B, V], in chunks of rows."""
        scale = torch.where(temperature == 0, 1, temperature)[:, None]
        rows = max(1, LOGITS_BYTES // (4 * logits.shape[1]))
        parts = zip(dense.split(rows), logits.split(rows), scale.split(rows))
        return torch.cat([acceptance(self.logits(p), q, t) for p, q, t in parts])

    def _upload_teacher(self, state: BatchState, chunk: Chunk) -> None:
        """Copy the dense hidden states that predict this chunk's tokens into their rows."""
        parts = [part for part in chunk.parts if part.sequence.request.teacher]
        if parts:
            steps = [part.steps for part in parts]
            row = to_device(np.repeat([part.row for part in parts], steps), self.device)
            column = to_device(np.concatenate([np.arange(count) for count in steps]), self.device)
            first = [part.position - part.sequence.prompt_len + 1 for part in parts]
            teachers = [part.sequence.request.teacher for part in parts]
            state.teacher[row, column] = self.teacher_hidden(teachers, first, steps)  # type: ignore[index, arg-type]

    def teacher_hidden(self, teachers: list[Teacher], first: list[int], counts: list[int]) -> Tensor:
        """Per teacher `counts` dense hidden states from its token `first` on, one after another."""
        hidden = torch.empty(sum(counts), self.model.config.hidden_size, dtype=self.cache.dtype, device=self.device)
        ends = np.cumsum(counts)
        for source in {id(teacher.hidden): teacher.hidden for teacher in teachers}.values():
            members = [i for i, teacher in enumerate(teachers) if teacher.hidden is source]
            read = np.concatenate([teachers[i].start + first[i] + np.arange(counts[i]) for i in members])
            write = np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in members])
            if source.device == self.device:
                rows = source.index_select(0, to_device(read, self.device))
            else:
                rows = source.index_select(0, torch.from_numpy(read)).pin_memory().to(self.device, non_blocking=True)
            hidden[to_device(write, self.device)] = rows
        return hidden
