"""The engine: prompts in, rollouts out, under any sparsity."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.engine.batch_state import BatchFeatures, BatchState
from alula.engine.block_manager import BlockManager, pages_for
from alula.engine.input_processor import InputProcessor
from alula.engine.kv_cache import KVCache, pool_pages
from alula.engine.model_runner import DecodedChunk, ModelRunner
from alula.engine.prefill import FirstTokens, prefill, start_rows
from alula.engine.results import as_rollout, collect
from alula.engine.rollout import Prompt, Rollout, Sampling, Scores
from alula.engine.schedule_plan import KVNeed, Prefill
from alula.engine.scheduler import Scheduler
from alula.engine.sequence import Request, Sequence
from alula.errors import SettingError, reject_unknown_arguments, require, require_whole, unknown
from alula.models.geometry import Geometry, attention_scaling
from alula.models.load import LoadedModel, load_model, share_weights
from alula.models.lora import Adapter, check_fits, copy_linears, merge
from alula.sparsity.policy import Sparsity
from alula.terminal import progress_bar

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)


class Engine:
    """Generates with the model's own Hugging Face modules over a paged KV cache that physically evicts.

    kv_memory: size of the KV pool. Default: twice what `max_rows` dense sequences of `max_length` need, at most 80 % of
        the free memory on a GPU, at most 1 GiB on the CPU.
    max_rows: number of sequences that decode together.
    max_length: most KV tokens of one sequence. Default: the model's limit, at most what the pool holds.
    lookahead: decode steps planned and launched at a time; finished sequences are noticed at the end of each.
    buckets: batch sizes that decode steps are padded to. A single bucket (prompts then run one by one) makes results
        bit-equal for any batch composition.
    sparse_adapter: a LoRA, or its folder, used in all forward passes of sparse policies and in none of the dense one.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        page: int = 16,
        kv_memory: str | int | None = None,
        max_rows: int = 256,
        max_length: int | None = None,
        lookahead: int | None = None,
        buckets: Many[int] | None = None,
        graphs: bool | None = None,
        compiled: bool | None = None,
        prefill_tokens: int = 16384,
        sparse_adapter: Adapter | str | PathLike[str] | None = None,
    ) -> None:
        check_counts(page, max_rows, prefill_tokens, max_length, lookahead, buckets)
        self.model = share_weights(loaded.model)
        self.name = loaded.name
        parameter = next(self.model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        cuda = self.device.type == "cuda"
        require(cuda or not graphs, "graphs=True: CUDA graphs need device=cuda; leave it out on the CPU.")
        self.geometry = Geometry.of(self.model)
        self.page, self.prefill_tokens = page, prefill_tokens
        self.lookahead = lookahead or (8 if cuda else 1)
        self.inputs = InputProcessor(loaded, page)
        self._allocate(kv_memory, min(max_rows, max(buckets)) if buckets else max_rows, max_length)
        self.sparse_model: PreTrainedModel | None = None
        """The model with its own linear layers, into which the sparse adapter is merged; None without an adapter."""
        if sparse_adapter is not None:
            self.sparse_model = share_weights(self.model)
            copy_linears(self.sparse_model)
            self.update_sparse_adapter(sparse_adapter)
        self.runner = ModelRunner(
            self.model,
            self.sparse_model,
            self.cache,
            self.state,
            buckets=tuple(sorted(buckets)) if buckets else (BUCKETS if cuda else ()),
            graphs=cuda if graphs is None else graphs,
            compiled=cuda if compiled is None else compiled,
        )
        self.policy_version = 0
        self._scheduler: Scheduler | None = None
        self._live: dict[int, list[Sequence]] = {}
        self._in_flight = 1 if cuda else 0
        """Launches that the device works on while the host reads the one before."""

    def _allocate(self, kv_memory: str | int | None, max_rows: int, max_length: int | None) -> None:
        """Allocate the KV pool and the batch rows."""
        limit = max_length or int(getattr(self.model.config, "max_position_embeddings", 1 << 20))
        pages, longest = pool_pages(kv_memory, self.geometry, self.page, max_rows, limit, self.device)
        self.pool = BlockManager(pages)
        scaling = attention_scaling(self.model)
        self.cache = KVCache(self.geometry, self.dtype, scaling, pages, self.page, max_rows, self.device)
        width, hidden = pages_for(longest, self.page), self.model.config.hidden_size
        self.state = BatchState(max_rows, width, self.lookahead, self.device, self.dtype, hidden)

    @classmethod
    def load(
        cls,
        source: str,
        *,
        device: str | torch.device | None = "cpu",
        dtype: str | torch.dtype | None = None,
        seed: int = 0,
        residual: str | None = None,
        **options: Any,
    ) -> "Engine":
        """Load a hub id, a Hugging Face folder, a GGUF file, or `shape:<name>` for random weights; options as above."""
        reject_unknown_arguments(cls, options)
        return cls(load_model(source, device=device, dtype=dtype, seed=seed, residual=residual), **options)

    # -- generation ---------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Many[Prompt] | str,
        sampling: Sampling | None = None,
        sparsity: Sparsity | Many[Sparsity] | None = None,
        *,
        record: bool | Many[bool] = False,
        keep_hidden: int | Many[int] = 0,
        indices: Many[int] | None = None,
        on_rollout: Callable[[Rollout], None] | None = None,
        progress: bool | None = None,
    ) -> list[Rollout]:
        """`sampling.n` rollouts per prompt, in order. `sparsity` is one policy or one per prompt; None is dense.

        `record` (one value, or one per prompt) also returns the evictor's history (`Rollout.history`) or the
        selector's choices. `keep_hidden` (likewise) is the number of rollouts per prompt that return their hidden
        states (`Rollout.hidden`). `indices` number the prompts in the keys of their random numbers (seed, prompt index,
        sample, position); by default 0, 1, ... `on_rollout` is called with each rollout as it finishes; it may raise to
        stop.
        """
        sampling = sampling or Sampling()
        requests = self.requests(prompts, sampling, sparsity, record=record, keep_hidden=keep_hidden, indices=indices)
        place = {request.prompt_index: i for i, request in enumerate(requests)}
        rollouts: list[Rollout | None] = [None] * (len(requests) * sampling.n)
        with progress_bar(len(rollouts), sys.stderr.isatty() if progress is None else progress) as advance:
            for rollout in self.stream(requests):
                rollouts[place[rollout.prompt_index] * sampling.n + rollout.sample_index] = rollout
                advance(len(rollout))
                if on_rollout is not None:
                    on_rollout(rollout)
        return [r for r in rollouts if r is not None]

    def requests(
        self,
        prompts: Many[Prompt] | str,
        sampling: Sampling,
        sparsity: Sparsity | Many[Sparsity] | None = None,
        *,
        record: bool | Many[bool] = False,
        keep_hidden: int | Many[int] = 0,
        indices: Many[int] | None = None,
    ) -> list[Request]:
        """Validated requests for `stream`. An invalid one raises before anything has started."""
        return self.inputs.requests(prompts, sampling, sparsity, record, keep_hidden, indices)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a string or of chat messages; token ids are returned as they are."""
        return self.inputs.tokenize(prompt)

    def check(self, sparsity: Sparsity) -> None:
        """Raise for a policy that does not fit this engine."""
        self.inputs.check_policy(sparsity)

    def stream(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Serve requests together and yield each rollout as it finishes. `abort(request.id)` ends one early."""
        requests = list(requests)
        require(self._scheduler is None, "the engine is already serving a stream; finish or close that one first.")
        require(self.cache.resident, "the engine is asleep; call wake() first.")
        features = replace(BatchFeatures.of(requests), adapted=self._adapted(requests))
        scheduler = self._scheduler = self._new_scheduler()
        try:
            for request in requests:
                self._live[request.id] = scheduler.submit(request)
            longest = max((Sequence(r, 0).max_kv_tokens() for r in requests if r.sparsity.evict), default=0)
            self.cache.prepare(
                selector=features.page_selector,
                ring=features.ring,
                accumulated_tokens=longest if features.accumulates else 0,
            )
            self.state.prepare(features)
            yield from self._serve(scheduler, features)
        finally:
            for sequences in self._live.values():
                for sequence in sequences:
                    scheduler.finish(sequence)
            self._live.clear()
            self._scheduler = None

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            self.pool,
            page=self.page,
            rows=self.max_rows,
            width=self.state.table.shape[1],
            lookahead=self.lookahead,
            prefill_tokens=self.prefill_tokens,
        )

    def need(self, request: Request) -> KVNeed:
        """KV tokens and pages of a request, and the limits above which it raises."""
        return self._new_scheduler().need(request)

    @property
    def tokenizer(self) -> Any | None:
        return self.inputs.tokenizer

    @property
    def max_length(self) -> int:
        """The most KV tokens of one sequence, rounded up to full pages."""
        return self.state.table.shape[1] * self.page

    @property
    def max_rows(self) -> int:
        """The number of sequences that decode together."""
        return self.state.rows

    def _adapted(self, requests: list[Request]) -> bool:
        """Whether these requests use the weights with the sparse adapter."""
        if self.sparse_model is None:
            return False
        kinds = {request.sparsity.dense for request in requests}
        require(
            len(kinds) < 2,
            "sparsity: with a sparse_adapter, dense and sparse prompts have different weights; use one call for each.",
        )
        return kinds == {False}

    def abort(self, request_id: int) -> None:
        """End a request's unfinished rollouts; they are yielded with their tokens so far and finish='aborted'."""
        for sequence in self._live.get(request_id, []):
            if sequence.finish is None:
                sequence.finish = "aborted"

    def _serve(self, scheduler: Scheduler, features: BatchFeatures) -> Iterator[Rollout]:
        launched: deque[FirstTokens | DecodedChunk] = deque()
        while not scheduler.idle or launched:
            yield from self._sweep_aborted(scheduler)
            admission = scheduler.admit()
            for sequence in admission.restore:
                self.runner.restore(sequence, features)
            for prompts in self._prefill_batches(admission.prefill):
                launched.append(prefill(self.runner, prompts, features))
            if admission.start:
                start_rows(self.runner, admission.start)
            chunk = scheduler.plan()
            if chunk is not None:
                launched.append(self.runner.decode(chunk, features))
            while launched and (len(launched) > self._in_flight or chunk is None):
                for sequence in collect(launched.popleft(), self.geometry, self.page):
                    yield self._done(sequence, scheduler)
        yield from self._sweep_aborted(scheduler)

    def _prefill_batches(self, prompts: list[Prefill]) -> list[list[Prefill]]:
        """All prompts in one packed pass; one by one if results must be bit-equal for any batch composition."""
        if len(self.runner.buckets) == 1:
            return [[prompt] for prompt in prompts]
        return [prompts] if prompts else []

    def _sweep_aborted(self, scheduler: Scheduler) -> Iterator[Rollout]:
        for sequences in list(self._live.values()):
            for sequence in list(sequences):
                if sequence.finish == "aborted":
                    yield self._done(sequence, scheduler)

    def _done(self, sequence: Sequence, scheduler: Scheduler) -> Rollout:
        scheduler.finish(sequence)
        sequences = self._live[sequence.request.id]
        sequences.remove(sequence)
        if not sequences:
            del self._live[sequence.request.id]
        return as_rollout(sequence, self.geometry, self.dtype, self.tokenizer, self.policy_version)

    # -- scoring ------------------------------------------------------------------------------------------

    def score(
        self,
        rollouts: Many[Rollout],
        sparsity: Sparsity | None = None,
        *,
        topk: int = 0,
        temperature: float | None = None,
        record: bool = False,
    ) -> list[Scores]:
        """Log-probs of the rollouts' tokens: under the dense policy in one packed pass, under a sparse one by decoding
        the given tokens again. `temperature` defaults to each rollout's own."""
        from alula.engine.scoring import score_dense, score_forced

        self.inputs.check_rollouts(rollouts, temperature)
        self.inputs.check_topk("topk", topk)
        if sparsity is None or sparsity.dense:
            return score_dense(self, rollouts, topk, temperature)
        self.check(sparsity)
        return score_forced(self, rollouts, sparsity, topk, temperature, record)

    def acceptance(
        self,
        rollouts: Many[Rollout],
        sparsity: Sparsity | Many[Sparsity] | None = None,
        *,
        temperature: float | None = None,
    ) -> list[Tensor]:
        """Exact α = Σ_v min(p_dense, p_sparse) at every token of the rollouts: fp32 [tokens] each.

        The tokens are decoded again under `sparsity` (one policy, or one per rollout) and compared at each step with
        the dense policy's packed pass over the same text, which runs once per distinct rollout. `DENSE` measures the
        numerical floor: decoding against the packed pass. `sparsity=None` means each rollout's own policy, and needs
        no decoding if the rollouts kept their hidden states. `temperature` defaults to each rollout's own.
        """
        from alula.engine.scoring import kept_acceptance, stream_acceptance

        if sparsity is None and all(r.hidden is not None for r in rollouts):
            return kept_acceptance(self, rollouts, temperature)
        sparsity = [r.sparsity for r in rollouts] if sparsity is None else sparsity
        alphas: list[Tensor | None] = [None] * len(rollouts)
        for index, alpha, _ in stream_acceptance(self, rollouts, sparsity, temperature):
            alphas[index] = alpha
        return [alpha for alpha in alphas if alpha is not None]

    # -- weights and memory -------------------------------------------------------------------------------

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, lazily: bool = False) -> None:
        """Copy new weights over the old ones, in place: captured graphs stay valid.

        All names and shapes are checked before the first copy. `lazily` consumes the tensors one by one, for a sharded
        learner that gathers them one at a time; an invalid one then leaves the model partly updated.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))

        def checked(name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
            if name not in parameters:
                raise unknown("parameter", name, parameters)
            parameter = parameters[name]
            require(
                parameter.shape == tensor.shape,
                f"parameter {name!r}: got shape {tuple(tensor.shape)}, the model has {tuple(parameter.shape)}.",
            )
            return parameter, tensor

        pairs: Iterable[tuple[Tensor, Tensor]] = (checked(*pair) for pair in named_tensors)
        for parameter, tensor in pairs if lazily else list(pairs):
            parameter.copy_(tensor, non_blocking=True)
        self.policy_version += 1
        if self.sparse_model is not None:
            self.update_sparse_adapter(self.sparse_adapter)

    def update_sparse_adapter(self, adapter: Adapter | str | PathLike[str]) -> None:
        """Merge `adapter` (or the one in a folder) into the sparse weights, in place: captured graphs stay valid.

        Call it again whenever the dense weights were changed other than by `update_weights`.
        """
        if self.sparse_model is None:
            raise SettingError("the engine has no sparse_adapter to update; load it with one (zeros will do).")
        if not isinstance(adapter, Adapter):
            adapter = Adapter.load(Path(adapter))
        check_fits(self.model, adapter)
        self.sparse_adapter = adapter
        merge(adapter, self.model, self.sparse_model)

    def sleep(self) -> None:
        """Release the KV pool's memory for the learner. Weights stay; no stream may be active."""
        require(self._scheduler is None, "the engine is serving a stream; finish it before sleep().")
        self.cache.sleep()

    def wake(self) -> None:
        """Restore the KV pool's memory, at the same address."""
        self.cache.wake()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Sleep inside a `with` block, for the learner's work. On the CPU nothing is released."""
        if self.device.type != "cuda":
            yield
            return
        self.sleep()
        try:
            yield
        finally:
            self.wake()


def check_counts(
    page: int,
    max_rows: int,
    prefill_tokens: int,
    max_length: int | None,
    lookahead: int | None,
    buckets: Many[int] | None,
) -> None:
    """Raise for sizes that are not positive integers."""
    counts = {
        "page": page,
        "max_rows": max_rows,
        "prefill_tokens": prefill_tokens,
        "max_length": max_length,
        "lookahead": lookahead,
    } | {f"buckets[{i}]": rows for i, rows in enumerate(buckets or ())}
    for name, value in counts.items():
        if value is not None:
            require_whole(**{name: value})
            require(value >= 1, f"{name}={value}: must be at least 1.")
    require(page & (page - 1) == 0, f"page={page}: use a power of two, such as 16.")
