"""Decides which sequences run, which pages they get and when they evict. Host arithmetic only, no tensors.

Work is planned in chunks of a few decode steps. All that a chunk needs (pages, eviction events) is a function of
lengths that the host knows, so planning never waits for the device.

Memory: an evicting sequence reserves at its start the most pages it will ever hold, so it is never preempted. Dense and
selecting sequences allocate pages as they grow. When none are left, the youngest of them is swapped to host memory and
resumes, exactly, before anything newer starts. So the oldest always runs and no sequence starves.
"""

from collections import Counter, deque
from heapq import heappop, heappush

import numpy as np

from alula.engine.block_manager import BlockManager, pages_for
from alula.engine.schedule_plan import Admission, Chunk, EvictionEvent, KVNeed, Part, Prefill, Start, SwapOut
from alula.engine.sequence import Group, Request, Segment, Sequence
from alula.errors import require

MIN_ROWS, SCRATCH_FRACTION = 8, 16
"""Rows compacted in one launch: at least 8, and more while their new pages stay within 1/16 of the pool. Otherwise many
rows that evict at the same step (prompts of one length) would need a launch for every few."""


class Scheduler:
    """Assigns rows and pages to sequences. `width` is the number of pages of a row's page table."""

    def __init__(
        self, pool: BlockManager, *, page: int, rows: int, width: int, lookahead: int, prefill_tokens: int = 16384
    ) -> None:
        self.pool, self.page, self.width = pool, page, width
        self.lookahead, self.prefill_tokens = lookahead, prefill_tokens
        self.free_rows = list(range(rows))  # a heap: the lowest first, which keeps batches small
        self.waiting: deque[Group] = deque()
        self.swapped: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.table = np.zeros((rows, width), np.int32)
        self._reserved = 0  # pages reserved by evicting sequences and not yet allocated
        self._scratches: Counter[int] = Counter()  # scratch pages of each running evicting sequence

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.swapped or self.running)

    def need(self, request: Request) -> KVNeed:
        """KV tokens and pages of one rollout of this request."""
        probe = Sequence(request, 0)
        tokens = probe.max_kv_tokens()
        pages = pages_for(tokens, self.page) + 1
        if probe.evicts:
            pages = pages_for(probe.prompt_len, self.page) + self._reserve(probe) + self._scratch(probe)
        return KVNeed(tokens, pages, self.width * self.page, self.pool.usable)

    def submit(self, request: Request) -> list[Sequence]:
        """Queue a request; raises if it can never run."""
        prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
        need = self.need(request)
        require(
            not need.exceeds_pool,
            f"a prompt of {prompt} tokens with max_new_tokens={new} needs {need.pages} pages of {self.page} tokens, "
            f"but kv_memory holds {need.max_pages}; raise kv_memory or lower max_new_tokens (or the budget).",
        )
        require(
            not need.exceeds_length,
            f"a prompt of {prompt} tokens with max_new_tokens={new} may hold {need.tokens} KV tokens, more than "
            f"max_length={need.max_tokens}; lower max_new_tokens or load the engine with a larger max_length.",
        )
        sequences = [Sequence(request, sample) for sample in range(request.sampling.n)]
        self.waiting.append(Group(request, list(sequences)))
        return sequences

    # -- admission ----------------------------------------------------------------------------------------

    def admit(self) -> Admission:
        """Bring back swapped sequences, then start waiting ones, oldest first, as rows and pages allow."""
        admission = Admission()
        started: list[Group] = []
        self._fill(admission, started)
        for group in started:  # only now: a later prompt of this admission must not get these pages
            self.pool.release(group.pages)
            group.pages = []
        return admission

    def _fill(self, admission: Admission, started: list[Group]) -> None:
        """Fill the admission; groups whose rollouts have all started go to `started`."""
        # Running sequences grow first: one admitted now must not be swapped out again by the plan that follows.
        room = self.available() - sum(self._growth(s) for s in self.running if not s.evicts)
        while self.swapped and self.free_rows:
            sequence = self.swapped[0]
            need = self._growth(sequence)
            if room < need:
                if self.running or not self._release_prompt():
                    return
                room = self.available()  # nothing runs, so only a waiting prompt can free pages
                continue
            self.swapped.popleft()
            self._enter(sequence)
            self._grow(sequence, sequence.kv_len)
            admission.restore.append(sequence)
            room -= need
        tokens = 0
        while self.waiting and self.free_rows and not self.swapped:
            group = self.waiting[0]
            prompt = len(group.request.prompt_ids)
            ahead = prompt + min(self.lookahead, group.request.sampling.max_new_tokens - 1)
            if not group.prefilled:
                prompt_pages = pages_for(prompt, self.page)
                if room < prompt_pages + self._claim(group.pending[0], ahead):
                    return
                if tokens and tokens + prompt > self.prefill_tokens:
                    return
                group.pages, group.prefilled = self.pool.allocate(prompt_pages), True
                admission.prefill.append(Prefill(group.request, group.pages, list(group.pending)))
                tokens += prompt
                room -= prompt_pages
            while group.pending and self.free_rows and room >= (claim := self._claim(group.pending[0], ahead)):
                admission.start.append(self._start(group, group.pending.pop(0)))
                room -= claim
            if group.pending:
                return
            started.append(self.waiting.popleft())

    def _start(self, group: Group, sequence: Sequence) -> Start:
        """Start a rollout on its prompt's pages: full ones are shared, the last partial one is copied."""
        full, partial = divmod(sequence.prompt_len, self.page)
        sequence.pages, sequence.shared = group.pages[:full], full
        self.pool.share(sequence.pages)
        sequence.position = sequence.kv_len = sequence.prompt_len
        sequence.remaining = sequence.request.sampling.max_new_tokens - 1
        self._enter(sequence)
        if not partial:
            return Start(sequence, None)
        self._grow(sequence, sequence.prompt_len)
        return Start(sequence, (group.pages[full], sequence.pages[full]))

    # -- a chunk of decode steps --------------------------------------------------------------------------

    def plan(self) -> Chunk | None:
        """Pages and events for the next `lookahead` decode steps of everything that runs."""
        swap_out: list[SwapOut] = []
        for sequence in [s for s in self.running if s.remaining == 0]:  # its only token came with the prompt
            self.finish(sequence)
        for sequence in list(self.running):
            if sequence.row is not None:
                self._secure(sequence, swap_out)
        active = list(self.running)
        if not active:
            assert not swap_out
            return None
        steps = min(self.lookahead, max(s.remaining for s in active))
        rows = len(self.table)
        position, kv_len, remaining = (np.zeros(rows, np.int64) for _ in range(3))
        forced = np.full((rows, steps), -1, np.int64)
        for s in active:
            position[s.row], kv_len[s.row], remaining[s.row] = s.position, s.kv_len, s.remaining
            if s.request.forced is not None:
                done = s.position - s.prompt_len + 1
                given = s.request.forced[done : done + steps]
                forced[s.row, : len(given)] = given
        table = self.table[:, : max(len(s.pages) for s in active)].copy()
        parts = [Part(s, s.row, min(steps, s.remaining), s.position) for s in active]  # type: ignore[arg-type]
        events = self._plan_steps(parts)
        for s in active:
            if s.remaining == 0:  # all its steps are in this chunk: its pages are free after it
                self.finish(s)
        max_kv_len = max(segment.kv_len + segment.steps for part in parts for segment in part.segments)
        return Chunk(steps, parts, events, table, position, kv_len, remaining, forced, max_kv_len, swap_out)

    def _secure(self, sequence: Sequence, swap_out: list[SwapOut]) -> None:
        """Allocate the pages that a sequence needs up to its next eviction or the end of the chunk."""
        steps = min(self.lookahead, sequence.remaining)
        tokens = sequence.kv_len + sequence.steps_to_eviction(steps)
        need = pages_for(tokens, self.page) - len(sequence.pages)
        while not sequence.evicts and need > self.available():
            victims = [s for s in self.running if not s.evicts]
            if len(victims) == 1 and self._release_prompt():
                continue
            victim = victims[-1]
            swap_out.append(SwapOut(victim, victim.row, victim.pages))  # type: ignore[arg-type]
            victim.kv.swaps += 1
            self._leave(victim)
            self.swapped.appendleft(victim)
            if victim is sequence:
                return
        self._grow(sequence, tokens)

    def _release_prompt(self) -> bool:
        """Release the pages of a prompt whose other rollouts have yet to start; it is prefilled again later."""
        for group in self.waiting:
            if group.prefilled:
                self.pool.release(group.pages)
                group.pages, group.prefilled = [], False
                return True
        return False

    def _plan_steps(self, parts: list[Part]) -> list[EvictionEvent]:
        """Advance every sequence through the chunk, with evictions in the order of the steps."""
        events: list[EvictionEvent] = []
        due: dict[int, list[Part]] = {}
        for part in parts:
            self._advance(part, 0, Segment(part.sequence.kv_len, 0, pages_held=len(part.sequence.pages)), due)
        while due:
            step = min(due)
            same_sizes: dict[tuple, list[Part]] = {}
            for part in due.pop(step):
                s = part.sequence
                evict = s.request.sparsity.evict
                protected = s.prompt_len if evict is not None and evict.protect_prompt else 0
                same_sizes.setdefault((evict, protected, s.kv_len, s.keep), []).append(part)
            for (_, _, n, keep), same_size in same_sizes.items():
                while same_size:
                    events.append(self._plan_eviction(step, n, keep, same_size, due))
        return events

    def _advance(self, part: Part, step: int, segment: Segment, due: dict[int, list[Part]]) -> None:
        """Advance a sequence to its next eviction, noted in `due` by its step, or to the end of the chunk."""
        s, left = part.sequence, part.steps - step
        segment.steps = s.steps_to_eviction(left)
        part.segments.append(segment)
        s.kv_len += segment.steps
        s.position += segment.steps
        s.remaining -= segment.steps
        if segment.steps < left:
            due.setdefault(step + segment.steps, []).append(part)

    def _plan_eviction(
        self, step: int, n: int, keep: int, parts: list[Part], due: dict[int, list[Part]]
    ) -> EvictionEvent:
        """One event of as many of `parts` as free pages allow; removes them from the list.

        All new pages are allocated before any old ones are released, so that no compaction writes to a page that
        another in the same launch reads.
        """
        event = EvictionEvent(step, [], n, keep, [], [])
        batch: list[Part] = []
        scratch = 0
        while parts and (len(batch) < MIN_ROWS or scratch < self.pool.usable // SCRATCH_FRACTION):
            s = parts[0].sequence
            s.kv_len = keep
            need = pages_for(keep + max(1, s.steps_to_eviction(parts[0].steps - step)), self.page)
            if need > self.pool.free:
                s.kv_len = n
                break
            batch.append(parts.pop(0))
            event.new.append(self.pool.allocate(need))
            scratch += need
        assert batch, "the reserved scratch covers at least one eviction"
        for part, pages in zip(batch, event.new):
            s = part.sequence
            event.sequences.append(s)
            event.rows.append(part.row)
            event.positions.append(s.position)
            event.old.append(s.pages)
            self._reserved -= len(pages) - (len(s.pages) - s.shared)
            freed = self.pool.release(s.pages)
            s.pages, s.shared = pages, 0
            self.table[s.row] = 0
            self.table[s.row, : len(pages)] = pages
            self._advance(part, step, Segment(keep, 0, True, freed, len(pages)), due)
        return event

    # -- end of a sequence --------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence in whatever state it is, and release its pages."""
        if sequence.row is not None:
            self._leave(sequence)
        elif sequence in self.swapped:
            self.swapped.remove(sequence)
            sequence.swapped = None
        else:
            for group in self.waiting:
                if sequence in group.pending:
                    group.pending.remove(sequence)
                    if not group.pending:
                        self._close(group)
                    break

    def _close(self, group: Group) -> None:
        self.pool.release(group.pages)
        group.pages = []
        self.waiting.remove(group)

    # -- memory -------------------------------------------------------------------------------------------

    def _scratch(self, sequence: Sequence) -> int:
        """Pages that one eviction of this sequence allocates before it releases the old ones."""
        return pages_for(min(sequence.reserved_tokens(), sequence.max_kept() + self.lookahead), self.page)

    def _reserve(self, sequence: Sequence) -> int:
        """Pages reserved for an evicting sequence; one more if it copies the end of a prompt longer than its limit."""
        return pages_for(sequence.reserved_tokens(), self.page) + (sequence.prompt_len > sequence.reserved_tokens())

    def available(self) -> int:
        """Pages that are neither allocated nor reserved for evicting sequences and their scratch."""
        return self.pool.free - self._reserved - max(self._scratches, default=0)

    def _claim(self, sequence: Sequence, tokens: int) -> int:
        """Pages out of `available` that starting this sequence takes, including its growth to `tokens`."""
        if not sequence.evicts:
            return pages_for(tokens, self.page) - sequence.prompt_len // self.page
        scratch = max(self._scratches, default=0)
        return self._reserve(sequence) + max(0, self._scratch(sequence) - scratch)

    def _growth(self, sequence: Sequence) -> int:
        """Pages that a dense or selecting sequence still needs for the next chunk."""
        return pages_for(sequence.kv_len + min(self.lookahead, sequence.remaining), self.page) - len(sequence.pages)

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        """Allocate the pages that hold `tokens` tokens."""
        count = pages_for(tokens, self.page) - len(sequence.pages)
        if count > 0:
            start = len(sequence.pages)
            sequence.pages += self.pool.allocate(count)
            self.table[sequence.row, start : len(sequence.pages)] = sequence.pages[start:]
            if sequence.evicts:
                self._reserved -= count

    def _enter(self, sequence: Sequence) -> None:
        """Give a sequence the lowest free row; an evicting one reserves its pages."""
        sequence.row = heappop(self.free_rows)
        self.table[sequence.row] = 0
        self.table[sequence.row, : len(sequence.pages)] = sequence.pages
        self.running.append(sequence)
        if sequence.evicts:
            sequence.reserved = self._reserve(sequence)
            self._reserved += sequence.reserved
            self._scratches[self._scratch(sequence)] += 1

    def _leave(self, sequence: Sequence) -> None:
        """Take back a sequence's row, pages and reservation."""
        self.running.remove(sequence)
        assert sequence.row is not None
        heappush(self.free_rows, sequence.row)
        if sequence.evicts:
            self._reserved -= sequence.reserved - (len(sequence.pages) - sequence.shared)
            scratch = self._scratch(sequence)
            self._scratches[scratch] -= 1
            if not self._scratches[scratch]:
                del self._scratches[scratch]
        self.pool.release(sequence.pages)
        sequence.row, sequence.pages, sequence.shared = None, [], 0
