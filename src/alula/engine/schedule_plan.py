"""What the scheduler decides: which prompts run, which rollouts start, and the next chunks of decode steps."""

from dataclasses import dataclass, field

import numpy as np

from alula.engine.sequence import BatchKind, Request, Segment, Sequence


@dataclass(frozen=True)
class KVNeed:
    """The most KV tokens that a rollout may hold, the pages that it needs to run, and the engine's limits."""

    tokens: int
    pages: int
    max_tokens: int
    max_pages: int

    @property
    def exceeds_pool(self) -> bool:
        return self.pages > self.max_pages

    @property
    def exceeds_length(self) -> bool:
        return self.tokens > self.max_tokens


@dataclass
class Prefill:
    """A prompt to run, the pages for its KV, and the rollouts that wait for it."""

    request: Request
    pages: list[int]
    sequences: list[Sequence]
    cached: int = 0
    """Leading tokens whose KV is in the pages already."""
    level: int = 0
    """Prompts of a level may read pages that those of lower levels write."""


@dataclass
class Start:
    """A rollout that starts in a row. `copy` = (from, to) pages if its prompt ends inside a page."""

    sequence: Sequence
    copy: tuple[int, int] | None


@dataclass
class SwapOut:
    """A sequence that gives up its pages, to host memory, and its row if it has one."""

    sequence: Sequence
    row: int | None
    pages: list[int]
    kv_len: int


@dataclass
class Move:
    """A sequence that goes from row `source` to row `target`."""

    sequence: Sequence
    source: int
    target: int


@dataclass
class Admission:
    """What to run before the next chunks."""

    swap_out: list[SwapOut] = field(default_factory=list)
    """Idle sessions that make room."""
    prefill: list[Prefill] = field(default_factory=list)
    start: list[Start] = field(default_factory=list)
    restore: list[Sequence] = field(default_factory=list)
    """Sequences that resume from their saved state."""


@dataclass
class EvictionEvent:
    """An eviction of several sequences before step `step` of a chunk, all from `n` to `keep` tokens."""

    step: int
    sequences: list[Sequence]
    n: int
    keep: int
    old: list[list[int]]
    """Per sequence: pages to read."""
    new: list[list[int]]
    """Per sequence: pages to write."""
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Per sequence: position of the first query that no longer sees the evicted tokens."""
    attempts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Part:
    """One sequence's share of a chunk: `steps` steps, in segments between its evictions."""

    sequence: Sequence
    row: int
    steps: int
    position: int
    """Position of the first step's input token."""
    attempt: int
    segments: list[Segment] = field(default_factory=list)


@dataclass
class Chunk:
    """A few decode steps of all running sequences of one kind.

    The arrays have one row per batch row: the state before the first step, as `BatchState` names it.
    """

    kind: BatchKind
    steps: int
    parts: list[Part]
    events: list[EvictionEvent]
    table: np.ndarray
    position: np.ndarray
    kv_len: np.ndarray
    remaining: np.ndarray
    forced: np.ndarray
    max_kv_len: int
    """The longest KV that attention reads in this chunk."""


@dataclass
class Piece:
    """Given tokens of one sequence that are computed in one pass, after those before them."""

    part: Part
    tokens: list[int]
    segment: Segment
    last: bool
    """Whether the next token is sampled from this piece."""


@dataclass
class Extension:
    """Given tokens of running sequences of one kind, in rounds: evictions, then pieces that are computed together."""

    kind: BatchKind
    parts: list[Part]
    rounds: list[tuple[list[EvictionEvent], list[Piece]]]


@dataclass
class Plan:
    """The next work of everything that runs, in this order."""

    swap_out: list[SwapOut] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    extensions: list[Extension] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


def padded_rows(rows: int, buckets: tuple[int, ...]) -> int:
    """The batch size, one of `buckets`, that this many rows are padded to; without one that is large enough, `rows`."""
    return next((bucket for bucket in buckets if bucket >= rows), rows)
