"""Requests, the rollouts being generated for them, and groups of rollouts that share a prompt."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from alula.engine.rollout import Finish, KVUse, Sampling
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
)
from alula.sparsity.policy import Evict, Sparsity


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
    record: bool = False
    key: int | None = None
    """The rollout's sampling key, if not derived from (seed, prompt, sample)."""
    teacher: Teacher | None = None
    """If given, the acceptance of every forced token is measured."""
    keep_hidden: int = 0
    """Number of rollouts that return the hidden states their tokens were sampled from (`Rollout.hidden`)."""

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
class Segment:
    """Decode steps between two evictions inside one chunk; `kv_len` is the length before the first of them."""

    kv_len: int
    steps: int
    evicted: bool = False
    pages_freed: int = 0
    pages_held: int = 0


@dataclass(eq=False)
class Sequence:
    """One rollout while it is generated."""

    request: Request
    sample: int
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    """Leading pages that are shared with the prompt's group."""
    reserved: int = 0
    """Pages reserved at the start, for an evicting sequence."""
    row: int | None = None
    position: int = 0
    kv_len: int = 0
    remaining: int = 0
    """Decode steps not planned yet. `position` and `kv_len` likewise describe the state after everything planned."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Ids and log-probs [tokens, k] of each chunk; `hidden` likewise."""
    acceptance: list[float] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)
    finish: Finish | None = None
    prefilled: Any = None
    """(PrefillOutput, index of the rollout in it, index of the prompt in it), until the rollout starts."""
    swapped: Any = None
    """Keys, values and last token in host memory, while preempted."""
    history: Any = None
    """int32 [layer, kv_head, position]: `Rollout.history`, if recorded"""
    kept_positions: np.ndarray | None = None
    """int32 [layer, kv_head, slot]: the position that each cached slot holds"""
    selected: list = field(default_factory=list)
    kv: KVUse = field(default_factory=KVUse)
    _held: int = 0
    _dense: int = 0
    _read: int = 0
    _steps: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def key(self) -> int:
        """The key of the rollout's random numbers."""
        request = self.request
        if request.key is not None:
            return request.key
        return rollout_key(request.sampling.seed, request.prompt_index, self.sample)

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
        return UNLIMITED if evict is None else kept(evict, self.prompt_len, self.position)

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer, at most."""
        return self.prompt_len + self.request.sampling.max_new_tokens

    def steps_to_eviction(self, steps: int) -> int:
        """The number of the next `steps` decode steps before an eviction fires; `steps` if none fires."""
        return steps_to_eviction(self.request.sparsity.evict, self.prompt_len, self.position, self.kv_len, steps)

    def max_kept(self) -> int:
        """The most KV tokens that an eviction can leave."""
        return largest_kept(self.request.sparsity.evict, self.prompt_len)

    def max_kv_tokens(self) -> int:
        """The most KV tokens that the sequence can ever hold."""
        return most_held(self.request.sparsity.evict, self.prompt_len, self.max_length)

    def reserved_tokens(self) -> int:
        """The most KV tokens in pages that the sequence does not share: an evicting one reserves them at its start.

        A prompt longer than that is read from the group's pages and compacted before the first step.
        """
        return most_generated(self.request.sparsity.evict, self.prompt_len, self.max_length)

    def account(self, segment: Segment, steps: int) -> None:
        """Add `steps` of a segment's decode steps to the KV statistics."""
        kv, count = self.kv, steps
        if segment.evicted:
            kv.evictions += 1
            kv.pages_freed += segment.pages_freed
        last = segment.kv_len + count
        kv.peak_tokens = max(kv.peak_tokens, last)
        kv.peak_pages = max(kv.peak_pages, segment.pages_held)
        self._held += count * (segment.kv_len + 1 + last) // 2
        dense = self.prompt_len + self._steps
        self._dense += count * (2 * dense + 1 + count) // 2
        select = self.request.sparsity.select
        if select is None:
            self._read += count * (segment.kv_len + 1 + last) // 2
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
        return kv


@dataclass(eq=False)
class Group:
    """The n rollouts of one prompt. `pages` hold the prompt's KV until all of them have started."""

    request: Request
    pending: list[Sequence]
    pages: list[int] = field(default_factory=list)
    prefilled: bool = False


def rollout_key(seed: int, prompt: int, sample: int) -> int:
    """A signed 64-bit key per rollout: splitmix64 over (seed, prompt, sample)."""
    key = 0
    for word in (seed, prompt, sample):
        key = splitmix64(key + word)
    return key - (1 << 64) if key >> 63 else key
