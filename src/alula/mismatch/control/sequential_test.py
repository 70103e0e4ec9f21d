"""Sequential test, over training steps, of whether too many (or too few) tokens of a length bin lie below a threshold.

The tail is at or above a threshold exactly if at most a share `quantile` of the tokens has α below it. Prompts are the
independent units, so each prompt i bets once per step and bin with its n_i tokens, of which k_i lie below:
x_i = (k_i − quantile·n_i) / cap has a mean ≤ 0 while the tail holds, and cap ≥ n_i bounds it. For a stake λ the
product of (1 + λ·x_i) is then a fair or losing bet, and so is M ← max(M, 1) · Π_i (1 + λ·x_i), which restarts whenever
it has lost: a CUSUM of bets (an "e-detector": Shin, Ramdas and Rinaldo, arXiv 2203.03532). Averaging over a grid of
stakes keeps that property without guessing the effect size. The guarantee needs no noise model and no horizon: while
the hypothesis is true, the expected number of steps until M of any of J bins reaches A is at least A/J.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class SequentialTest:
    """log M per bin. `side` +1 tests whether the tail is below the threshold, −1 whether it is above."""

    def __init__(self, bins: int, quantile: float, side: int) -> None:
        self.quantile, self.side = quantile, side
        worst = quantile if side > 0 else 1 - quantile
        self.stakes = 0.9 / worst / 2.0 ** np.arange(6)  # a stake of 1/worst could lose everything at once
        self.log_m = np.zeros((bins, len(self.stakes)))

    def add(self, bins: Array, tokens: Array, below: Array, cap: Array) -> None:
        """Add one step's prompts, one entry per (bin, prompt); `cap` is the most tokens a prompt can have there."""
        x = self.side * (below - self.quantile * tokens) / cap
        gains = np.zeros_like(self.log_m)
        np.add.at(gains, bins, np.log1p(self.stakes * x[:, None]))
        seen = np.unique(bins)
        self.log_m[seen] = np.maximum(self.log_m[seen], 0) + gains[seen]

    def value(self) -> Array:
        """log of the average M over stakes, per bin."""
        peak = self.log_m.max(1)
        return peak + np.log(np.exp(self.log_m - peak[:, None]).mean(1))

    def reset(self, bins: Array) -> None:
        self.log_m[bins] = 0
