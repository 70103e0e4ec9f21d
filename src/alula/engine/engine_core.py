"""The open engine: requests come at any time, their rollouts go out as they finish."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from alula.engine.batch_state import BatchFeatures
from alula.engine.extension import ExtendedTokens, extend
from alula.engine.input_processor import InputProcessor
from alula.engine.measure_queries import measure_queries, own_text
from alula.engine.model_runner import DecodedChunk, ModelRunner
from alula.engine.prefill import FirstTokens, prefill, start_rows
from alula.engine.results import as_rollout, collect, give
from alula.engine.rollout import Prompt, Rollout, Sampling
from alula.engine.schedule_plan import Prefill
from alula.engine.scheduler import Scheduler
from alula.engine.sequence import BatchKind, Request, Sequence, kind_of
from alula.engine.swapping import move_rows, park, restore, swap_out
from alula.errors import require, require_whole
from alula.heap import frozen_heap
from alula.sparsity.evict import needs_queries
from alula.sparsity.evict.query_statistics import QueryStatistics
from alula.sparsity.policy import Sparsity


class EngineCore:
    """Serves requests: `step` launches what the scheduler plans, and reads what was launched before.

    `alula.engine.engine.Engine` builds its parts, and adds lists of prompts, scores and new weights.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        inputs: InputProcessor,
        *,
        session_timeout: float = 600.0,
        keep_prefixes: bool = False,
    ) -> None:
        self.runner, self.model = runner, runner.model
        self.sparse_model = runner.sparse_model
        """The model with its own linear layers, into which the sparse adapter is merged; None without an adapter."""
        self.cache, self.geometry, self.page = runner.cache, runner.cache.geometry, runner.cache.page
        self.device, self.dtype = runner.cache.device, runner.cache.dtype
        self.inputs, self.pool, self._scheduler = inputs, scheduler.pool, scheduler
        self.policy_version = self._adapter_version = 0
        self.paused = False
        self.sessions: dict[int, Sequence] = {}
        """Open sessions by their id: rollouts whose KV is kept after their end."""
        self.session_timeout, self.keep_prefixes = session_timeout, keep_prefixes
        self._live: dict[int, list[Sequence]] = {}
        """Unfinished rollouts by request id."""
        self._kinds: Counter[BatchKind] = Counter()
        """Unfinished rollouts of each kind."""
        self._inbox: dict[int, deque[Rollout]] = {}
        """Where a request's rollouts go."""
        self._finished: deque[Rollout] = deque()
        """Rollouts of submitted requests that were not fetched yet."""
        self._launched: deque[FirstTokens | ExtendedTokens | DecodedChunk] = deque()
        self._in_flight = 1 if self.device.type == "cuda" else 0
        """Launches that the device works on while the host reads the one before."""
        self._session_ids = count()
        self._weights_seen = 0
        self._queries_seen: tuple[int, int] | None = None
        """The weights whose queries were measured."""

    @property
    def pinned(self) -> bool:
        """Whether results are bit-equal for any batch composition: a single bucket, and prompts one by one."""
        return len(self.runner.buckets) == 1

    @property
    def tokenizer(self) -> Any | None:
        return self.inputs.tokenizer

    # -- requests -----------------------------------------------------------------------------------------

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
        if plan.moves:
            move_rows(runner, plan.moves)
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
        self._prepare(Sequence(request, 0))
        self._enlist(self._scheduler.submit(request), inbox)

    def _prepare(self, sequence: Sequence) -> None:
        """Raise for a sequence that can never run; then prepare the rows' buffers for it. Nothing is queued yet, since
        there may be no memory for them."""
        self._scheduler.check(sequence)
        if not self._live:
            self._check_prefixes()
        kind = sequence.request.kind
        self.runner.batch(kind, self._kinds).prepare(BatchFeatures.of([sequence]), keep=kind in self._kinds)
        self.runner.reserve_positions(sequence.max_length)
        self.runner.prepare_eviction(sequence)

    def _enlist(self, sequences: list[Sequence], inbox: deque[Rollout]) -> None:
        """Note sequences that were queued, and where their rollouts go."""
        request = sequences[0].request
        self._kinds[request.kind] += len(sequences)
        self._live[request.id] = sequences
        self._inbox[request.id] = inbox

    def _results(self, inbox: deque[Rollout]) -> Iterator[Rollout]:
        """Rollouts that go to `inbox`, until no request is left whose rollouts do."""
        with frozen_heap():
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
        if not all(type(token) is int for token in tokens):
            require_whole(**{f"session={session}: tokens[{i}]": token for i, token in enumerate(tokens)})
        tokens = [int(token) for token in tokens]
        self.inputs.check_ids(f"session={session}", tokens)
        request = self.inputs.next_turn(before, sampling or before.sampling)
        last_turn = (sequence.request, sequence.turn_start)
        sequence.begin_turn(request, len(sequence.tokens) + len(tokens))
        try:
            self._prepare(sequence)
        except BaseException:
            sequence.begin_turn(*last_turn)
            raise
        give(sequence, tokens, self.model.config.hidden_size * self.dtype.itemsize)
        sequence.finish = None
        self._scheduler.extend(sequence)
        self._enlist([sequence], self._finished)
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

    # -- memory -------------------------------------------------------------------------------------------

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
            for buffers in self.runner.buffers():
                buffers.release()

    def wake(self) -> None:
        """Restore the KV pool's memory, at the same address."""
        for buffers in self.runner.buffers():
            buffers.restore()

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
