"""What one row asks of a decode step: KV tokens held and read, pages scored, tokens moved by evictions."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alula.sparsity.policy import Budget, Evict, Select, Sparsity
from alula.sparsity.schedule import Schedule
from alula.sparsity.select import METHODS

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Demand:
    """Per length (prompt + generated tokens before the step), averaged over the layers of the model."""

    held: Array
    """KV tokens in the cache."""
    read: Array
    """KV tokens that attention reads: below `held` under a selector."""
    scored: Array
    """Page summaries that a selector scores: pages times vectors per page (two for Quest)."""
    moved: Array
    """KV tokens scored and copied by evictions."""
    summaries: Array
    """Page summaries kept, of every layer, in KV tokens: one vector is half of a token's key and value."""


def demand(sparsity: Sparsity, prompt: int, new_tokens: int, layers: int) -> Demand:
    """The demand of a whole generation: element i is the step at length prompt + i."""
    lengths = np.arange(prompt, prompt + new_tokens)
    held, moved = _held(sparsity.evict, prompt, lengths)
    read, scored, summaries = held, np.zeros_like(held), np.zeros_like(held)
    if sparsity.select:
        read, scored, summaries = _selected(sparsity.select, lengths, held, layers)
    return Demand(held, read, scored, moved, summaries)


def _selected(select: Select, lengths: Array, held: Array, layers: int) -> tuple[Array, Array, Array]:
    """Layers below `dense_layers` read everything; so does a step whose budget covers the cache."""
    budget = budgets(select.budget, lengths)
    sparse = max(layers - select.dense_layers, 0) / layers
    read = (1 - sparse) * held + sparse * np.minimum(budget, held)
    vectors = np.ceil(held / select.block) * METHODS[select.method].summary_kinds
    scored = np.where(budget < held, sparse * vectors, 0.0)
    return read, scored, vectors / 2


def _held(evict: Evict | None, prompt: int, lengths: Array) -> tuple[Array, Array]:
    """The evictor's saw-tooth: at budget + buffer the cache falls to budget, before the step's attention."""
    if evict is None:
        return lengths.astype(np.float64), np.zeros(len(lengths))
    allowed = budgets(evict.budget, lengths) + (prompt if evict.protect_prompt else 0)
    held, moved, cached = np.empty(len(lengths)), np.zeros(len(lengths)), prompt
    for i, budget in enumerate(allowed.tolist()):
        if cached >= budget + evict.buffer:
            moved[i], cached = cached, budget
        held[i] = cached
        cached += 1
    return held, moved


def budgets(budget: Budget, lengths: ArrayLike) -> Array:
    """The budget in force at every length."""
    at = np.asarray(lengths)
    if isinstance(budget, Schedule):
        return np.asarray(budget.budgets)[np.minimum(at // budget.width, len(budget.budgets) - 1)]
    return np.full(at.shape, budget)
