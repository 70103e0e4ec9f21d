"""One rollout while it is being made, and the group of rollouts that share a prompt."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alula.engine.rollout import Finish, KVUse, Sampling
from alula.sparsity.policy import Sparsity, budget_at
from alula.sparsity.schedule import Schedule

UNLIMITED = 1 << 30


@dataclass(eq=False)
class Teacher:
    """What the dense policy said of a forced request's tokens: token i is predicted from hidden[start + i]."""

    hidden: Any
    """[tokens, width], shared by all requests of a call; on the device, or in host memory where it is large"""
    start: int


@dataclass(eq=False)
class Request:
    """A prompt and how to continue it; `forced` gives the tokens instead of drawing them (scoring)."""

    id: int
    prompt_ids: list[int]
    sampling: Sampling
    sparsity: Sparsity
    stop: frozenset[int]
    prompt_index: int = 0
    forced: list[int] | None = None
    record: bool = False
    key: int | None = None
    """The rollout's random key, where it is not made from (seed, prompt, sample)."""
    teacher: Teacher | None = None
    """Given, the acceptance of every forced token is measured as well."""
    keep_hidden: int = 0
    """Of how many of its rollouts to return the hidden states that tokens were drawn from (`Rollout.hidden`)."""


@dataclass
class Segment:
    """Decode steps between two evictions inside one chunk; `kv_len` is what the first of them finds."""

    kv_len: int
    steps: int
    evicted: bool = False
    pages_freed: int = 0
    pages_held: int = 0


@dataclass(eq=False)
class Sequence:
    request: Request
    sample: int
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    """How many leading pages also belong to the prompt's group."""
    reserved: int = 0
    """Pages set aside at the start, for an evicting sequence."""
    row: int | None = None
    position: int = 0
    kv_len: int = 0
    remaining: int = 0
    """Decode steps still to be planned; `position`, `kv_len` and this are those after all that is planned."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Ids and log-probs [tokens, k] of each chunk; `hidden` likewise."""
    acceptance: list[float] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)
    finish: Finish | None = None
    first: Any = None
    """What prefill left on the device for this rollout's start."""
    swapped: Any = None
    """Pages and row state in host memory, while preempted."""
    history: Any = None
    kept_positions: np.ndarray | None = None
    selected: list = field(default_factory=list)
    kv: KVUse = field(default_factory=KVUse)
    _held: int = 0
    _dense: int = 0
    _read: int = 0
    _steps: int = 0

    @property
    def prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def keeps_hidden(self) -> bool:
        return self.sample < self.request.keep_hidden

    @property
    def evicts(self) -> bool:
        return self.request.sparsity.evict is not None

    @property
    def keep(self) -> int:
        """KV tokens that an eviction now would leave."""
        evict = self.request.sparsity.evict
        if evict is None:
            return UNLIMITED
        return budget_at(evict.budget, self.position) + (self.prompt if evict.protect_prompt else 0)

    def steps_to_eviction(self, steps: int) -> int:
        """How many of the next `steps` decode steps come before an eviction fires (`steps`: all of them).

        It fires before a step that finds budget + buffer tokens: a function of this sequence's own length only.
        """
        evict = self.request.sparsity.evict
        if evict is None:
            return steps
        if isinstance(evict.budget, int):
            return min(steps, max(0, self.keep + evict.buffer - self.kv_len))
        extra = evict.buffer + (self.prompt if evict.protect_prompt else 0)
        for step in range(steps):
            if self.kv_len + step >= evict.budget.at(self.position + step) + extra:
                return step
        return steps

    def largest_keep(self) -> int:
        evict = self.request.sparsity.evict
        if evict is None:
            return UNLIMITED
        largest = max(evict.budget.budgets) if isinstance(evict.budget, Schedule) else evict.budget
        return largest + (self.prompt if evict.protect_prompt else 0)

    def ceiling(self) -> int:
        """The most KV tokens this sequence can ever hold."""
        whole = self.prompt + self.request.sampling.max_new_tokens
        evict = self.request.sparsity.evict
        return whole if evict is None else min(whole, max(self.prompt, self.largest_keep() + evict.buffer))

    def own(self) -> int:
        """The most KV tokens in pages of its own: what an evicting sequence sets aside when it starts.

        A prompt past the limit is read from the group's pages and compacted before the first step.
        """
        evict = self.request.sparsity.evict
        whole = self.prompt + self.request.sampling.max_new_tokens
        return whole if evict is None else min(whole, self.largest_keep() + evict.buffer)

    def account(self, segment: Segment, steps: int, page: int) -> None:
        """Add `steps` of a segment's decode steps to the KV statistics."""
        kv, count = self.kv, steps
        if segment.evicted:
            kv.evictions += 1
            kv.pages_freed += segment.pages_freed
        last = segment.kv_len + count
        kv.peak_tokens = max(kv.peak_tokens, last)
        kv.peak_pages = max(kv.peak_pages, segment.pages_held)
        self._held += count * (segment.kv_len + 1 + last) // 2
        dense = self.prompt + self._steps
        self._dense += count * (2 * dense + 1 + count) // 2
        select = self.request.sparsity.select
        if select is None:
            self._read += count * (segment.kv_len + 1 + last) // 2
        else:
            for i in range(count):
                held = segment.kv_len + 1 + i
                budget = -(-budget_at(select.budget, dense + 1 + i) // page)
                pages = -(-held // page)
                self._read += held if budget >= pages else (budget - 1) * page + held - (pages - 1) * page
        self._steps += count

    def finish_accounting(self, token_bytes: int) -> KVUse:
        kv = self.kv
        steps = max(self._steps, 1)
        first = 0 if self._steps else self.prompt  # a rollout of one token holds its prompt only
        kv.peak_tokens = max(kv.peak_tokens, self.prompt)
        kv.mean_tokens = (self._held + first) / steps
        kv.dense_mean_tokens = (self._dense + first) / steps
        kv.mean_read_tokens = (self._read + first) / steps
        kv.peak_bytes = kv.peak_tokens * token_bytes
        kv.mean_bytes = kv.mean_tokens * token_bytes
        return kv


@dataclass(eq=False)
class Group:
    """The n rollouts of one prompt. `pages` hold the prompt's KV until every rollout has started."""

    request: Request
    pending: list[Sequence]
    pages: list[int] = field(default_factory=list)
    prefilled: bool = False
