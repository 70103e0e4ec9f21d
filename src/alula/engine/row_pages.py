"""Rows and pages of running sequences: who has which, what each needs next, and what is left."""

from collections import Counter
from heapq import heappop, heappush, nsmallest

import numpy as np

from alula.engine.block_manager import BlockManager, pages_for
from alula.engine.schedule_plan import Move, padded_rows
from alula.engine.sequence import MOST_KINDS, BatchKind, Sequence
from alula.sparsity.footprint import steps_to_eviction


class Rows:
    """The batch rows of one kind: which are free, and all page tables."""

    def __init__(self, rows: int, width: int) -> None:
        self.free = list(range(rows))  # a heap: the lowest first, which keeps batches small
        self.table = np.zeros((rows, width), np.int32)


class RowPages:
    """Assigns rows and pages to running sequences. `width` is the number of pages of a row's page table, `buckets` are
    the batch sizes that rows are padded to, if they are."""

    def __init__(
        self, pool: BlockManager, page: int, rows: int, width: int, lookahead: int, buckets: tuple[int, ...] = ()
    ) -> None:
        self.pool, self.page, self.rows, self.width, self.lookahead = pool, page, rows, width, lookahead
        self.buckets = buckets
        self.batches: dict[BatchKind, Rows] = {}
        self.running: list[Sequence] = []  # oldest first
        self.promised = 0
        """Pages that evictions of the chunks being planned will allocate beyond those that their sequences hold."""
        self._scratches: Counter[int] = Counter()  # scratch pages of each running evicting sequence

    def available(self) -> int:
        """Free pages, without the scratch of an eviction and what the chunk being planned will allocate."""
        return self.pool.free - max(self._scratches, default=0) - self.promised

    def growth(self, sequence: Sequence, steps: int) -> int:
        """Pages, beyond those it holds, that a sequence needs for the next `steps` steps."""
        before = sequence.steps_to_eviction(steps) if sequence.evicts else steps
        first = max(0, pages_for(sequence.kv_len + before, self.page) - len(sequence.pages))
        if before == steps:
            return first
        unshared = len(sequence.pages) - sequence.shared + first
        return first + max(0, self.after_eviction(sequence, steps) - unshared)

    def secure(self, sequence: Sequence, steps: int, pages: int) -> None:
        """Allocate the pages up to the next eviction in these steps; the rest of `pages` is promised to it."""
        before = len(sequence.pages)
        self.grow(sequence, sequence.kv_len + sequence.steps_to_eviction(steps))
        sequence.promised = pages - (len(sequence.pages) - before)
        self.promised += sequence.promised

    def claim(self, sequence: Sequence) -> int:
        """Pages out of `available` that starting this sequence takes, including its growth in the next chunk."""
        growth = self.growth(sequence, self.steps(sequence))
        if not sequence.evicts:
            return growth
        return growth + max(0, self.scratch(sequence) - max(self._scratches, default=0))

    def after_eviction(self, sequence: Sequence, steps: int) -> int:
        """The most pages that the sequence needs after an eviction within the next `steps` steps."""
        return pages_for(min(sequence.max_generated(), sequence.largest_in_chunk(steps)), self.page)

    def scratch(self, sequence: Sequence) -> int:
        """Pages that one eviction of this sequence allocates before it releases the old ones."""
        most = sequence.max_generated()
        if not (sequence.request.session or sequence.given):  # given tokens may be more than a chunk's
            most = min(most, sequence.max_kept() + self.lookahead)
        return pages_for(most, self.page)

    def steps(self, sequence: Sequence) -> int:
        """Steps that the next chunk plans for a sequence."""
        steps = min(self.lookahead, sequence.remaining)
        if sequence.given and (stretch := sequence.next_given()):
            if stretch[0] == sequence.position:
                return stretch[1] - stretch[0]
            steps = min(steps, stretch[0] - sequence.position)
        if not (sequence.request.session and sequence.evicts):
            return steps
        # An eviction is final, so a session's cache must not evict after its turn has ended: the host waits for tokens.
        before = sequence.steps_to_eviction(steps)
        if before or not steps or not sequence.confirmed:
            return before
        evict, prompt = sequence.request.sparsity.evict, sequence.prompt_len
        return max(1, steps_to_eviction(evict, prompt, sequence.position, sequence.keep, steps))

    def extends(self, sequence: Sequence) -> bool:
        """Whether the sequence's next tokens are given."""
        stretch = sequence.next_given() if sequence.given else None
        return stretch is not None and stretch[0] == sequence.position

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Allocate the pages that hold `tokens` tokens."""
        count = pages_for(tokens, self.page) - len(sequence.pages)
        if count > 0:
            start = len(sequence.pages)
            sequence.pages += self.pool.allocate(count)
            self.write_table(sequence, start)

    def write_table(self, sequence: Sequence, start: int) -> None:
        """Write a row's page table, from entry `start` on."""
        line = self.batches[sequence.request.kind].table[sequence.row]
        if not start:
            line[:] = 0
        line[start : len(sequence.pages)] = sequence.pages[start:]

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence the lowest free row of its kind."""
        kind = sequence.request.kind
        if kind not in self.batches:
            empty = [other for other, batch in self.batches.items() if len(batch.free) == self.rows]
            for other in empty[: max(0, len(self.batches) + 1 - MOST_KINDS)]:
                del self.batches[other]
            self.batches[kind] = Rows(self.rows, self.width)
        sequence.row = heappop(self.batches[kind].free)
        self.write_table(sequence, 0)
        self.running.append(sequence)
        if sequence.evicts:
            sequence.scratch = self.scratch(sequence)
            self._scratches[sequence.scratch] += 1

    def close_gaps(self, sequences: list[Sequence]) -> list[Move]:
        """Move sequences of one kind from the highest rows to free ones below, if a smaller bucket then holds them all.

        Otherwise one long rollout in a high row would keep the batch large when most others have ended.
        """
        if not self.buckets:
            return []
        batch, now = self.batches[sequences[0].request.kind], padded_rows(1 + max(map(row_of, sequences)), self.buckets)
        if padded_rows(len(sequences), self.buckets) >= now:
            return []
        lowest = nsmallest(len(sequences), [*map(row_of, sequences), *batch.free])
        bucket = padded_rows(1 + lowest[-1], self.buckets)
        if bucket >= now:
            return []
        moves = []
        for sequence in [s for s in sequences if row_of(s) >= bucket]:
            moves.append(Move(sequence, row_of(sequence), heappop(batch.free)))
            sequence.row = moves[-1].target
            self.write_table(sequence, 0)
        for move in moves:
            heappush(batch.free, move.source)
        return moves

    def leave(self, sequence: Sequence, release: bool = True) -> None:
        """Take back a sequence's row, and its pages."""
        self.running.remove(sequence)
        self.promised -= sequence.promised
        sequence.promised = 0
        assert sequence.row is not None
        heappush(self.batches[sequence.request.kind].free, sequence.row)
        if sequence.evicts:
            self._scratches[sequence.scratch] -= 1
            if not self._scratches[sequence.scratch]:
                del self._scratches[sequence.scratch]
        sequence.row = None
        if release:
            self.pool.release(sequence.pages)
            sequence.pages, sequence.shared = [], 0


def row_of(sequence: Sequence) -> int:
    assert sequence.row is not None
    return sequence.row
