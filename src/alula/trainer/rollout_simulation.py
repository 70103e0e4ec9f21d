"""Seconds of a batch of rollouts on one engine, by replaying its schedule on a cost model of the decode step.

Answers may differ in length: rows that finish leave the batch, waiting rollouts take their place, and as many run
together as rows and KV memory allow. Two simplifications make it optimistic: swapping is free, and prompts have equal
lengths, so that evictions fall on the same steps.
"""

from collections.abc import Sequence

import numpy as np

from alula.mismatch.plan.cost import Array, CostModel
from alula.sparsity.footprint import footprint
from alula.sparsity.policy import Sparsity

CHUNK = 16
"""Decode steps between two decisions of the schedule."""


def answer_lengths(count: int, mean: float, most: int) -> list[int]:
    """`count` lengths with about this mean, shuffled: most · u^(most / mean − 1) for u spread evenly over (0, 1)."""
    spread = (np.arange(count) + 0.5) / count
    lengths = np.maximum(1, np.rint(most * spread ** (most / mean - 1))).astype(int)
    lengths[-1] = most
    return np.random.default_rng(0).permutation(lengths).tolist()


def decode_seconds(
    cost: CostModel, sparsity: Sparsity, lengths: Sequence[int], prompt: int, *, rows: int, kv_bytes: float
) -> float:
    """Decode time of answers of these lengths to prompts of `prompt` tokens, with at most `rows` at a time."""
    use = footprint(sparsity, prompt, max(lengths), cost.geometry.layers)
    geometry = cost.geometry
    held = (use.held + use.summaries / geometry.kv_share) * geometry.kv_token_bytes  # summaries are never quantised
    left, done = np.asarray(lengths), np.zeros(len(lengths), dtype=int)
    seconds = 0.0
    while len(left):
        running = _running(held[np.minimum(done + CHUNK, len(held)) - 1], rows, kv_bytes)
        steps = done[:running, None] + np.arange(CHUNK)
        active = np.arange(CHUNK) < left[:running, None]
        batch = active.sum(0)
        read, scored, moved = (_mean(values, steps, active) for values in (use.read, use.scored, use.moved))
        seconds += float(cost.step_ms(batch, read, scored, moved)[batch > 0].sum()) / 1e3
        done[:running] += CHUNK
        left[:running] -= CHUNK
        done, left = done[left > 0], left[left > 0]
    return seconds


def _mean(values: Array, steps: Array, active: Array) -> Array:
    """Mean of a step's values over its active rows."""
    at = np.where(active, values[np.minimum(steps, len(values) - 1)], 0.0)
    return at.sum(0) / np.maximum(active.sum(0), 1)


def _running(held: Array, rows: int, kv_bytes: float) -> int:
    """How many of the first sequences run: as many as fit, and at least one."""
    return max(1, min(rows, int(np.searchsorted(np.cumsum(held), kv_bytes, side="right"))))
