"""The engine: prompts in, rollouts out, under any sparsity."""

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.engine.batch_state import BatchFeatures
from alula.engine.block_manager import BlockManager, pages_for
from alula.engine.extension import ExtendedTokens, extend
from alula.engine.input_processor import InputProcessor
from alula.engine.kv_cache import KVCache, check_kv_dtype, parse_bytes, pool_pages
from alula.engine.measure_queries import measure_queries, own_text, rope
from alula.engine.model_runner import DecodedChunk, ModelRunner
from alula.engine.prefill import FirstTokens, prefill, start_rows
from alula.engine.results import as_rollout, collect, give
from alula.engine.rollout import Prompt, Rollout, Sampling, Scores
from alula.engine.schedule_plan import KVNeed, Prefill
from alula.engine.scheduler import Scheduler
from alula.engine.sequence import BatchKind, Request, Sequence, kind_of
from alula.engine.swapping import default_swap_memory, host_bytes, park, restore, swap_out
from alula.errors import SettingError, reject_unknown_arguments, require, require_whole, unknown
from alula.models.experts import check_graphs
from alula.models.geometry import Geometry, attention_scaling
from alula.models.load import LoadedModel, load_model, share_weights
from alula.models.lora import Adapter, check_fits, copy_linears, merge
from alula.sparsity.evict import needs_queries
from alula.sparsity.evict.query_statistics import QueryStatistics
from alula.sparsity.policy import Sparsity
from alula.terminal import progress_bar

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)


class Engine:
    """Generates with the model's own Hugging Face modules over a paged KV cache that physically evicts.

    kv_memory: size of the KV pool. Default: twice what `max_rows` dense sequences of `max_length` need, at most 80 % of
        the free memory on a GPU, at most 1 GiB on the CPU.
    kv_dtype: `fp8` stores KV in 8 bits with a scale per token and head, for all policies, the dense one included.
    max_rows: number of sequences that decode together.
    max_length: most KV tokens of one sequence. Default: the model's limit, at most what the pool holds.
    lookahead: decode steps planned and launched at a time; finished sequences are noticed at the end of each.
    buckets: batch sizes that decode steps are padded to. A single bucket (prompts then run one by one) makes results
        bit-equal for any batch composition.
    sparse_adapter: a LoRA, or its folder, used in all forward passes of sparse policies and in none of the dense one.
    swap_memory: host memory for the KV of preempted sequences and idle sessions. Default: a quarter of the memory that
        is free. When it is full, the youngest sequence is computed again from its prompt, with the same tokens.
    session_timeout: seconds after which an idle session is closed.
    keep_prefixes: keep prompts' KV for later requests while nothing runs (a server). By default requests share prefixes
        only while they are served together, so that results do not depend on earlier calls, not even in the last bits.

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
        check_counts(page, max_rows, prefill_tokens, max_length, lookahead, buckets)
        self.model = share_weights(loaded.model)
        self.name = loaded.name
        parameter = next(self.model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        cuda = self.device.type == "cuda"
        require(cuda or not graphs, "graphs=True: CUDA graphs need device=cuda; leave it out on the CPU.")
        check_kv_dtype(kv_dtype, self.dtype, self.device)
        self.geometry = Geometry.of(self.model, kv_dtype)
        self.page, self.prefill_tokens = page, prefill_tokens
        self.lookahead = lookahead or (8 if cuda else 1)
        self.inputs = InputProcessor(loaded, page)
        self._allocate(kv_memory, min(max_rows, max(buckets)) if buckets else max_rows, max_length)
        self._adapter_version = 0
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
            rows=self.max_rows,
            max_length=self.max_length,
            steps=self.lookahead,
            buckets=tuple(sorted(buckets)) if buckets else (BUCKETS if cuda else ()),
            graphs=check_graphs(self.model, graphs, cuda),
            compiled=cuda if compiled is None else compiled,
        )
        self.policy_version = 0
        self.paused = False
        self.sessions: dict[int, Sequence] = {}
        """Open sessions by their id: rollouts whose KV is kept after their end."""
        self.session_timeout, self.keep_prefixes = session_timeout, keep_prefixes
        self._scheduler = Scheduler(
            self.pool,
            page=page,
            rows=self.max_rows,
            width=self.max_length // page,
            lookahead=self.lookahead,
            prefill_tokens=prefill_tokens,
            pinned=self.pinned,
            swap_bytes=lambda s: host_bytes(s, self.geometry, page, self.dtype.itemsize, cuda),
            swap_memory=default_swap_memory() if swap_memory is None else parse_bytes(swap_memory, "swap_memory"),
        )
        self._live: dict[int, list[Sequence]] = {}
        """Unfinished rollouts by request id."""
        self._kinds: Counter[BatchKind] = Counter()
        """Unfinished rollouts of each kind."""
        self._inbox: dict[int, deque[Rollout]] = {}
        """Where a request's rollouts go."""
        self._finished: deque[Rollout] = deque()
        """Rollouts of submitted requests that were not fetched yet."""
        self._launched: deque[FirstTokens | ExtendedTokens | DecodedChunk] = deque()
        self._in_flight = 1 if cuda else 0
        """Launches that the device works on while the host reads the one before."""
        self._session_ids = count()
        self._weights_seen = 0
        self._queries_seen: tuple[int, int] | None = None
        """The weights whose queries were measured."""

    def _allocate(self, kv_memory: str | int | None, max_rows: int, max_length: int | None) -> None:
        """Allocate the KV pool."""
        limit = max_length or int(getattr(self.model.config, "max_position_embeddings", 1 << 20))
        pages, longest = pool_pages(kv_memory, self.geometry, self.page, max_rows, limit, self.device)
        self.pool = BlockManager(pages)
        scaling = attention_scaling(self.model)
        self.cache = KVCache(self.geometry, self.dtype, scaling, pages, self.page, self.device)
        self.max_rows = max_rows
        """The number of sequences that decode together."""
        self.max_length = pages_for(longest, self.page) * self.page
        """The most KV tokens of one sequence, rounded up to full pages."""

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
        session: bool = False,
    ) -> list[Request]:
        """Validated requests for `stream` or `submit`. An invalid one raises before anything has started.

        With `session` the rollouts keep their KV after their end (`Rollout.session`), for `extend`.
        """
        requests = self.inputs.requests(prompts, sampling, sparsity, record, keep_hidden, indices)
        for request in requests:
            request.session = session
        return requests

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

    def stream(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Serve requests together and yield each rollout as it finishes. `abort(request.id)` ends one early."""
        requests = list(requests)
        inbox: deque[Rollout] = deque()
        try:
            for request in requests:
                self._submit(request, inbox)
            yield from self._results(inbox)
        finally:
            for request in requests:
                self._forget(request.id)

    @property
    def pinned(self) -> bool:
        """Whether results are bit-equal for any batch composition: a single bucket, and prompts one by one."""
        return len(self.runner.buckets) == 1

    @property
    def tokenizer(self) -> Any | None:
        return self.inputs.tokenizer

    def need(self, request: Request) -> KVNeed:
        """KV tokens and pages of a request, and the limits above which it raises."""
        return self._scheduler.need(Sequence(request, 0))

    # -- the open engine ----------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request, at any time; returns its id. `results` or `step` yields its rollouts."""
        self._submit(request, self._finished)
        return request.id

    def results(self) -> Iterator[Rollout]:
        """Rollouts of submitted requests as they finish, until all have. More may be submitted meanwhile."""
        yield from self._results(self._finished)

    def drain(self) -> list[Rollout]:
        """Finish all submitted requests and return their rollouts."""
        return list(self.results())

    def abort(self, request_id: int) -> None:
        """End a request's unfinished rollouts; they are yielded with their tokens so far and finish='aborted'. Their
        pages are free once the chunks already launched have run."""
        for sequence in self._live.get(request_id, []):
            if sequence.finish is None:
                sequence.finish = "aborted"

    def finished(self) -> list[Rollout]:
        """Rollouts of submitted requests that have finished and were not returned yet. Does not wait."""
        rollouts = list(self._finished)
        self._finished.clear()
        return rollouts

    def unfinished(self, request_id: int) -> list[Sequence]:
        """A request's rollouts in progress, for a server that streams their tokens between two steps. Read only."""
        return list(self._live.get(request_id, []))

    def pause(self) -> None:
        """Launch nothing more, and read what was launched. All KV is kept: `resume` goes on where `pause` stopped.

        Weights may be updated in between: rollouts report which version sampled which tokens (`Rollout.spans`).
        """
        self.paused = True
        self._collect(0)

    def resume(self) -> None:
        """Go on after `pause`."""
        self.paused = False

    def step(self) -> bool:
        """Advance everything by one round of launches; returns whether unfinished rollouts are left."""
        require(self.cache.resident, "the engine is asleep; call wake() first.")
        self._sweep_aborted()
        if not self.paused:
            self._close_expired_sessions()
            with self._drop_all_on_failure():
                launches = self._launch()
            self._collect(self._in_flight * launches)
        return bool(self._live)

    def _launch(self) -> int:
        """Launch what the scheduler plans next; returns how many launches may stay unread: the chunks, or a prefill."""
        scheduler, runner, version = self._scheduler, self.runner, self.policy_version
        weights = {False: f"{version}", True: f"{version} adapter {self._adapter_version}"}
        if weights != scheduler.weights:
            scheduler.weights = weights
            if any(needs_queries(live[0].request.sparsity) for live in self._live.values()):
                self._refresh_queries()
        admission = scheduler.admit()
        for out in admission.swap_out:
            swap_out(runner, out)
        for sequence in admission.restore:
            restore(runner, sequence)
        for prompts in self._prefill_batches(admission.prefill):
            self._launched.append(prefill(runner, prompts, version))
        if admission.start:
            start_rows(runner, admission.start)
        plan = scheduler.plan()
        for out in plan.swap_out:
            swap_out(runner, out)
        for extension in plan.extensions:
            self._launched.append(extend(runner, extension, version))
        for chunk in plan.chunks:
            self._launched.append(runner.decode(chunk, version))
        return len(plan.chunks) or min(1, len(admission.prefill))

    @contextmanager
    def _drop_all_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._drop_all()
            raise

    def _drop_all(self) -> None:
        """A launch failed (out of memory, an interrupt): end all that was running. Idle sessions stay; those whose swap
        was planned and did not run are computed again."""
        self._launched.clear()
        for request_id in list(self._live):
            self._forget(request_id)
        self._scheduler.rows.promised = 0
        self._scheduler.drop_unsaved()
        self.pool.forget()

    def _submit(self, request: Request, inbox: deque[Rollout]) -> None:
        require(request.id not in self._live, f"request {request.id} is being served; submit a new one.")
        if needs_queries(request.sparsity):
            self._refresh_queries()
        request.kind = kind_of(request.sparsity, self.sparse_model is not None and not request.sparsity.dense)
        self._admit(self._scheduler.submit(request), inbox)

    def _admit(self, sequences: list[Sequence], inbox: deque[Rollout]) -> None:
        """Prepare the rows' buffers for sequences, and note where their rollouts go."""
        if not self._live:
            self._check_prefixes()
        request = sequences[0].request
        state = self.runner.batch(request.kind, self._kinds)
        state.prepare(BatchFeatures.of(sequences[:1]), keep=request.kind in self._kinds)
        self.runner.prepare_eviction(sequences[0])
        self._kinds[request.kind] += len(sequences)
        self._live[request.id] = sequences
        self._inbox[request.id] = inbox

    def _results(self, inbox: deque[Rollout]) -> Iterator[Rollout]:
        """Rollouts that go to `inbox`, until no request is left whose rollouts do."""
        while inbox or any(other is inbox for other in self._inbox.values()):
            if not inbox:
                self._require_running()
                self.step()
            while inbox:
                yield inbox.popleft()

    def _require_running(self) -> None:
        require(self.cache.resident, "the engine is asleep; call wake() first.")
        require(not self.paused, "the engine is paused; call resume() first.")

    def _check_prefixes(self) -> None:
        """Forget cached prefixes; with `keep_prefixes`, only if the weights were changed since they were computed."""
        seen = sum(parameter._version for parameter in self.model.parameters())
        if not self.keep_prefixes or seen != self._weights_seen:
            self._weights_seen = seen
            self.pool.forget()

    def _prefill_batches(self, prompts: list[Prefill]) -> list[list[Prefill]]:
        """Prompts in packed passes, one for each level and weights; one by one if results must be bit-equal for any
        batch composition."""
        if self.pinned:
            return [[prompt] for prompt in prompts]
        batches: dict[tuple[int, bool], list[Prefill]] = {}
        for prompt in prompts:
            batches.setdefault((prompt.level, prompt.request.kind.adapted), []).append(prompt)
        return [batches[key] for key in sorted(batches)]

    def _collect(self, left: int) -> None:
        """Read launches until `left` are left in flight."""
        while len(self._launched) > left:
            for sequence in collect(self._launched.popleft(), self.geometry, self.page):
                self._done(sequence)

    def _sweep_aborted(self) -> None:
        for sequences in list(self._live.values()):
            for sequence in list(sequences):
                if sequence.finish == "aborted":
                    self._done(sequence)

    def _done(self, sequence: Sequence) -> None:
        """Hand a finished rollout out; a session keeps its KV."""
        request = sequence.request
        if request.session and sequence.finish in ("stop", "length"):
            self._park(sequence)
        else:
            self._release(sequence)
        self._count_out(request.kind)
        sequences = self._live[request.id]
        sequences.remove(sequence)
        rollout = as_rollout(sequence, self.geometry, self.dtype, self.tokenizer, self.policy_version)
        self._inbox[request.id].append(rollout)
        if not sequences:
            del self._live[request.id], self._inbox[request.id]

    def _count_out(self, kind: BatchKind) -> None:
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]

    def _forget(self, request_id: int) -> None:
        """Drop what is left of a request whose caller has gone."""
        for sequence in self._live.pop(request_id, []):
            self._count_out(sequence.request.kind)
            sequence.finish = "aborted"
            self._release(sequence)
        self._inbox.pop(request_id, None)

    def _release(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds; its session, if it has one, ends."""
        if sequence.session is not None:
            self.sessions.pop(sequence.session, None)
            sequence.session = None
        self._scheduler.finish(sequence)

    # -- sessions -----------------------------------------------------------------------------------------

    def extend(self, session: int, tokens: Many[int], sampling: Sampling | None = None) -> int:
        """Queue the next turn of a session: `tokens` are given (a tool's output, a user's message), then the policy
        samples on. Returns the request id; the rollout that `results` yields has the tokens of all turns.

        `sampling` limits this turn; its seed and `n` are the first turn's. Given tokens count in an evictor's budget.
        """
        require(session in self.sessions, f"session={session}: not open (closed, timed out, or never kept).")
        sequence = self.sessions[session]
        before = sequence.request
        require(sequence.finish is not None, f"session={session}: its last turn has not finished yet.")
        tokens = [int(token) for token in tokens]
        self.inputs.check_ids(f"session={session}", tokens)
        request = self.inputs.next_turn(before, sampling or before.sampling)
        last_turn = (sequence.request, sequence.turn_start)
        sequence.begin_turn(request, len(sequence.tokens) + len(tokens))
        try:
            self._scheduler.check(sequence)
        except SettingError:
            sequence.begin_turn(*last_turn)
            raise
        give(sequence, tokens, self.model.config.hidden_size * self.dtype.itemsize)
        sequence.finish = None
        self._scheduler.extend(sequence)
        self._admit([sequence], self._finished)
        return request.id

    def close(self, session: int) -> None:
        """Close a session and release its KV. A turn that is running is aborted."""
        sequence = self.sessions.pop(session, None)
        if sequence is None:
            return
        if sequence.finish is None:
            sequence.finish = "aborted"  # the sweep releases it
        else:
            self._scheduler.finish(sequence)

    def _park(self, sequence: Sequence) -> None:
        """Keep the KV of a session whose turn has ended."""
        request = sequence.request
        if sequence.session is None:
            sequence.session = next(self._session_ids)
        self.sessions[sequence.session] = sequence
        sequence.last_used = time.monotonic()
        evictor = request.evictor
        # A stop string is found by the host only: by then the device may have gone on.
        on_device = sequence.finish == "length" or (bool(sequence.tokens) and sequence.tokens[-1] in request.stop)
        exact = on_device or evictor is None or not (evictor.queries or evictor.accumulates)
        if sequence.row is not None:
            sequence.rewind()
            park(self.runner, sequence)
        self._scheduler.park(sequence, exact)

    def _close_expired_sessions(self) -> None:
        if self.sessions:
            limit = time.monotonic() - self.session_timeout
            for session in [i for i, s in self.sessions.items() if s.finish is not None and s.last_used < limit]:
                self.close(session)

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
        `temperature` defaults to each rollout's own."""
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
        means each rollout's own policy, and needs no decoding if the rollouts kept their hidden states. `temperature`
        defaults to each rollout's own.
        """
        from alula.engine.scoring import kept_acceptance, stream_acceptance

        if sparsity is None and all(r.hidden is not None for r in rollouts):
            return kept_acceptance(self, rollouts, temperature)
        sparsity = [r.sparsity for r in rollouts] if sparsity is None else sparsity
        alphas: list[Tensor | None] = [None] * len(rollouts)
        for index, alpha, _ in stream_acceptance(self, rollouts, sparsity, temperature):
            alphas[index] = alpha
        return [alpha for alpha in alphas if alpha is not None]

    # -- statistics of queries ----------------------------------------------------------------------------

    @property
    def query_statistics(self) -> QueryStatistics | None:
        """What `triattention` knows of the model's queries; None before it was needed.

        Its text is measured again when the weights have changed. Without a text from `measure_queries` or a file
        (`QueryStatistics.load`) it is what the dense policy writes by itself.
        """
        return self.cache.query_statistics

    @query_statistics.setter
    def query_statistics(self, statistics: QueryStatistics) -> None:
        g, layout = self.geometry, tuple(statistics.size.shape)
        require(
            layout == (g.layers, g.query_heads, g.head_dim // 2),
            f"query_statistics: its layers, heads and frequencies are {layout}; this model has "
            f"{(g.layers, g.query_heads, g.head_dim // 2)}.",
        )
        self.cache.query_statistics = statistics.to(self.device)
        self._queries_seen = (self.policy_version, self._adapter_version)

    def measure_queries(self, text: Many[Many[int]]) -> QueryStatistics:
        """Measure the queries of the model (with its sparse adapter) over token sequences, and keep the result."""
        measured = measure_queries(self.runner, text)
        self.query_statistics = measured
        return measured

    def _refresh_queries(self) -> None:
        """Measure the queries if the weights are new."""
        if (self.policy_version, self._adapter_version) != self._queries_seen:
            known = self.query_statistics
            self.measure_queries(own_text(self) if known is None else known.text)

    # -- weights and memory -------------------------------------------------------------------------------

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

    def sleep(self) -> None:
        """Release the KV pool's memory for the learner. Weights stay. Rollouts in progress and sessions go to host
        memory, and go on after `wake`."""
        if self.cache.resident:
            self._collect(0)
            with self._drop_all_on_failure():
                for out in self._scheduler.swap_all():
                    swap_out(self.runner, out)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            for memory in (self.cache, *self.runner.batches.values()):
                memory.buffers.release()

    def wake(self) -> None:
        """Restore the KV pool's memory, at the same address."""
        for memory in (self.cache, *self.runner.batches.values()):
            memory.buffers.restore()

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
