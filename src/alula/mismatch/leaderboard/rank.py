"""Paired differences of vetoed shares, and ranks that claim no more than they show.

The interval of a difference of two shares on the same prompts is Newcombe's (Statistics in Medicine 17, 1998, method
10): Wilson's intervals of both, joined with the correlation φ of the two over prompts. Rollouts of a prompt count as
one.
"""

import math
from collections.abc import Sequence

import numpy as np

from alula.mismatch.leaderboard.row import NEVER, Sample


def paired_difference(a: Sample, b: Sample, samples: int) -> tuple[float, float, float]:
    """Vetoed share of a minus that of b, with its 95 % interval."""
    first, second = a.share(samples), b.share(samples)
    (l1, u1), (l2, u2) = first.interval, second.interval
    p1, p2 = first.value, second.value
    phi = correlation(by_prompt(a, samples), by_prompt(b, samples))
    difference = p1 - p2

    def reach(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    return difference, difference - reach(p1 - l1, u2 - p2), difference + reach(u1 - p1, p2 - l2)


def by_prompt(sample: Sample, samples: int) -> np.ndarray:
    """The vetoed share of every prompt."""
    return (np.asarray(sample.vetoed) != NEVER).reshape(-1, samples).mean(1)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's with Newcombe's correction: a positive covariance is lowered by 1/2n. 0 if one does not vary."""
    a, b = a - a.mean(), b - b.mean()
    covariance, size = float((a * b).mean()), math.sqrt(float((a * a).mean() * (b * b).mean()))
    if covariance > 0:
        covariance = max(covariance - 1 / (2 * len(a)), 0.0)
    return covariance / size if size > 0 else 0.0


def ranks(rows: Sequence[Sample], samples: int) -> list[tuple[int, int]]:
    """Best and worst rank of every row by its vetoed share: rows are ahead only if the paired interval says so."""
    better = [[paired_difference(a, b, samples)[2] < 0 for b in rows] for a in rows]  # a is ahead of b
    return [(1 + sum(line[i] for line in better), len(rows) - sum(better[i])) for i in range(len(rows))]
