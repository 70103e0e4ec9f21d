"""A device that stores labels instead of KV: it runs what the scheduler plans and checks every page it touches.

Each sequence knows the labels its cache must hold, slot by slot. A page handed to two writers, read after it was
given away, or restored wrongly shows as a label of somebody else.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from alula.engine.block_manager import BlockManager, pages_for
from alula.engine.rollout import Sampling
from alula.engine.schedule_plan import Chunk, Move, SwapOut, padded_rows
from alula.engine.scheduler import Scheduler
from alula.engine.sequence import Request, Sequence, kind_of
from alula.errors import SettingError
from alula.sparsity.policy import Sparsity
from alula.sparsity.schedule import Schedule


@dataclass
class Arrival:
    """A request: its arrival, the number of tokens after which each rollout stops, and when it is aborted."""

    at: int
    prompt: int
    new: int
    stops: list[int]
    sparsity: Sparsity
    abort_at: int | None = None

    @property
    def n(self) -> int:
        return len(self.stops)


@dataclass
class Life:
    """Invariants of one sequence."""

    sequence: Sequence
    order: tuple[int, int]
    stop: int
    content: list = field(default_factory=list)
    written: int = 0
    tokens: int = 0
    ended: bool = False
    saved: list | None = None


class Simulation:
    def __init__(
        self, *, pages: int, page: int, rows: int, lookahead: int, ahead: int, prefill_tokens=64, host=10**6, buckets=()
    ):
        self.pool = BlockManager(pages)
        self.page, self.ahead, self.buckets = page, ahead, buckets
        self.scheduler = Scheduler(
            self.pool,
            page=page,
            rows=rows,
            width=self.pool.usable,
            lookahead=lookahead,
            prefill_tokens=prefill_tokens,
            buckets=buckets,
            swap_bytes=lambda sequence: len(sequence.pages),
            swap_memory=host,
        )
        self.slots = [[None] * page for _ in range(pages)]
        self.rows: dict[tuple, Sequence] = {}
        """Whose state each row of each kind holds."""
        self.lives: dict[Sequence, Life] = {}
        self.order_started: list[tuple[int, int]] = []
        self.rejected = self.swaps = self.evictions = self.launches = self.hits = self.moves = 0

    def run(self, arrivals: list[Arrival]) -> None:
        waiting = deque(sorted(arrivals, key=lambda a: a.at))
        requests: list[tuple[Arrival, list[Sequence]]] = []
        launched: deque[list[tuple[Life, int, int, int]]] = deque()
        turn, scheduler = 0, self.scheduler
        most = sum(a.new * a.n for a in arrivals) + 4 * len(arrivals) + max((a.at for a in arrivals), default=0) + 10
        while waiting or not scheduler.idle or launched:
            assert turn <= most, "somebody starves"
            while waiting and waiting[0].at <= turn:
                self.submit(waiting.popleft(), requests)
            for arrival, sequences in requests:
                if arrival.abort_at == turn:
                    for sequence in sequences:
                        self.end(self.lives[sequence])
            admission = scheduler.admit()
            self.check_pages()
            self.swap_out(admission.swap_out)
            for sequence in admission.restore:
                self.restore(self.lives[sequence])
            for prefill in sorted(admission.prefill, key=lambda p: p.level):
                labels = self.prompt_labels(prefill.request)
                assert self.read(prefill.pages, prefill.cached) == labels[: prefill.cached]
                self.write(prefill.pages, prefill.cached, labels[prefill.cached :])
                self.hits += prefill.cached > 0
            if admission.prefill:
                first = [(self.lives[s], 0, 1, s.attempt) for p in admission.prefill for s in p.sequences]
                launched.append(first)
            for start in admission.start:
                if start.copy:
                    self.slots[start.copy[1]] = list(self.slots[start.copy[0]])
                life = self.lives[start.sequence]
                self.rows[life.sequence.request.kind, life.sequence.row] = life.sequence
                life.content, life.written = self.prompt_labels(start.sequence.request), 0
                assert not scheduler.swapped, "no new sequence starts while a swapped one waits"
                if not start.sequence.attempt:
                    self.order_started.append(life.order)
            plan = scheduler.plan()
            self.check_pages()
            self.swap_out(plan.swap_out)
            self.move(plan.moves)
            launched += [self.launch(chunk) for chunk in plan.chunks]
            left = self.ahead * (len(plan.chunks) or min(1, len(admission.prefill)))
            while len(launched) > left:
                self.collect(launched.popleft())
                self.check_pages()
            turn += 1
        assert all(life.ended for life in self.lives.values())
        assert self.order_started == sorted(self.order_started), "oldest first"
        assert self.pool.in_use == 0
        assert scheduler.rows.available() == self.pool.usable
        assert scheduler.swap_used == 0
        assert all(sorted(rows.free) == list(range(len(rows.table))) for rows in scheduler.rows.batches.values())

    def submit(self, arrival: Arrival, requests: list) -> None:
        sampling = Sampling(n=arrival.n, max_new_tokens=arrival.new)
        request = Request(len(requests), list(range(arrival.prompt)), sampling, arrival.sparsity, frozenset())
        request.kind = kind_of(arrival.sparsity, adapted=False)
        try:
            sequences = self.scheduler.submit(request)
        except SettingError as error:
            assert "raise kv_memory" in str(error)  # noqa: PT017
            self.rejected += 1
            return
        for sequence, stop in zip(sequences, arrival.stops):
            self.lives[sequence] = Life(sequence, (len(requests), sequence.sample), stop)
        requests.append((arrival, sequences))

    # -- invariants of the host ----------------------------------------------------------------------------

    def check_pages(self) -> None:
        """Invariant 5: the pages in use are exactly those of live rows, and of prompts whose rollouts wait."""
        scheduler = self.scheduler
        holders = Counter(page for s in scheduler.running for page in s.pages)
        holders.update(page for group in scheduler.waiting for page in group.pages)
        assert 0 not in holders, "page 0 is the scratch page"
        assert len(holders) == self.pool.in_use
        for page, count in holders.items():
            assert self.pool._references[page] == count
        assert scheduler.rows.available() >= 0, "more is reserved than there is"
        assert 0 <= scheduler.swap_used <= scheduler.swap_memory
        order = [self.lives[s].order for s in (*scheduler.running, *scheduler.swapped) if not s.attempt]
        assert order == sorted(order), "the youngest go first and come back last"
        for s in scheduler.running:
            assert len(s.pages) == pages_for(s.kv_len, self.page)
            line = scheduler.rows.batches[s.request.kind].table[s.row]
            assert line[: len(s.pages)].tolist() == s.pages
            assert not line[len(s.pages) :].any()
            self.check_ceiling(s)
        for page, count in Counter(p for s in scheduler.running for p in s.pages[s.shared :]).items():
            assert count == 1 == self.pool._references[page], f"page {page} has two owners"

    def check_ceiling(self, s: Sequence) -> None:
        evict = s.request.sparsity.evict
        if evict is None:
            return
        budget = max(evict.budget.budgets) if isinstance(evict.budget, Schedule) else evict.budget
        tokens = budget + evict.buffer + (s.prompt_len if evict.protect_prompt else 0)
        limit = pages_for(tokens, self.page)
        if s.kv_len == s.position:  # nothing evicted yet
            limit = max(limit, pages_for(s.prompt_len, self.page))
        assert len(s.pages) <= limit

    # -- the device ----------------------------------------------------------------------------------------

    def prompt_labels(self, request: Request) -> list:
        """Equal prompts have equal KV."""
        return [("prompt", position) for position in range(len(request.prompt_ids))]

    def write(self, pages: list[int], first: int, labels: list) -> None:
        for i, label in enumerate(labels, first):
            self.slots[pages[i // self.page]][i % self.page] = label

    def read(self, pages: list[int], count: int) -> list:
        return [self.slots[pages[i // self.page]][i % self.page] for i in range(count)]

    def move(self, moves: list[Move]) -> None:
        for move in moves:
            kind = move.sequence.request.kind
            assert self.rows[kind, move.source] is move.sequence
            self.rows[kind, move.target] = move.sequence
            self.moves += 1

    def restore(self, life: Life) -> None:
        assert life.saved is not None
        self.rows[life.sequence.request.kind, life.sequence.row] = life.sequence
        self.write(life.sequence.pages, 0, life.saved[: life.sequence.kv_len])
        life.saved = life.sequence.saved = None

    def swap_out(self, swapped: list[SwapOut]) -> None:
        for out in swapped:
            life = self.lives[out.sequence]
            life.saved = self.read(out.pages, len(life.content))
            assert life.saved == life.content
            self.swaps += 1

    def launch(self, chunk: Chunk) -> list[tuple[Life, int, int, int]]:
        self.launches += 1
        kv_len, left = chunk.kv_len.tolist(), chunk.remaining.tolist()
        tables = {part.row: chunk.table[part.row].tolist() for part in chunk.parts}
        assert len(tables) == len(chunk.parts)
        assert all(self.rows[chunk.kind, part.row] is part.sequence for part in chunk.parts), "another's state"
        if self.buckets:
            assert padded_rows(1 + max(tables), self.buckets) == padded_rows(len(tables), self.buckets), "gaps"
        for step in range(chunk.steps):
            for event in (e for e in chunk.events if e.step == step):
                self.evict(event, tables, kv_len)
            for part in chunk.parts:
                if left[part.row] > 0:
                    self.decode(self.lives[part.sequence], part.row, tables, kv_len)
                    left[part.row] -= 1
        for part in chunk.parts:
            assert part.steps == sum(segment.steps for segment in part.segments)
            assert part.steps == chunk.remaining[part.row] - left[part.row]
        return [
            (self.lives[part.sequence], part.position - part.sequence.prompt_len + 1, part.steps, part.attempt)
            for part in chunk.parts
        ]

    def decode(self, life: Life, row: int, tables: dict, kv_len: list) -> None:
        page = tables[row][kv_len[row] // self.page]
        assert page != 0, "a live row writes to the scratch page"
        assert all(page not in pages for other, pages in tables.items() if other != row), "a shared page is written"
        label = (*life.order, life.written)
        life.written += 1
        self.slots[page][kv_len[row] % self.page] = label
        life.content.append(label)
        kv_len[row] += 1
        assert self.read(tables[row], kv_len[row]) == life.content

    def evict(self, event, tables: dict, kv_len: list) -> None:
        self.evictions += 1
        fresh = [page for pages in event.new for page in pages]
        assert len(set(fresh)) == len(fresh)
        held = {page for pages in tables.values() for page in pages if page}
        # rows that end with this chunk keep their pages until it has run
        assert held.isdisjoint(fresh), "an eviction overwrites a page that the same launch reads"
        held_by_prompts = {page for group in self.scheduler.waiting for page in group.pages}
        assert held_by_prompts.isdisjoint(fresh)
        for sequence, row, old, new in zip(event.sequences, event.rows, event.old, event.new):
            life, evict = self.lives[sequence], sequence.request.sparsity.evict
            assert evict is not None
            assert kv_len[row] == event.n == len(life.content)
            assert [p for p in tables[row] if p][: len(old)] == old
            assert self.read(old, event.n) == life.content
            first = max(evict.sinks, sequence.prompt_len if evict.protect_prompt else 0)
            life.content = life.content[:first] + life.content[event.n - (event.keep - first) :]
            assert len(life.content) == event.keep
            self.write(new, 0, life.content)
            tables[row], kv_len[row] = list(new), event.keep

    # -- results of the device -----------------------------------------------------------------------------

    def collect(self, results: list[tuple[Life, int, int, int]]) -> None:
        for life, first, steps, attempt in results:
            sequence = life.sequence
            if not life.ended and sequence.attempt == attempt:
                life.tokens = max(life.tokens, first + steps) if first or sequence.fixed else steps
                sequence.tokens = [0] * life.tokens
                if life.tokens >= min(life.stop, sequence.request.sampling.max_new_tokens):
                    self.end(life)

    def end(self, life: Life) -> None:
        if not life.ended:
            life.ended = True
            self.scheduler.finish(life.sequence)
