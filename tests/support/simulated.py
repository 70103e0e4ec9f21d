"""A device that stores labels instead of KV: it runs what the scheduler plans and checks every page it touches.

Each sequence knows the labels its cache must hold, slot by slot. A page handed to two writers, read after it was
given away, or restored wrongly shows as a label of somebody else.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from alula.engine.block_manager import BlockManager, pages_for
from alula.engine.rollout import Sampling
from alula.engine.schedule_plan import Chunk
from alula.engine.scheduler import Scheduler
from alula.engine.sequence import Request, Sequence
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
    def __init__(self, *, pages: int, page: int, rows: int, lookahead: int, ahead: int, prefill_tokens: int = 64):
        self.pool = BlockManager(pages)
        self.page, self.ahead = page, ahead
        self.scheduler = Scheduler(
            self.pool, page=page, rows=rows, width=self.pool.usable, lookahead=lookahead, prefill_tokens=prefill_tokens
        )
        self.slots = [[None] * page for _ in range(pages)]
        self.lives: dict[Sequence, Life] = {}
        self.order_started: list[tuple[int, int]] = []
        self.rejected = self.swaps = self.evictions = self.launches = 0

    def run(self, arrivals: list[Arrival]) -> None:
        waiting = deque(sorted(arrivals, key=lambda a: a.at))
        requests: list[tuple[Arrival, list[Sequence]]] = []
        launched: deque[list[tuple[Life, int, bool]]] = deque()
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
            for sequence in admission.restore:
                self.restore(self.lives[sequence])
            for prefill in admission.prefill:
                self.write(prefill.pages, 0, self.prompt_labels(prefill.request))
            if admission.prefill:
                launched.append([(self.lives[s], 1, True) for p in admission.prefill for s in p.sequences])
            for start in admission.start:
                if start.copy:
                    self.slots[start.copy[1]] = list(self.slots[start.copy[0]])
                life = self.lives[start.sequence]
                life.content = self.prompt_labels(start.sequence.request)
                assert not scheduler.swapped, "no new sequence starts while a swapped one waits"
                self.order_started.append(life.order)
            chunk = scheduler.plan()
            self.check_pages()
            if chunk is not None:
                launched.append(self.launch(chunk))
            while launched and (len(launched) > self.ahead or chunk is None):
                self.collect(launched.popleft())
                self.check_pages()
            turn += 1
        assert all(life.ended for life in self.lives.values())
        assert self.order_started == sorted(self.order_started), "oldest first"
        assert self.pool.in_use == 0
        assert scheduler.available() == self.pool.usable
        assert sorted(scheduler.free_rows) == list(range(len(scheduler.table)))

    def submit(self, arrival: Arrival, requests: list) -> None:
        sampling = Sampling(n=arrival.n, max_new_tokens=arrival.new)
        request = Request(len(requests), list(range(arrival.prompt)), sampling, arrival.sparsity, frozenset())
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
        assert scheduler.available() >= 0, "more is reserved than there is"
        preemptible = [self.lives[s].order for s in scheduler.running if not s.evicts]
        swapped = [self.lives[s].order for s in scheduler.swapped]
        assert preemptible + swapped == sorted(preemptible + swapped), "the youngest go first and come back last"
        for s in scheduler.running:
            assert len(s.pages) == pages_for(s.kv_len, self.page)
            assert scheduler.table[s.row, : len(s.pages)].tolist() == s.pages
            assert not scheduler.table[s.row, len(s.pages) :].any()
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
        return [("prompt", request.id, position) for position in range(len(request.prompt_ids))]

    def write(self, pages: list[int], first: int, labels: list) -> None:
        for i, label in enumerate(labels, first):
            self.slots[pages[i // self.page]][i % self.page] = label

    def read(self, pages: list[int], count: int) -> list:
        return [self.slots[pages[i // self.page]][i % self.page] for i in range(count)]

    def restore(self, life: Life) -> None:
        assert life.saved is not None
        self.write(life.sequence.pages, 0, life.saved[: life.sequence.kv_len])
        life.saved = None

    def launch(self, chunk: Chunk) -> list[tuple[Life, int, bool]]:
        self.launches += 1
        for out in chunk.swap_out:
            life = self.lives[out.sequence]
            life.saved = self.read(out.pages, len(life.content))
            assert life.saved == life.content
            self.swaps += 1
        kv_len, left = chunk.kv_len.tolist(), chunk.remaining.tolist()
        tables = {part.row: chunk.table[part.row].tolist() for part in chunk.parts}
        assert len(tables) == len(chunk.parts)
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
        return [(self.lives[part.sequence], part.steps, False) for part in chunk.parts]

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

    def collect(self, results: list[tuple[Life, int, bool]]) -> None:
        for life, steps, first in results:
            if not life.ended:
                life.tokens = steps if first else life.tokens + steps
                if life.tokens >= min(life.stop, life.sequence.request.sampling.max_new_tokens):
                    self.end(life)

    def end(self, life: Life) -> None:
        if not life.ended:
            life.ended = True
            self.scheduler.finish(life.sequence)
