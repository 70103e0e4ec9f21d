"""What the scheduler decides: which prompts run, which rollouts start, and the next chunk of decode steps."""

from dataclasses import dataclass, field

import numpy as np

from alula.engine.sequence import Request, Segment, Sequence


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


@dataclass
class Start:
    """A rollout that starts in a row. `copy` = (from, to) pages if its prompt ends inside a page."""

    sequence: Sequence
    copy: tuple[int, int] | None


@dataclass
class Admission:
    """What to run before the next chunk."""

    prefill: list[Prefill] = field(default_factory=list)
    start: list[Start] = field(default_factory=list)
    restore: list[Sequence] = field(default_factory=list)
    """Swapped sequences that resume."""


@dataclass
class SwapOut:
    """A sequence whose pages go to host memory before the chunk is launched."""

    sequence: Sequence
    row: int
    pages: list[int]


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


@dataclass
class Part:
    """One sequence's share of a chunk: `steps` decode steps, in segments between its evictions."""

    sequence: Sequence
    row: int
    steps: int
    position: int
    """Position of the first step's input token."""
    segments: list[Segment] = field(default_factory=list)


@dataclass
class Chunk:
    """A few decode steps of all running sequences.

    The arrays have one row per batch row: the state before the first step, as `BatchState` names it.
    """

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
    swap_out: list[SwapOut]
