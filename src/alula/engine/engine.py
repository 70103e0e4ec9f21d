"""The engine: prompts in, rollouts out, under any sparsity."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from operator import index as whole
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.engine.batch_state import Rows
from alula.engine.block_manager import PagePool, pages_for
from alula.engine.features import Features
from alula.engine.kv_cache import Cache, pages_in, parse_bytes
from alula.engine.model_runner import Decoded, Runner
from alula.engine.prefill import First, enter_rows, prefill
from alula.engine.results import as_rollout, collect
from alula.engine.rollout import Prompt, Rollout, Sampling, Scores
from alula.engine.scheduler import KVNeed, Prefill, Scheduler
from alula.engine.sequence import Request, Sequence
from alula.errors import SettingError, reject_unknown_arguments, require, require_whole, unknown
from alula.models.geometry import Geometry, attention_scaling
from alula.models.load import LoadedModel, load_model, share_weights
from alula.models.lora import Adapter, check_fits, copy_linears, merge
from alula.sparsity.policy import DENSE, Sparsity, check_schedules
from alula.terminal import progress_bar

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)


class Engine:
    """Generates with the model's own Hugging Face modules over a paged KV cache that really evicts.

    `kv_memory` is the whole pool (default: twice what `max_rows` dense sequences of `max_length` need, at most 80 % of
    what is free on a GPU and 1 GiB on the CPU); `max_rows` how many sequences decode together; `max_length` the most KV
    tokens of one sequence (default: what the model allows, at most what the pool holds). `lookahead` decode steps are
    planned and launched at a time; finished sequences are noticed after that many. `buckets` are the batch sizes
    that decode steps are padded to: one value pins them (and prompts then run one by one), which makes results
    bit-equal whatever the company. `sparse_adapter` is a LoRA, or its folder, that takes part in every forward pass of
    a sparse policy and in none of the dense one's.
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
        max_rows = min(max_rows, max(buckets)) if buckets else max_rows
        self.model = share_weights(loaded.model)
        self.tokenizer, self.name, self.eos_ids = loaded.tokenizer, loaded.name, loaded.eos_ids
        self.device = next(self.model.parameters()).device
        cuda = self.device.type == "cuda"
        require(cuda or not graphs, "graphs=True: CUDA graphs need device=cuda; leave it out on the CPU.")
        self.geometry = Geometry.of(self.model)
        self.dtype = next(self.model.parameters()).dtype
        self.page = page
        memory = parse_bytes(kv_memory) if kv_memory is not None else default_memory(self.device)
        pages = pages_in(memory, self.geometry, page)
        longest = min(max_length or getattr(self.model.config, "max_position_embeddings", 1 << 20), (pages - 1) * page)
        if kv_memory is None:
            pages = min(pages, ample_pages(max_rows, longest, page))
        self.lookahead = lookahead or (8 if cuda else 1)
        self.pool = PagePool(pages)
        self.cache = Cache(self.geometry, self.dtype, attention_scaling(self.model), pages, page, max_rows, self.device)
        self.rows = Rows(
            max_rows,
            pages_for(longest, page),
            self.lookahead,
            self.device,
            self.dtype,
            self.model.config.hidden_size,
        )
        self.sparse_model: PreTrainedModel | None = None
        """The sparse policy's own linear layers, the adapter merged into them; None where it uses the dense ones."""
        if sparse_adapter is not None:
            self.sparse_model = share_weights(self.model)
            copy_linears(self.sparse_model)
            self.update_sparse_adapter(sparse_adapter)
        self.runner = Runner(
            self.model,
            self.sparse_model,
            self.cache,
            self.rows,
            buckets=tuple(sorted(buckets)) if buckets else (BUCKETS if cuda else ()),
            graphs=cuda if graphs is None else graphs,
            compiled=cuda if compiled is None else compiled,
        )
        self.prefill_tokens = prefill_tokens
        self.policy_version = 0
        self._ids = count()
        self._scheduler: Scheduler | None = None
        self._live: dict[int, list[Sequence]] = {}
        self._in_flight = 1 if cuda else 0
        """Launches that the device works on while the host reads the one before."""

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
        """A hub id, a Hugging Face folder, a GGUF file, or `shape:<name>` for random weights; options as above."""
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
        on_rollout: Callable[[Rollout], None] | None = None,
        progress: bool | None = None,
    ) -> list[Rollout]:
        """`sampling.n` rollouts per prompt, in order. `sparsity` is one policy or one per prompt; None is dense.

        `record` (one value, or one per prompt) also returns the evictor's history (`Rollout.history`) or the
        selector's choices. `keep_hidden` (likewise) is the number of rollouts per prompt that return their hidden
        states (`Rollout.hidden`). `on_rollout` is called with each rollout as it finishes; it may raise to stop.
        """
        sampling = sampling or Sampling()
        requests = self.requests(prompts, sampling, sparsity, record=record, keep_hidden=keep_hidden)
        rollouts: list[Rollout | None] = [None] * (len(requests) * sampling.n)
        with progress_bar(len(rollouts), sys.stderr.isatty() if progress is None else progress) as advance:
            for rollout in self.stream(requests):
                rollouts[rollout.prompt_index * sampling.n + rollout.sample_index] = rollout
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
    ) -> list[Request]:
        """Validated requests for `stream`. An invalid one raises before anything has started."""
        if isinstance(prompts, str):
            prompts = [prompts]
        require(len(prompts) > 0, "prompts: the list is empty.")
        require(
            not isinstance(prompts[0], (int, np.integer, dict)),
            "prompts: give a list of prompts; a single one, of token ids or chat messages, goes into a list too.",
        )
        several = isinstance(sparsity, Many) and not isinstance(sparsity, str)
        policies: list[Any] = list(sparsity) if several else [sparsity or DENSE] * len(prompts)  # type: ignore[arg-type]
        require(
            len(policies) == len(prompts),
            f"sparsity: {len(policies)} policies for {len(prompts)} prompts; give one, or one per prompt.",
        )
        for policy in policies:
            require(
                isinstance(policy, Sparsity),
                f"sparsity={policy!r}: must be made by Sparsity, as Sparsity(evict=Evict('rkv', budget=512)).",
            )
        for policy in set(policies):
            self.check(policy)
        records = per_prompt("record", record, len(prompts))
        kept = per_prompt("keep_hidden", keep_hidden, len(prompts))
        self.check_ids("stop", sampling.stop)
        self.check_topk("topk_logprobs", sampling.topk_logprobs)
        stop = frozenset(sampling.stop) | (frozenset() if sampling.ignore_eos else frozenset(self.eos_ids))
        requests = []
        for index, (prompt, policy) in enumerate(zip(prompts, policies)):
            try:
                ids = self.tokenize(prompt)
            except TypeError:
                what = f"prompt {index}, {str(prompt)[:40]!r}"
                raise SettingError(f"{what}: must be text, chat messages or token ids.") from None
            require(len(ids) > 0, f"prompt {index} is empty; every prompt needs at least one token.")
            self.check_ids(f"prompt {index}", ids)
            request = Request(next(self._ids), ids, sampling, policy, stop, index)
            request.record, request.keep_hidden = records[index], kept[index]
            requests.append(request)
        return requests

    def tokenize(self, prompt: Prompt) -> list[int]:
        """A string, chat messages, or token ids as they are."""
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], dict)):
            if self.tokenizer is None:
                raise SettingError(f"{self.name} has no tokenizer; give prompts as lists of token ids.")
            if isinstance(prompt, str):
                return list(self.tokenizer(prompt)["input_ids"])
            require(
                bool(getattr(self.tokenizer, "chat_template", None)),
                f"{self.name} has no chat template; give prompts as text or token ids.",
            )
            return list(self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
        return [whole(token) for token in prompt]  # type: ignore[arg-type]

    def check_ids(self, what: str, ids: Many[int]) -> None:
        """Refuse token ids that the model does not have."""
        vocabulary = self.model.config.vocab_size
        for token in (min(ids, default=0), max(ids, default=0)):
            require(0 <= token < vocabulary, f"{what} holds the token id {token}, outside 0..{vocabulary - 1}.")

    def check_topk(self, what: str, topk: int) -> None:
        vocabulary = self.model.config.vocab_size
        require(0 <= topk <= vocabulary, f"{what}={topk}: must lie between 0 and the vocabulary's {vocabulary}.")

    def check(self, sparsity: Sparsity) -> None:
        """Refuse a policy that does not fit this engine."""
        if select := sparsity.select:
            require(
                select.block == self.page,
                f"select.block={select.block}: this engine's pages hold {self.page} tokens; "
                f"load it with page={select.block}.",
            )
        check_schedules(sparsity, self.name)

    def stream(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Serve requests together and yield each rollout as it ends; `abort(request.id)` ends one early."""
        requests = list(requests)
        require(self._scheduler is None, "the engine is already serving a stream; finish or close that one first.")
        require(self.cache.resident, "the engine sleeps; call wake() first.")
        features = replace(Features.of(requests), adapted=self._adapted(requests))
        scheduler = self._scheduler = self._new_scheduler()
        try:
            for request in requests:
                self._live[request.id] = scheduler.submit(request)
            held = max((Sequence(r, 0).ceiling() for r in requests if r.sparsity.evict), default=0)
            self.cache.prepare(
                summary_kinds=features.summary_kinds,
                ring=features.ring,
                accumulated_tokens=held if features.accumulates else 0,
            )
            self.rows.prepare(features)
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
            rows=self.rows.count,
            width=self.rows.table.shape[1],
            lookahead=self.lookahead,
            prefill_tokens=self.prefill_tokens,
        )

    def need(self, request: Request) -> KVNeed:
        """KV tokens and pages of a request, and the limits above which it raises."""
        return self._new_scheduler().need(request)

    @property
    def max_length(self) -> int:
        """The most KV tokens of one sequence: as was asked for, in whole pages."""
        return self.rows.table.shape[1] * self.page

    def _adapted(self, requests: list[Request]) -> bool:
        """Whether these requests are served with the sparse policy's own weights."""
        if self.sparse_model is None:
            return False
        kinds = {request.sparsity.dense for request in requests}
        require(
            len(kinds) < 2,
            "sparsity: with a sparse_adapter, dense and sparse prompts have different weights; use one call each.",
        )
        return kinds == {False}

    def abort(self, request_id: int) -> None:
        """End a request's unfinished rollouts; they are yielded with what they have and finish='aborted'."""
        for sequence in self._live.get(request_id, []):
            if sequence.finish is None:
                sequence.finish = "aborted"

    def _serve(self, scheduler: Scheduler, features: Features) -> Iterator[Rollout]:
        launched: deque[First | Decoded] = deque()
        while not scheduler.idle or launched:
            yield from self._sweep_aborted(scheduler)
            admission = scheduler.admit()
            for sequence in admission.restore:
                self.runner.restore(sequence, features)
            for prompts in self._together(admission.prefill):
                launched.append(prefill(self.runner, prompts, features))
            if admission.start:
                enter_rows(self.runner, admission.start)
            chunk = scheduler.plan()
            if chunk is not None:
                launched.append(self.runner.decode(chunk, features))
            while launched and (len(launched) > self._in_flight or chunk is None):
                for sequence in collect(launched.popleft(), self.geometry, self.page):
                    yield self._done(sequence, scheduler)
        yield from self._sweep_aborted(scheduler)

    def _together(self, prompts: list[Prefill]) -> list[list[Prefill]]:
        """Prompts run in one packed pass; one by one where not even a bit may depend on the company."""
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
        """Log-probs of the rollouts' own tokens: under the dense policy in one packed pass, or under a sparse one
        by decoding them again with the tokens given. At each rollout's own temperature unless one is given."""
        from alula.engine.scoring import score_dense, score_forced

        self.check_rollouts(rollouts, temperature)
        self.check_topk("topk", topk)
        if sparsity is None or sparsity.dense:
            return score_dense(self, rollouts, topk, temperature)
        self.check(sparsity)
        return score_forced(self, rollouts, sparsity, topk, temperature, record)

    def check_rollouts(self, rollouts: Many[Rollout], temperature: float | None) -> None:
        """Refuse what cannot be scored."""
        require(len(rollouts) > 0, "rollouts: the list is empty.")
        require(temperature is None or temperature > 0, f"temperature={temperature}: scores need one above 0.")
        for index, r in enumerate(rollouts):
            require(len(r) > 0, f"rollout {index} has no tokens to score.")
            self.check_ids(f"rollout {index}", r.prompt_ids + r.token_ids)

    def acceptance(
        self,
        rollouts: Many[Rollout],
        sparsity: Sparsity | Many[Sparsity] | None = None,
        *,
        temperature: float | None = None,
    ) -> list[Tensor]:
        """α = Σ_v min(p_dense, p_sparse) at every token of the rollouts: exact, fp32 [tokens] each.

        The tokens are decoded again under `sparsity` (one policy, or one per rollout) and compared at each step with
        the dense policy's packed pass over the same text, which is made once however often a rollout is listed.
        `DENSE` gives the floor: decoding against the packed pass. Without a policy the rollouts' own is meant, which
        needs no decoding where they kept their hidden states. At each rollout's own temperature unless one is given.
        """
        from alula.engine.scoring import kept_acceptance, stream_acceptance

        if sparsity is None and all(r.hidden is not None for r in rollouts):
            return kept_acceptance(self, rollouts, temperature)
        sparsity = [r.sparsity for r in rollouts] if sparsity is None else sparsity
        found: list[Tensor | None] = [None] * len(rollouts)
        for index, alpha, _ in stream_acceptance(self, rollouts, sparsity, temperature):
            found[index] = alpha
        return [alpha for alpha in found if alpha is not None]

    # -- weights and memory -------------------------------------------------------------------------------

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, lazily: bool = False) -> None:
        """Copy new weights over the old ones, in place: captured graphs stay valid.

        All names and shapes are checked before the first copy. `lazily` takes the tensors one by one, for a learner
        that gathers each from its ranks and has no room for all of them; a wrong one then leaves a mixture.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))

        def fitting(name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
            if name not in parameters:
                raise unknown("parameter", name, parameters)
            own = parameters[name]
            require(
                own.shape == tensor.shape,
                f"parameter {name!r}: got shape {tuple(tensor.shape)}, the model has {tuple(own.shape)}.",
            )
            return own, tensor

        checked: Iterable[tuple[Tensor, Tensor]] = (fitting(*pair) for pair in named_tensors)
        for own, tensor in checked if lazily else list(checked):
            own.copy_(tensor, non_blocking=True)
        self.policy_version += 1
        if self.sparse_model is not None:
            self.update_sparse_adapter(self.sparse_adapter)

    def update_sparse_adapter(self, adapter: Adapter | str | PathLike[str]) -> None:
        """Merge `adapter`, or that of a folder, into the sparse policy's weights, in place: captured graphs stay valid.

        To be called again whenever the dense weights were changed other than by `update_weights`.
        """
        if self.sparse_model is None:
            raise SettingError("the engine has no sparse_adapter to update; load it with one, of zeros if need be.")
        if not isinstance(adapter, Adapter):
            adapter = Adapter.load(Path(adapter))
        check_fits(self.model, adapter)
        self.sparse_adapter = adapter
        merge(adapter, self.model, self.sparse_model)

    def sleep(self) -> None:
        """Lend the KV pool's memory to the learner. Weights stay; nothing may be running."""
        require(self._scheduler is None, "the engine is serving a stream; finish it before sleep().")
        self.cache.sleep()

    def wake(self) -> None:
        """Take the KV pool's memory back, at the same address."""
        self.cache.wake()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """The KV pool's memory belongs to the learner for a while; on the CPU there is enough for both."""
        if self.device.type != "cuda":
            yield
            return
        self.sleep()
        try:
            yield
        finally:
            self.wake()


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value per prompt, from one for all or a list."""
    values = list(value) if isinstance(value, Many) else [value] * count
    require(len(values) == count, f"{name}: {len(values)} values for {count} prompts; give one, or one per prompt.")
    return values


def ample_pages(rows: int, longest: int, page: int) -> int:
    """As many as so many sequences can fill, each counted twice: one that evicts compacts beside the prompt it shares.
    A larger pool would only cost time to wake."""
    each = pages_for(longest, page)
    return rows * 2 * (each + 1) + each + 64


def default_memory(device: torch.device) -> int:
    """Most of what is free on a GPU; 1 GiB on the CPU."""
    if device.type != "cuda":
        return 1 << 30
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * 0.8)
