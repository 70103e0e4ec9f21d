"""Plans the steps of running sequences, with the evictions between them. Host arithmetic only, no tensors."""

import numpy as np

from alula.engine.block_manager import pages_for
from alula.engine.row_pages import RowPages
from alula.engine.schedule_plan import Chunk, EvictionEvent, Extension, Part, Piece
from alula.engine.sequence import BatchKind, Segment, Sequence

MIN_ROWS, SCRATCH_FRACTION = 8, 16
"""Rows compacted in one launch: at least 8, and more while their new pages stay within 1/16 of the pool. Otherwise many
rows that evict at the same step (prompts of one length) would need a launch for every few."""


class ChunkPlanner:
    """Advances sequences, whose pages up to their next eviction are allocated, through their next steps."""

    def __init__(self, rows: RowPages) -> None:
        self.rows = rows

    def chunk(self, kind: BatchKind, active: list[Sequence]) -> Chunk:
        steps = max(s.steps for s in active)
        table = self.rows.batches[kind].table
        rows = len(table)
        position, kv_len, remaining = (np.zeros(rows, np.int64) for _ in range(3))
        forced = np.full((rows, steps), -1, np.int64)
        parts = [Part(s, s.row, s.steps, s.position, s.attempt) for s in active]  # type: ignore[arg-type]
        row = [part.row for part in parts]
        position[row], kv_len[row] = [s.position for s in active], [s.kv_len for s in active]
        remaining[row] = [s.steps for s in active]
        for s in active:
            if given := s.forced_tokens():
                done = s.position - s.prompt_len + 1
                given = given[done : done + steps]
                forced[s.row, : len(given)] = given
        table = table[:, : max(len(s.pages) for s in active)].copy()
        events = self._plan_steps(parts)
        for s in active:
            if s.remaining == 0 and not s.request.session:  # all its steps are in this chunk
                self.rows.leave(s)  # its pages are free after it
        max_kv_len = max(segment.kv_len + segment.steps for part in parts for segment in part.segments)
        return Chunk(kind, steps, parts, events, table, position, kv_len, remaining, forced, max_kv_len)

    def extension(self, kind: BatchKind, sequences: list[Sequence]) -> Extension:
        """Given tokens, split at every eviction. A round has the evictions and pieces that begin at the same step."""
        parts = [Part(s, s.row, s.steps, s.position, s.attempt) for s in sequences]  # type: ignore[arg-type]
        events = self._plan_steps(parts)
        rounds: dict[int, tuple[list[EvictionEvent], list[Piece]]] = {}
        for event in events:
            rounds.setdefault(event.step, ([], []))[0].append(event)
        for part in parts:
            s, step = part.sequence, 0
            for segment in part.segments:
                if segment.steps:
                    first = segment.position - s.prompt_len
                    tokens = s.forced_tokens()[first : first + segment.steps]
                    last = step + segment.steps == part.steps
                    piece = Piece(part, tokens, segment, last)
                    rounds.setdefault(step, ([], []))[1].append(piece)
                step += segment.steps
        return Extension(kind, parts, [rounds[step] for step in sorted(rounds)])

    def _plan_steps(self, parts: list[Part]) -> list[EvictionEvent]:
        """Advance every sequence through the chunk, with evictions in the order of the steps."""
        events: list[EvictionEvent] = []
        due: dict[int, list[Part]] = {}
        for part in parts:
            s = part.sequence
            self._advance(part, 0, Segment(s.kv_len, 0, s.position, s.pages), due)
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
        while parts and (len(batch) < MIN_ROWS or scratch < self.rows.pool.usable // SCRATCH_FRACTION):
            s = parts[0].sequence
            s.kv_len = keep
            need = pages_for(keep + max(1, s.steps_to_eviction(parts[0].steps - step)), self.rows.page)
            if need > self.rows.pool.free:
                s.kv_len = n
                break
            batch.append(parts.pop(0))
            event.new.append(self.rows.pool.allocate(need))
            scratch += need
        assert batch, "the scratch covers at least one eviction"
        for part, pages in zip(batch, event.new):
            s = part.sequence
            event.sequences.append(s)
            event.rows.append(part.row)
            event.positions.append(s.position)
            event.attempts.append(s.attempt)
            event.old.append(s.pages)
            promised = s.promised + len(s.pages) - s.shared - len(pages)
            self.rows.promised += promised - s.promised
            s.promised = promised
            freed = self.rows.pool.release(s.pages)
            s.pages, s.shared = pages, 0
            self.rows.write_table(s, 0)
            self._advance(part, step, Segment(keep, 0, s.position, pages, True, freed), due)
        return event
