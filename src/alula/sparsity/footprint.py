"""KV footprint of a policy: how many KV tokens a sequence holds and reads, and when an eviction fires.

All counts are per layer and head. `length` is the number of tokens of the sequence, prompt included, evicted or not;
`held` is the number of them that are cached. Functions of lengths take integers or arrays.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alula.sparsity.policy import Budget, Evict, Select, Sparsity, budget_at
from alula.sparsity.schedule import Schedule
from alula.sparsity.select import METHODS

Array = NDArray[Any]
UNLIMITED = 1 << 30
"""A number of tokens that no sequence reaches."""


def budgets(budget: Budget, length: Any) -> Any:
    """The budget in force at every length."""
    if isinstance(length, int):
        return budget_at(budget, length)
    if isinstance(budget, Schedule):
        return np.asarray(budget.budgets)[np.minimum(length // budget.width, len(budget.budgets) - 1)]
    return np.full(length.shape, budget)


def kept(evict: Evict, prompt: int, length: Any) -> Any:
    """KV tokens that an eviction at `length` keeps."""
    return budgets(evict.budget, length) + (prompt if evict.protect_prompt else 0)


def trigger(evict: Evict, prompt: int, length: Any) -> Any:
    """An eviction fires before a decode step at `length` if at least this many KV tokens are cached."""
    return kept(evict, prompt, length) + evict.buffer


def steps_to_eviction(evict: Evict | None, prompt: int, length: int, held: int, steps: int) -> int:
    """Number of decode steps before the next eviction, at most `steps`."""
    if evict is None:
        return steps
    if isinstance(evict.budget, int):
        return min(steps, max(0, trigger(evict, prompt, length) - held))
    due = (step for step in range(steps) if held + step >= trigger(evict, prompt, length + step))
    return next(due, steps)


def largest_kept(evict: Evict | None, prompt: int) -> int:
    """The most KV tokens that any eviction keeps."""
    if evict is None:
        return UNLIMITED
    largest = max(evict.budget.budgets) if isinstance(evict.budget, Schedule) else evict.budget
    return largest + (prompt if evict.protect_prompt else 0)


def most_generated(evict: Evict | None, prompt: int, longest: int) -> int:
    """The most KV tokens that a sequence of up to `longest` tokens holds once it generates."""
    return longest if evict is None else min(longest, largest_kept(evict, prompt) + evict.buffer)


def most_held(evict: Evict | None, prompt: int, longest: int) -> int:
    """The most KV tokens that a sequence ever holds. A prompt is held in full until its first decode step."""
    return max(min(prompt, longest), most_generated(evict, prompt, longest))


def pages_read(select: Select, length: Any) -> Any:
    """Pages that a selecting layer may read in the step that extends a sequence to `length` tokens."""
    return -(-budgets(select.budget, length) // select.block)


def tokens_read(select: Select, length: Any, held: Any) -> Any:
    """KV tokens that a selecting layer reads: full pages, except that the last may be partly filled."""
    allowed, cached = pages_read(select, length), -(-held // select.block)
    return np.where(allowed >= cached, held, (allowed - 1) * select.block + held - (cached - 1) * select.block)


def selecting_layers(select: Select | None, layers: int) -> int:
    """Layers that read a selection; a selector's first `dense_layers` read everything."""
    return 0 if select is None else max(layers - select.dense_layers, 0)


@dataclass(frozen=True, eq=False)
class Footprint:
    """Per decode step of one row, averaged over the layers of the model."""

    held: Array
    """KV tokens in the cache."""
    read: Array
    """KV tokens that attention reads: below `held` under a selector."""
    scored: Array
    """Page summaries that a selector scores: pages times vectors per page (two for Quest)."""
    moved: Array
    """KV tokens scored and copied by evictions."""
    summaries: Array
    """Size of the page summaries kept, in KV tokens: one vector is half of a token's key and value."""


def footprint(sparsity: Sparsity, prompt: int, new_tokens: int, layers: int) -> Footprint:
    """The footprint of a complete generation: element i is the step at length prompt + i."""
    lengths = np.arange(prompt, prompt + new_tokens)
    held, moved = _sawtooth(sparsity.evict, prompt, lengths)
    read, scored, summaries = held, np.zeros_like(held), np.zeros_like(held)
    if select := sparsity.select:
        share = selecting_layers(select, layers) / layers
        budget = budgets(select.budget, lengths)
        read = (1 - share) * held + share * np.minimum(budget, held)
        vectors = np.ceil(held / select.block) * METHODS[select.method].vectors
        scored, summaries = np.where(budget < held, share * vectors, 0.0), vectors / 2
    return Footprint(held, read, scored, moved, summaries)


def is_ever_sparse(sparsity: Sparsity, prompt: int, new_tokens: int, layers: int) -> bool:
    """Whether a generation of this length evicts a token, or leaves one unread."""
    use = footprint(sparsity, prompt, new_tokens, layers)
    return bool((use.moved > 0).any() or (use.read < use.held).any())


def _sawtooth(evict: Evict | None, prompt: int, lengths: Array) -> tuple[Array, Array]:
    """Tokens held and moved per step. At the trigger the cache shrinks to the kept tokens, before attention runs."""
    if evict is None:
        return lengths.astype(np.float64), np.zeros(len(lengths))
    held, moved, cached = np.empty(len(lengths)), np.zeros(len(lengths)), prompt
    limits, kept_at = trigger(evict, prompt, lengths).tolist(), kept(evict, prompt, lengths).tolist()
    for i, limit in enumerate(limits):
        if cached >= limit:
            moved[i], cached = cached, kept_at[i]
        held[i] = cached
        cached += 1
    return held, moved
