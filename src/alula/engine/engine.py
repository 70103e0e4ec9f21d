"""The engine: prompts in, rollouts out, under any sparsity."""

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Many
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.engine.block_manager import BlockManager, pages_for
from alula.engine.engine_core import EngineCore
from alula.engine.input_processor import InputProcessor
from alula.engine.kv_cache import KVCache, check_kv_dtype, parse_bytes, pool_pages
from alula.engine.measure_queries import rope
from alula.engine.model_runner import ModelRunner
from alula.engine.rollout import Prompt, Rollout, Sampling, Scores
from alula.engine.schedule_plan import KVNeed
from alula.engine.scheduler import Scheduler
from alula.engine.sequence import Request, Sequence
from alula.engine.swapping import default_swap_memory, host_bytes, pin_with_threads
from alula.errors import SettingError, reject_unknown_arguments, require, require_whole, unknown
from alula.malloc import keep_freed_memory
from alula.models.experts import check_graphs
from alula.models.geometry import Geometry, attention_scaling, max_positions
from alula.models.load import LoadedModel, load_model, share_weights
from alula.models.lora import Adapter, check_fits, copy_linears, merge
from alula.sparsity.evict import needs_queries
from alula.sparsity.policy import Sparsity
from alula.terminal import progress_bar

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)


class Engine(EngineCore):
    """Generates with the model's own Hugging Face modules over a paged KV cache that physically evicts.

    - `page`: KV tokens per page; a selector's block has this size.
    - `kv_memory`: size of the KV pool. Default: twice what `max_rows` dense sequences of `max_length` need, at most 80
      % of the free memory on a GPU, at most 1 GiB on the CPU.
    - `kv_dtype`: `int8` or `fp8` stores KV in 8 bits with a scale per token and head, for all policies, the dense one
      included.
    - `max_rows`: number of sequences that decode together.
    - `max_length`: most KV tokens of one sequence. Default: the model's limit, at most what the pool holds. Texts may
      be as long as the model's limit, or as `max_length` if that is more.
    - `lookahead`: decode steps planned and launched at a time; finished sequences are noticed at the end. Default: 8 on
      a GPU, 16 there with more than 256 rows (they take longer to plan), 1 on the CPU.
    - `buckets`: batch sizes that decode steps are padded to. A single bucket (prompts then run one by one) makes
      results bit-equal for any batch composition.
    - `graphs`: capture decode steps and small evictions as CUDA graphs. Default: on CUDA.
    - `compiled`: run Llama- and Qwen-shaped models in kernels of Alula's own, and compile others. Default: on CUDA.
    - `prefill_tokens`: prompt tokens computed in one pass.
    - `sparse_adapter`: a LoRA, or its folder, used in all forward passes of sparse policies and in none of the dense
      one.
    - `swap_memory`: host memory for the KV of preempted sequences and idle sessions. Default: a quarter of the memory
      that is free. When it is full, the youngest sequence is computed again from its prompt, with the same tokens.
    - `session_timeout`: seconds after which an idle session is closed.
    - `keep_prefixes`: keep prompts' KV for later requests while nothing runs (a server). By default requests share
      prefixes only while they are served together, so that results do not depend on earlier calls, not even in the last
      bits.

    `generate` and `stream` serve a list of requests. The open interface serves requests as they come: `submit` at any
    time, `results` or `step`, `abort`, `pause` and `resume`, `update_weights`, `extend` for the next turn of a session.
    An engine belongs to one thread.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        page: int = 16,
        kv_memory: str | int | None = None,
        kv_dtype: str | None = None,
        max_rows: int = 256,
        max_length: int | None = None,
        lookahead: int | None = None,
        buckets: Many[int] | None = None,
        graphs: bool | None = None,
        compiled: bool | None = None,
        prefill_tokens: int = 16384,
        sparse_adapter: Adapter | str | PathLike[str] | None = None,
        swap_memory: str | int | None = None,
        session_timeout: float = 600.0,
        keep_prefixes: bool = False,
    ) -> None:
        require(
            isinstance(loaded, LoadedModel), f"loaded={loaded!r:.80}: use Engine.load for a model's name or folder."
        )
        check_counts(page, max_rows, prefill_tokens, max_length, lookahead, buckets)
        self.name, model = loaded.name, share_weights(loaded.model)
        parameter = next(model.parameters())
        device, dtype = parameter.device, parameter.dtype
        cuda = device.type == "cuda"
        require(cuda or not graphs, "graphs=True: CUDA graphs need device=cuda; leave it out on the CPU.")
        check_kv_dtype(kv_dtype, dtype, device)
        geometry = Geometry.of(model, kv_dtype)
        self.max_rows = min(max_rows, max(buckets)) if buckets else max_rows
        """The number of sequences that decode together."""
        limit = max_length or max_positions(model.config)
        pages, longest = pool_pages(kv_memory, geometry, page, self.max_rows, limit, device)
        self.max_length = pages_for(longest, page) * page
        """The most KV tokens of one sequence, rounded up to full pages."""
        self.positions = max(self.max_length, limit, max_positions(model.config))
        """The longest text. Under an evictor it may be longer than `max_length`."""
        self.lookahead = lookahead or default_lookahead(self.max_rows, cuda)
        self.prefill_tokens = prefill_tokens
        cache = KVCache(geometry, dtype, attention_scaling(model), pages, page, device)
        if cuda:
            pin_with_threads()
        else:
            keep_freed_memory()
        sparse_model: PreTrainedModel | None = None
        if sparse_adapter is not None:
            sparse_model = share_weights(model)
            copy_linears(sparse_model)
        runner = ModelRunner(
            model,
            sparse_model,
            cache,
            rows=self.max_rows,
            max_length=self.max_length,
            steps=self.lookahead,
            buckets=tuple(sorted(buckets)) if buckets else (default_buckets(self.max_rows) if cuda else ()),
            graphs=check_graphs(model, graphs, cuda),
            compiled=cuda if compiled is None else compiled,
        )
        scheduler = Scheduler(
            BlockManager(pages),
            page=page,
            rows=self.max_rows,
            width=self.max_length // page,
            positions=self.positions,
            lookahead=self.lookahead,
            prefill_tokens=prefill_tokens,
            buckets=runner.buckets,
            swap_bytes=lambda s: host_bytes(s, geometry, page, dtype.itemsize, cuda),
            swap_memory=default_swap_memory() if swap_memory is None else parse_bytes(swap_memory, "swap_memory"),
        )
        inputs = InputProcessor(loaded, page)
        super().__init__(runner, scheduler, inputs, session_timeout=session_timeout, keep_prefixes=keep_prefixes)
        if sparse_adapter is not None:
            self.update_sparse_adapter(sparse_adapter)

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
        progress: bool | None = None,
    ) -> list[Rollout]:
        """`sampling.n` rollouts per prompt, in order. `sparsity` is one policy or one per prompt; None is dense.

        `record` (one value, or one per prompt) also returns the evictor's history (`Rollout.history`) or the
        selector's choices. `keep_hidden` (likewise) is the number of rollouts per prompt that return their hidden
        states (`Rollout.hidden`). `indices` number the prompts in the keys of their random numbers (seed, prompt index,
        sample, position); by default 0, 1, ...
        """
        sampling = sampling or Sampling()
        requests = self.requests(prompts, sampling, sparsity, record=record, keep_hidden=keep_hidden, indices=indices)
        index_of = {request.prompt_index: i for i, request in enumerate(requests)}
        rollouts: list[Rollout | None] = [None] * (len(requests) * sampling.n)
        with progress_bar(len(rollouts), sys.stderr.isatty() if progress is None else progress) as advance:
            for rollout in self.stream(requests):
                rollouts[index_of[rollout.prompt_index] * sampling.n + rollout.sample_index] = rollout
                advance(len(rollout))
        return [r for r in rollouts if r is not None]

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a string or of chat messages; token ids are returned as they are."""
        return self.inputs.tokenize(prompt)

    def check(self, sparsity: Sparsity) -> None:
        """Raise for a policy that does not fit this engine."""
        self.inputs.check_policy(sparsity)
        if needs_queries(sparsity):
            rope(self.model)

    def is_dense(self, sparsity: Sparsity) -> bool:
        """Whether rollouts under this policy are the dense policy's: all KV is read, in the model's dtype."""
        return sparsity.dense and self.geometry.kv_dtype is None

    def need(self, request: Request) -> KVNeed:
        """KV tokens and pages of a request, and the limits above which it raises."""
        return self._scheduler.need(Sequence(request, 0))

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
        """Log-probs of the rollouts' tokens: under the dense policy (`None`) in one packed pass, under a sparse one by
        decoding the given tokens again. An engine with `kv_dtype` decodes for `DENSE` too, and reads quantised KV.
        `temperature` defaults to each rollout's own.

        Given tokens of later turns are computed together, as in a session; when decoding they have no log-prob (NaN).
        """
        from alula.engine.scoring import score_dense, score_forced

        self.inputs.check_rollouts(rollouts, temperature)
        self.inputs.check_topk("topk", topk)
        if sparsity is None or self.is_dense(sparsity):
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
        floor: rounding errors of decoding against the packed pass, and those of a quantised KV cache. `sparsity=None`
        means each rollout's own policy, and needs no decoding if the rollouts kept their hidden states. Given tokens
        of later turns have no α: use those of `Rollout.sampled`. `temperature` defaults to each rollout's own.
        """
        from alula.engine.scoring import score_kept, stream_acceptance

        if sparsity is None and all(r.hidden is not None for r in rollouts):
            return [alpha for alpha, _ in score_kept(self, rollouts, temperature)]
        sparsity = [r.sparsity for r in rollouts] if sparsity is None else sparsity
        alphas: list[Tensor | None] = [None] * len(rollouts)
        for index, alpha, _ in stream_acceptance(self, rollouts, sparsity, temperature):
            alphas[index] = alpha
        return [alpha for alpha in alphas if alpha is not None]

    # -- weights ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, lazily: bool = False, version: int | None = None
    ) -> None:
        """Copy new weights over the old ones, in place: captured graphs stay valid. `version` becomes the
        `policy_version`, by default the next number.

        Rollouts in progress go on with the KV they have; tokens launched before were sampled by the old version.

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
        self.policy_version = self.policy_version + 1 if version is None else version
        self.pool.forget()  # the caller may use a version's number again
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
        self._adapter_version += 1
        merge(adapter, self.model, self.sparse_model)


def default_lookahead(rows: int, cuda: bool) -> int:
    """Decode steps between two looks of the host; on a GPU more for many rows, whose planning takes longer."""
    return (8 if rows <= 256 else 16) if cuda else 1


def default_buckets(rows: int) -> tuple[int, ...]:
    """Batch sizes up to `rows`, or a little more: each is captured, so they are few."""
    return (*BUCKETS, *range(BUCKETS[-1] + 256, rows + 256, 256))


def check_counts(
    page: int,
    max_rows: int,
    prefill_tokens: int,
    max_length: int | None,
    lookahead: int | None,
    buckets: Many[int] | None,
) -> None:
    """Raise for sizes that are not positive integers."""
    require(buckets is None or isinstance(buckets, Many), f"buckets={buckets!r}: give a list, such as [{buckets}].")
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
