"""Requests, the rollouts being generated for them, and groups of rollouts that share a prompt."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from alula.engine.rollout import Finish, KVUse, Sampling, Span
from alula.engine.stop_strings import StopStrings
from alula.ops.splitmix64 import splitmix64
from alula.sparsity.evict import build
from alula.sparsity.evict.base import Evictor
from alula.sparsity.footprint import (
    UNLIMITED,
    kept,
    largest_kept,
    most_generated,
    most_held,
    steps_to_eviction,
    tokens_read,
    trigger,
)
from alula.sparsity.policy import Evict, Sparsity

MOST_KINDS = 8
"""Kinds of rows that are kept; of more, unused ones are dropped."""


class BatchKind(NamedTuple):
    """What all rows of one decode step have in common. Rows of different kinds decode in different launches."""

    selector: str | None = None
    dense_layers: int = 0
    adapted: bool = False
    """Whether the weights with the sparse adapter are used (`Engine(sparse_adapter=...)`)."""


DENSE_ROWS = BatchKind()


@dataclass(eq=False)
class Teacher:
    """Dense hidden states for a forced request: token i is predicted from hidden[start + i]."""

    hidden: Any
    """[tokens, width], shared by all requests of a call; on the device, or in host memory if it is large"""
    start: int


@dataclass(eq=False)
class Request:
    """A prompt and how to continue it. `forced` gives the tokens instead of sampling them (scoring)."""

    id: int
    prompt_ids: list[int]
    sampling: Sampling
    sparsity: Sparsity
    stop: frozenset[int]
    prompt_index: int = 0
    """Index of the prompt in the random key (seed, prompt index, sample, position)."""
    forced: list[int] | None = None
    given: tuple[tuple[int, int], ...] = ()
    """Stretches of `forced` that were given in a session (`Sequence.given`)."""
    record: bool = False
    key: int | None = None
    """The rollout's sampling key, if not derived from (seed, prompt, sample)."""
    teacher: Teacher | None = None
    """If given, the acceptance of every forced token is measured."""
    keep_hidden: int = 0
    """Number of rollouts that return the hidden states their tokens were sampled from (`Rollout.hidden`)."""
    stop_strings: StopStrings | None = None
    """Texts that end a rollout, like the token ids in `stop`."""
    session: bool = False
    """Whether the rollouts keep their KV after their end, so that `Engine.extend` can continue them."""
    kind: BatchKind = DENSE_ROWS

    @property
    def evictor(self) -> Evictor | None:
        return evictor_for(self.sparsity.evict) if self.sparsity.evict else None


@lru_cache(maxsize=1024)
def evictor_for(evict: Evict) -> Evictor:
    """The evictor of a policy, built once."""
    return build(evict)


@dataclass
class PrefillOutput:
    """What a prefill leaves on the device for the rollouts that start from it."""

    token: Tensor
    """int64 [rollouts]: the first token of each"""
    rings: Tensor | None
    attention_sums: list[Tensor | None] | None
    """Per prompt, as in `PrefillContext`."""


@dataclass
class Prefilled:
    """One rollout's share of a prefill's output, until it starts in a row."""

    output: PrefillOutput
    rollout: int
    prompt: int


@dataclass
class Saved:
    """A rollout's state outside its row: its pages (in host memory), the last queries and attention sums."""

    parts: list[list[Tensor]] = field(default_factory=list)
    """The contents of its pages (`KVCache.parts`), each in pieces [layer, pages, ...]."""
    token: Tensor | None = None
    """The input of the next step; None if the host knows it."""
    ring: Tensor | None = None
    attention_sums: Tensor | None = None
    bytes: int = 0
    """Host memory taken."""


@dataclass(slots=True)
class Segment:
    """Steps between two evictions inside one chunk; `kv_len` and `position` are those before the first of them."""

    kv_len: int
    steps: int
    position: int
    pages: list[int]
    evicted: bool = False
    pages_freed: int = 0
    pages_held: int = 0

    def __post_init__(self) -> None:
        self.pages_held = len(self.pages)


@dataclass(eq=False)
class Sequence:
    """One rollout while it is generated, and between the turns of a session."""

    request: Request
    sample: int
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    """Leading pages that are shared with other sequences."""
    row: int | None = None
    position: int = 0
    """Tokens whose KV has been computed, evicted or not. `position` and `kv_len` describe the state after everything
    that was planned."""
    kv_len: int = 0
    scratch: int = 0
    """Pages that an eviction may need; the scheduler keeps them free."""
    steps: int = 0
    """Steps of the chunk being planned."""
    promised: int = 0
    """Pages beyond those it holds that evictions of that chunk may allocate."""
    attempt: int = 0
    """Counts restarts and turns. Results that belong to an earlier one are discarded."""
    given: list[tuple[int, int]] = field(init=False)
    """Tokens of earlier turns and of this one that are given, not sampled: (first, last + 1) of each stretch that is
    computed in one pass. It begins with the last token sampled before it, whose KV is not cached yet."""
    turn_start: int = 0
    """Tokens after the prompt when this turn began, the given ones included."""
    fixed: int = 0
    """Tokens that are known already and are forced, not sampled, when the sequence runs again."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Ids and log-probs [tokens, k] of each chunk; `hidden` likewise."""
    acceptance: list[float] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)
    finish: Finish | None = None
    prefilled: Prefilled | None = None
    saved: Saved | None = None
    """Set while the sequence has no row: preempted, or between two turns."""
    history: Any = None
    """int32 [layer, kv_head, position]: `Rollout.history`, if recorded"""
    kept_positions: np.ndarray | None = None
    """int32 [layer, kv_head, slot]: the position that each cached slot holds"""
    selected: list = field(default_factory=list)
    kv: KVUse = field(default_factory=KVUse)
    session: int | None = None
    last_used: float = 0.0
    """Time at which the last turn ended."""
    _held: int = 0
    _dense: int = 0
    _read: int = 0
    _steps: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_ids)
        self.given = [*self.request.given]
        self.begin_turn(self.request, self.turn_start)

    def begin_turn(self, request: Request, turn_start: int) -> None:
        """Sample for `request`, after `turn_start` tokens of earlier turns."""
        self.request, self.turn_start = request, turn_start
        self.max_length = self.prompt_len + turn_start + request.sampling.max_new_tokens
        """Tokens of prompt and answer, at most."""
        evict = request.sparsity.evict
        self.evicts = evict is not None
        self.trigger = UNLIMITED
        """KV tokens at which an eviction fires, for a fixed budget."""
        if evict is not None and isinstance(evict.budget, int):
            self.trigger = trigger(evict, self.prompt_len, 0)

    @property
    def key(self) -> int:
        """The key of the rollout's random numbers."""
        request = self.request
        if request.key is not None:
            return request.key
        return rollout_key(request.sampling.seed, request.prompt_index, self.sample)

    @property
    def remaining(self) -> int:
        """Decode steps that are not planned yet, given tokens included."""
        left = self.max_length - 1 - self.position
        return left if left > 0 else 0

    @property
    def confirmed(self) -> bool:
        """Whether the host knows all tokens that were planned, so that the sequence cannot have ended before."""
        return self.prompt_len + len(self.tokens) > self.position

    def next_given(self) -> tuple[int, int] | None:
        """The next stretch of given tokens, as positions."""
        return next((stretch for stretch in self.given if stretch[1] > self.position), None)

    def forced_tokens(self) -> list[int]:
        """Tokens after the prompt that are forced."""
        return self.request.forced if self.request.forced is not None else self.tokens[: self.fixed]

    @property
    def keeps_hidden(self) -> bool:
        return self.sample < self.request.keep_hidden

    @property
    def keep(self) -> int:
        """KV tokens that an eviction now would leave."""
        evict = self.request.sparsity.evict
        return UNLIMITED if evict is None else kept(evict, self.prompt_len, self.position)

    def steps_to_eviction(self, steps: int) -> int:
        """The number of the next `steps` decode steps before an eviction fires; `steps` if none fires."""
        if self.trigger == UNLIMITED and self.evicts:  # a schedule
            return steps_to_eviction(self.request.sparsity.evict, self.prompt_len, self.position, self.kv_len, steps)
        left = self.trigger - self.kv_len
        return steps if left >= steps else max(0, left)

    def max_kept(self) -> int:
        """The most KV tokens that an eviction can leave."""
        return largest_kept(self.request.sparsity.evict, self.prompt_len)

    def max_kv_tokens(self) -> int:
        """The most KV tokens that the sequence can ever hold."""
        return most_held(self.request.sparsity.evict, self.prompt_len, self.max_length)

    def max_generated(self) -> int:
        """The most KV tokens that the sequence holds once it generates. A longer prompt is compacted before that."""
        return most_generated(self.request.sparsity.evict, self.prompt_len, self.max_length)

    def largest_in_chunk(self, steps: int) -> int:
        """The most KV tokens that the sequence can hold in the next `steps` steps after an eviction in them."""
        evict = self.request.sparsity.evict
        assert evict is not None
        if isinstance(evict.budget, int):
            largest = self.keep
        else:
            largest = int(kept(evict, self.prompt_len, np.arange(self.position, self.position + steps)).max())
        return largest + max(1, min(evict.buffer, steps))

    def rewind(self) -> None:
        """Go back to the last known token: steps that were planned after it do not count."""
        end = self.prompt_len + len(self.tokens) - 1
        self.kv_len -= self.position - end
        self.position = end

    def restart(self) -> None:
        """Forget the KV. The known tokens are forced when the sequence runs again, and keep their log-probs."""
        self.attempt += 1
        self.position = self.kv_len = 0
        self.fixed = len(self.tokens)
        self.pages, self.shared, self.saved, self.prefilled = [], 0, None, None
        self.history = self.kept_positions = None
        self.selected = []
        self.kv = KVUse(swaps=self.kv.swaps, restarts=self.kv.restarts)
        self._held = self._dense = self._read = self._steps = 0

    def account(self, segment: Segment, steps: int, given: bool = False) -> None:
        """Add `steps` steps of a segment to the KV statistics. The means are over tokens that were not given."""
        kv, count = self.kv, steps
        if segment.evicted:
            kv.evictions += 1
            kv.pages_freed += segment.pages_freed
        last = segment.kv_len + count
        kv.peak_tokens = max(kv.peak_tokens, last)
        kv.peak_pages = max(kv.peak_pages, segment.pages_held)
        held = count * (segment.kv_len + 1 + last) // 2
        if given:
            kv.given_tokens += count
            kv.given_read_tokens += held
            return
        self._held += held
        dense = segment.position
        self._dense += count * (2 * dense + 1 + count) // 2
        select = self.request.sparsity.select
        if select is None:
            self._read += held
        else:
            step = np.arange(1, count + 1)
            self._read += int(tokens_read(select, dense + step, segment.kv_len + step).sum())
        self._steps += count

    def finish_accounting(self, token_bytes: int) -> KVUse:
        """The KV statistics of the finished rollout."""
        kv = self.kv
        steps = max(self._steps, 1)
        first = 0 if self._steps else self.prompt_len  # a rollout of one token holds its prompt only
        kv.peak_tokens = max(kv.peak_tokens, self.prompt_len)
        kv.mean_tokens = (self._held + first) / steps
        kv.dense_mean_tokens = (self._dense + first) / steps
        kv.mean_read_tokens = (self._read + first) / steps
        kv.peak_bytes = kv.peak_tokens * token_bytes
        kv.mean_bytes = kv.mean_tokens * token_bytes
        return replace(kv)  # a session goes on counting


@dataclass(eq=False)
class Group:
    """The n rollouts of one prompt. `pages` hold the prompt's KV until all of them have started."""

    request: Request
    pending: list[Sequence]
    pages: list[int] = field(default_factory=list)
    prefilled: bool = False


def kind_of(sparsity: Sparsity, adapted: bool) -> BatchKind:
    select = sparsity.select
    return BatchKind(select.method, select.dense_layers, adapted) if select else BatchKind(adapted=adapted)


def rollout_key(seed: int, prompt: int, sample: int) -> int:
    """A signed 64-bit key per rollout: splitmix64 over (seed, prompt, sample)."""
    key = 0
    for word in (seed, prompt, sample):
        key = splitmix64(key + word)
    return key - (1 << 64) if key >> 63 else key
