"""Decides which sequences run, wait, or leave their pages to others. Host arithmetic only, no tensors.

Work is planned in chunks of a few decode steps, one for each kind of rows. All that a chunk needs (pages, eviction
events) is a function of lengths that the host knows, so planning never waits for the device.

Memory: sequences allocate pages as they grow. When none are left, idle sessions go to host memory first; then the
youngest running sequence is swapped there and resumes, exactly, before anything newer starts. When host memory is full
too, it restarts from its prompt with the tokens it has. So the oldest always runs and no sequence starves. The scratch
pages of one eviction always stay free.
"""

from collections import deque
from collections.abc import Callable

from alula.engine.block_manager import BlockManager, pages_for, prefix_keys
from alula.engine.chunk_planner import ChunkPlanner
from alula.engine.row_pages import RowPages
from alula.engine.schedule_plan import Admission, KVNeed, Plan, Prefill, Start, SwapOut
from alula.engine.sequence import BatchKind, Group, Request, Saved, Sequence
from alula.errors import require

RESUMED_STEPS = 64
"""A swapped sequence resumes when the running ones can grow for this many steps beside it. In plans of 96 × (128 +
8,192) tokens in a pool of 150,000 that saves a fifth of the swaps, with lengths that differ half of them, with eviction
to 2,048 tokens (which all do at once) two fifths; it costs at most 2 % more steps."""


class Scheduler:
    """Queues of sequences. `width` is the number of pages of a row's page table.

    positions: tokens of the longest text that the model reads.
    buckets: batch sizes that rows are padded to. With a single one everything is computed one by one (`pinned`): no
    result depends on another sequence then, not even in the last bits.
    swap_bytes: host memory that a sequence takes while it is swapped out.
    swap_memory: host memory for all of them together.
    """

    def __init__(
        self,
        pool: BlockManager,
        *,
        page: int,
        rows: int,
        width: int,
        lookahead: int,
        positions: int = 1 << 30,
        prefill_tokens: int = 16384,
        buckets: tuple[int, ...] = (),
        swap_bytes: Callable[[Sequence], int] = lambda sequence: 0,
        swap_memory: float = float("inf"),
    ) -> None:
        self.pool, self.page, self.positions = pool, page, positions
        self.rows = RowPages(pool, page, rows, width, lookahead, buckets)
        self.planner = ChunkPlanner(self.rows)
        self.prefill_tokens, self.pinned = prefill_tokens, len(buckets) == 1
        self.swap_bytes, self.swap_memory, self.swap_used = swap_bytes, swap_memory, 0
        self.waiting: deque[Group] = deque()
        self.swapped: deque[Sequence] = deque()
        self.parked: dict[Sequence, None] = {}
        """Sessions between two turns, or waiting for a row; longest unused first."""
        self.weights = {False: "", True: ""}
        """Names the weights, without and with the sparse adapter, in the keys of shared prefixes."""
        self._growing = 0
        """Pages that the sequences running so far need for their next chunk, while others are admitted."""
        self._cut_short = False
        """Whether the last admission ended only because its prompts were enough for one pass."""

    @property
    def running(self) -> list[Sequence]:
        return self.rows.running

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.swapped or self.running)

    def need(self, sequence: Sequence) -> KVNeed:
        """KV tokens and pages of a sequence up to the end of its turn."""
        tokens = sequence.max_kv_tokens()
        pages = pages_for(tokens, self.page) + 1
        if sequence.evicts:
            most = sequence.max_generated()
            held = pages_for(most, self.page) + (sequence.prompt_len > most)  # one if it copies the end of its prompt
            pages = pages_for(sequence.prompt_len, self.page) + held + self.rows.scratch(sequence)
        return KVNeed(tokens, pages, self.rows.width * self.page, self.pool.usable)

    def check(self, sequence: Sequence) -> None:
        """Raise for a sequence that can never run."""
        length, new = sequence.prompt_len + sequence.turn_start, sequence.request.sampling.max_new_tokens
        need = self.need(sequence)
        require(
            length + new <= self.positions,
            f"a prompt of {length} tokens with max_new_tokens={new} goes beyond the model's {self.positions} "
            "positions; lower max_new_tokens or use shorter prompts.",
        )
        require(
            not need.exceeds_pool,
            f"a prompt of {length} tokens with max_new_tokens={new} needs {need.pages} pages of {self.page} tokens, "
            f"but kv_memory holds {need.max_pages}; raise kv_memory or lower max_new_tokens, the budget or the "
            "prompt's length.",
        )
        require(
            not need.exceeds_length,
            f"a prompt of {length} tokens with max_new_tokens={new} may hold {need.tokens} KV tokens, more than "
            f"max_length={need.max_tokens}; lower max_new_tokens or raise max_length.",
        )

    def submit(self, request: Request) -> list[Sequence]:
        """Queue a request; raises if it can never run."""
        sequences = [Sequence(request, sample) for sample in range(request.sampling.n)]
        self.check(sequences[0])
        self.waiting.append(Group(request, list(sequences)))
        return sequences

    # -- admission ----------------------------------------------------------------------------------------

    def admit(self) -> Admission:
        """Bring back swapped sequences, then start waiting ones, oldest first, as rows and pages allow."""
        admission = Admission()
        started: list[Group] = []
        self._cut_short = False
        if not (self.swapped or self.waiting):
            return admission
        self._growing = sum(self.rows.growth(s, self.rows.steps(s)) for s in self.running)
        self._fill(admission, started)
        for group in started:  # only now: a later prompt of this admission must not get these pages
            self.pool.release(group.pages)
            group.pages = []
        return admission

    def _fill(self, admission: Admission, started: list[Group]) -> None:
        """Fill the admission; groups whose rollouts have all started go to `started`."""
        while self.swapped and len(self.running) < self.rows.rows:
            sequence = self.swapped[0]
            if not self._make_room(self.rows.claim(sequence) + self._slack(), admission.swap_out):
                return
            self.swapped.popleft()
            self._resume(sequence, admission)
        tokens, levels = 0, {}  # type: int, dict[int, int]
        while self.waiting and len(self.running) < self.rows.rows and not self.swapped:
            group = self.waiting[0]
            first = group.pending[0]
            if first.saved is not None:  # the next turn of a session
                if not self._make_room(self.rows.claim(first), admission.swap_out, keep=first):
                    return
                self.waiting.popleft()
                if first.saved is None:  # making room dropped it
                    self.waiting.appendleft(group)
                    continue
                self.parked.pop(first, None)
                self._resume(first, admission)
                continue
            self.parked.pop(first, None)  # a session whose KV was dropped starts again like a new rollout
            if not group.prefilled:
                computed = self._prefill(group, self.prefill_tokens - tokens if tokens else None, levels, admission)
                if computed is None:
                    return
                tokens += computed
            while group.pending and len(self.running) < self.rows.rows and self._fits(group, admission):
                admission.start.append(self._start(group, group.pending.pop(0)))
            if group.pending:
                return
            started.append(self.waiting.popleft())

    def _prefill(self, group: Group, limit: int | None, levels: dict[int, int], admission: Admission) -> int | None:
        """Plan a prompt's prefill; returns the tokens to compute, or None if there is no room for it now."""
        prompt, request = len(group.request.prompt_ids), group.request
        keys = self._prefix_keys(request)
        evictor = request.evictor
        again = max(1, evictor.queries if evictor else 0)  # evictors need these queries, the first token its logits
        cached_pages = self.pool.find(keys[: max(0, prompt - again) // self.page])
        pages = pages_for(prompt, self.page)
        self.pool.share(cached_pages)
        self._place(group.pending[0], [0] * (prompt // self.page))
        claim = pages - len(cached_pages) + self.rows.claim(group.pending[0])
        self._place(group.pending[0], [])
        computed = prompt - len(cached_pages) * self.page
        self._cut_short = limit is not None and computed > limit
        if self._cut_short or not self._make_room(claim, admission.swap_out, keep=group.pending[0]):
            self._cut_short &= claim + self._growing <= self.rows.available()
            self.pool.release(cached_pages)
            return None
        group.pages, group.prefilled = cached_pages + self.pool.allocate(pages - len(cached_pages)), True
        self.pool.remember(keys, group.pages)
        level = max((1 + levels[page] for page in cached_pages if page in levels), default=0)
        levels |= dict.fromkeys(group.pages[len(cached_pages) : prompt // self.page], level)
        cached = len(cached_pages) * self.page
        for sequence in group.pending:
            sequence.kv.cached_prompt_tokens = cached
        admission.prefill.append(Prefill(request, group.pages, list(group.pending), cached, level))
        return computed

    def _prefix_keys(self, request: Request) -> list[bytes]:
        """Keys of the prompt's full pages; none if its evictor needs sums over the whole prompt's attention."""
        if self.pinned or (request.evictor is not None and request.evictor.accumulates):
            return []
        return prefix_keys(request.prompt_ids, self.page, self.weights[request.kind.adapted])

    def _place(self, sequence: Sequence, shared: list[int]) -> None:
        """Put a sequence at the end of its prompt, with the prompt's full pages."""
        sequence.pages, sequence.shared = shared, len(shared)
        sequence.position = sequence.kv_len = sequence.prompt_len

    def _fits(self, group: Group, admission: Admission) -> bool:
        """Whether the group's next rollout can start."""
        sequence = group.pending[0]
        self._place(sequence, group.pages[: sequence.prompt_len // self.page])
        fits = self._make_room(self.rows.claim(sequence), admission.swap_out, keep=sequence)
        self._place(sequence, [])
        return fits

    def _start(self, group: Group, sequence: Sequence) -> Start:
        """Start a rollout on its prompt's pages: full ones are shared, the last partial one is copied."""
        full, partial = divmod(sequence.prompt_len, self.page)
        self._place(sequence, group.pages[:full])
        self.pool.share(sequence.pages)
        self.rows.enter(sequence)
        self.rows.grow(sequence, sequence.prompt_len)
        self._growing += self.rows.growth(sequence, self.rows.steps(sequence))
        return Start(sequence, (group.pages[full], sequence.pages[full]) if partial else None)

    def _resume(self, sequence: Sequence, admission: Admission) -> None:
        """Give a sequence with a saved state a row again, and pages if it lost them."""
        assert sequence.saved is not None
        self.swap_used -= sequence.saved.bytes
        sequence.saved.bytes = 0
        self.rows.enter(sequence)
        self.rows.grow(sequence, sequence.kv_len)
        self._growing += self.rows.growth(sequence, self.rows.steps(sequence))
        admission.restore.append(sequence)

    def _slack(self) -> int:
        """Free pages that a swapped sequence leaves when it resumes: with fewer it would soon be swapped out again."""
        growth = sum(self.rows.growth(s, min(s.remaining, RESUMED_STEPS)) for s in self.running)
        return min(growth, self.pool.usable // 16)

    def _make_room(self, pages: int, swap_out: list[SwapOut], keep: Sequence | None = None) -> bool:
        """Whether this many pages are available for a newcomer, if need be by swapping idle sessions out, and, while
        nothing runs that could end, by releasing waiting prompts. The session or prompt of `keep` stays.

        Running sequences grow first: one admitted now must not be swapped out again by the plan that follows.
        """
        while pages + self._growing > self.rows.available():
            if self._release_parked(swap_out, keep) or (not self.running and self._release_prompt(keep)):
                continue
            return False
        return True

    # -- chunks of steps ----------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Pages and events for the next `lookahead` decode steps of everything that runs, and for given tokens."""
        plan = Plan()
        for sequence in [s for s in self.running if s.remaining == 0 and not s.request.session]:
            self.rows.leave(sequence)  # its only token came with the prompt
        if self._prefills_first():
            return plan
        for sequence in list(self.running):
            if sequence.row is not None:
                self._secure(sequence, plan.swap_out)
        extending: dict[BatchKind, list[Sequence]] = {}
        decoding: dict[BatchKind, list[Sequence]] = {}
        for sequence in self.running:
            if sequence.steps:
                (extending if self.rows.extends(sequence) else decoding).setdefault(sequence.request.kind, []).append(
                    sequence
                )
        plan.moves = [move for sequences in decoding.values() for move in self.rows.close_gaps(sequences)]
        plan.extensions = [
            self.planner.extension(kind, together)
            for kind, sequences in extending.items()
            for together in ([[s] for s in sequences] if self.pinned else [sequences])
        ]
        plan.chunks = [self.planner.chunk(kind, sequences) for kind, sequences in decoding.items()]
        for sequence in self.running:
            sequence.promised = 0
        self.rows.promised = 0
        return plan

    def _prefills_first(self) -> bool:
        """Whether decoding waits for another pass of prompts: steps of a batch that would grow by a quarter or more are
        paid twice, for its rows now and for those that start later."""
        if not self._cut_short:
            return False
        # a rollout of one token never decodes: a stream of them would stop decoding for good
        coming = sum(len(group.pending) for group in self.waiting if group.request.sampling.max_new_tokens > 1)
        return 4 * min(coming, self.rows.rows - len(self.running)) >= len(self.running)

    def _secure(self, sequence: Sequence, swap_out: list[SwapOut]) -> None:
        """Allocate the pages that a sequence needs up to its next eviction or the end of the chunk."""
        steps = sequence.steps = self.rows.steps(sequence)
        while (need := self.rows.growth(sequence, steps)) > self.rows.available():
            if self._release_parked(swap_out) or (len(self.running) == 1 and self._release_prompt()):
                continue
            victim = self.running[-1]
            self._preempt(victim, swap_out)
            if victim is sequence:
                return
        if need:
            self.rows.secure(sequence, steps, need)

    # -- leaving ------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence in whatever state it is, and release its pages."""
        if sequence.saved is not None:
            self.swap_used -= sequence.saved.bytes
            sequence.saved = None
        if sequence.row is not None:
            self.rows.leave(sequence)
        elif sequence in self.swapped:
            self.swapped.remove(sequence)
        else:
            self.parked.pop(sequence, None)
            self._leave_group(sequence)
        self.pool.release(sequence.pages)
        sequence.pages, sequence.shared = [], 0

    def _leave_group(self, sequence: Sequence) -> None:
        """Remove a sequence that has not started."""
        for group in self.waiting:
            if sequence in group.pending:
                group.pending.remove(sequence)
                if not group.pending:
                    self.pool.release(group.pages)
                    group.pages = []
                    self.waiting.remove(group)
                break

    def park(self, sequence: Sequence, exact: bool) -> None:
        """A session's turn has ended: give back its row, keep its pages. `exact` is False if the cache's queries or
        sums hold later tokens than the turn; the session is then computed again."""
        started = sequence.row is not None or sequence in self.swapped
        if started:
            sequence.rewind()
        if sequence.row is not None:
            self.rows.leave(sequence, release=False)
            extra = sequence.pages[pages_for(sequence.kv_len, self.page) :]
            self.pool.release(extra)
            sequence.pages = sequence.pages[: len(sequence.pages) - len(extra)]
        elif started:
            self.swapped.remove(sequence)
        else:
            self._leave_group(sequence)
        if not (started and exact):
            self._drop(sequence)
        sequence.fixed = len(sequence.tokens)
        self.parked[sequence] = None

    def extend(self, sequence: Sequence) -> None:
        """Queue the next turn of a session."""
        self.waiting.append(Group(sequence.request, [sequence]))

    def swap_all(self) -> list[SwapOut]:
        """Take the pages of all sequences and sessions: the KV pool is about to be released."""
        swap_out: list[SwapOut] = []
        while self.running:
            self._preempt(self.running[-1], swap_out)
        while self._release_parked(swap_out):
            pass
        while self._release_prompt():
            pass
        self.pool.forget()
        return swap_out

    def _preempt(self, sequence: Sequence, swap_out: list[SwapOut]) -> None:
        """Swap a running sequence out; if host memory is full, restart it with the tokens that the host knows."""
        size = self.swap_bytes(sequence)
        if self.swap_used + size > self.swap_memory:
            self.rows.leave(sequence)
            sequence.kv.restarts += 1
            sequence.restart()
            self.waiting.appendleft(Group(sequence.request, [sequence]))
            return
        swap_out.append(SwapOut(sequence, sequence.row, sequence.pages, sequence.kv_len))
        sequence.kv.swaps += 1
        self.rows.leave(sequence)
        self.swap_used += size
        sequence.saved = Saved(bytes=size)
        self.swapped.appendleft(sequence)

    def _release_parked(self, swap_out: list[SwapOut], keep: Sequence | None = None) -> bool:
        """Take the pages of the session that was unused for longest: to host memory, or dropped if that is full."""
        for sequence in self.parked:
            if sequence.pages and sequence is not keep:
                size = self.swap_bytes(sequence)
                if self.swap_used + size > self.swap_memory:
                    self._drop(sequence)
                    return True
                assert sequence.saved is not None
                swap_out.append(SwapOut(sequence, None, sequence.pages, sequence.kv_len))
                sequence.saved.bytes = size
                self.swap_used += size
                sequence.kv.swaps += 1
                self.pool.release(sequence.pages)
                sequence.pages, sequence.shared = [], 0
                return True
        return False

    def _drop(self, sequence: Sequence) -> None:
        """Forget a session's KV; its next turn computes it again."""
        if sequence.saved is not None:
            self.swap_used -= sequence.saved.bytes
        self.pool.release(sequence.pages)
        sequence.kv.restarts += 1
        sequence.restart()

    def drop_unsaved(self) -> None:
        """Forget the KV of sessions whose swap was planned but has not run."""
        for sequence in self.parked:
            if not sequence.pages and sequence.saved is not None and not sequence.saved.parts:
                self._drop(sequence)

    def _release_prompt(self, keep: Sequence | None = None) -> bool:
        """Release the pages of a prompt whose other rollouts have yet to start; it is prefilled again later."""
        for group in self.waiting:
            if group.prefilled and keep not in group.pending:
                self.pool.release(group.pages)
                group.pages, group.prefilled = [], False
                return True
        return False
