"""Bytes of KV that a policy holds and reads, with all that belongs to it, and budgets of equal bytes.

    held = pages · page · token bytes + ring of queries + attention sums + page summaries      peak and mean over steps
    read = tokens that attention reads · token bytes + page summaries that a selector scores   mean over steps

A page counts whole, however few of its slots are filled. Window, sinks and a protected prompt are tokens like others.
An 8-bit cache counts its scales. Not counted: what is once per engine (TriAttention's statistics), what an eviction
reads and copies between two steps, and the prompt's pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alula.models.geometry import Geometry
from alula.sparsity.evict import build
from alula.sparsity.family import PolicyFamily
from alula.sparsity.footprint import footprint, selecting_layers, tokens_read
from alula.sparsity.policy import Evict, Select, Sparsity
from alula.sparsity.select import METHODS as SELECTORS

Lengths = Sequence[tuple[int, int]]
"""Prompt and generated tokens of every rollout."""


@dataclass(frozen=True)
class KVBytes:
    """Bytes of one sequence, over all layers and heads."""

    held: float
    """Mean over the decode steps."""
    peak: float
    """Most of any decode step, mean over the sequences."""
    read: float
    """Mean over the decode steps."""


def kv_bytes(geometry: Geometry, page: int, sparsity: Sparsity, lengths: Lengths) -> KVBytes:
    """The bytes of rollouts of these lengths."""
    held, read, peaks = [], [], []
    for prompt, generated in lengths:
        steps = max(generated - 1, 1)  # the first token comes with the prompt
        use = _steps(geometry, page, sparsity, prompt, steps)
        held.append(use[0])
        read.append(use[1])
        peaks.append(use[0].max())
    return KVBytes(float(np.concatenate(held).mean()), float(np.mean(peaks)), float(np.concatenate(read).mean()))


def _steps(geometry: Geometry, page: int, sparsity: Sparsity, prompt: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes held and read in every decode step, the token of the step included."""
    tokens = footprint(sparsity, prompt, steps, geometry.layers).held.astype(np.int64) + 1
    pages = -(-tokens // page)
    held = pages * page * geometry.kv_token_bytes
    if sparsity.evict is not None:
        held = held + row_state_bytes(geometry, sparsity.evict, int(tokens.max()))
    if sparsity.select:
        held = held + pages * summary_bytes(geometry, sparsity.select)
    return held, read_bytes(geometry, page, sparsity.select, np.arange(prompt, prompt + steps) + 1, tokens)


def read_bytes(geometry: Geometry, page: int, select: Select | None, length: Any, tokens: Any) -> Any:
    """Bytes of KV and page summaries that a decode step reads of a sequence of this length, `tokens` of it cached."""
    selecting = selecting_layers(select, geometry.layers)
    per_layer = geometry.kv_token_bytes // geometry.layers
    everything = (geometry.layers - selecting) * tokens * per_layer
    if select is None:
        return everything
    chosen = tokens_read(select, length, tokens)
    scored = np.where(chosen < tokens, -(-tokens // page) * summary_bytes(geometry, select) // geometry.layers, 0)
    return everything + selecting * (chosen * per_layer + scored)


def row_state_bytes(geometry: Geometry, evict: Evict, tokens: int) -> int:
    """Recent queries and, for up to `tokens` KV tokens, attention sums that an evictor keeps for a sequence."""
    evictor = build(evict)
    ring = evictor.queries * geometry.query_heads * geometry.vector_bytes
    sums = 4 * geometry.kv_heads * tokens if evictor.accumulates else 0
    return geometry.layers * (ring + sums)


def summary_bytes(geometry: Geometry, select: Select) -> int:
    """A page's summary."""
    return SELECTORS[select.method].vectors * geometry.layers * geometry.kv_heads * geometry.vector_bytes


def fit_budget(family: PolicyFamily, limit: float, longest: int, measure: Callable[[Sparsity], float]) -> int | None:
    """The largest budget below `longest` with `measure(policy) <= limit`; None if the smallest has more."""
    low, high = family.part.least_budget, longest
    if low >= high or measure(family.policy(low)) > limit:
        return None
    while high - low > 1:  # `low` fits; `high` does not, or covers everything
        middle = (low + high) // 2
        low, high = (middle, high) if measure(family.policy(middle)) <= limit else (low, middle)
    return low
