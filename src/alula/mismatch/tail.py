"""The tail of acceptance: the 5th percentile of α over all tokens of a length bin, with a confidence band.

Tokens of one rollout, and rollouts of one prompt, are correlated: resampling tokens gives intervals that are
several times too narrow. So prompts are resampled with all their tokens (cluster bootstrap), the same draw in every
bin, which keeps the correlation between bins. The band holds in all bins at once ("max-t"): with the bootstrap's
standard error s_j of logit(tail_j), the multiplier c is the `confidence` quantile over draws of
max_j |logit(tail*_j) − logit(tail_j)| / s_j, and the band is logit(tail_j) ± c·k_j·s_j. The logit keeps the
band inside [0, 1] and lets it be wider downwards; k_j = sqrt(n/(n−1))·t_{n−1}/z widens it for the few prompts
n of a bin, as Student's t does for a mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alula.errors import RunFailed, require

Array = NDArray[Any]

MIN_PROMPTS = 20
"""A bin with fewer prompts is not trusted: it is flagged (`enough`) and does not affect the multiplier c."""
_CUTS = 1024
"""Number of order statistics that a resample's quantile is chosen from, half of them in the lower tail."""


@dataclass(frozen=True)
class BinTail:
    """The tail of one length bin, with its confidence bounds."""

    value: float
    lower: float
    upper: float
    tokens: int
    prompts: int

    @property
    def enough(self) -> bool:
        return self.prompts >= MIN_PROMPTS


@dataclass(frozen=True, eq=False)
class Tail:
    """The tail of every length bin: bin j holds the tokens at positions [j·width, (j+1)·width). Empty bins are NaN."""

    value: Array
    """The quantile of α in each bin."""
    lower: Array
    """Lower end of its simultaneous confidence band."""
    upper: Array
    tokens: Array
    """Tokens in each bin."""
    prompts: Array
    """Prompts with tokens in each bin."""
    overall: float
    """The same quantile over the tokens of all bins."""
    width: int = 2000
    quantile: float = 0.05
    confidence: float = 0.95

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, j: int) -> BinTail:
        if not 0 <= j < len(self):
            raise IndexError(j)
        return BinTail(
            float(self.value[j]),
            float(self.lower[j]),
            float(self.upper[j]),
            int(self.tokens[j]),
            int(self.prompts[j]),
        )

    def __iter__(self) -> Iterator[BinTail]:
        return (self[j] for j in range(len(self)))

    @property
    def enough(self) -> Array:
        return self.prompts >= MIN_PROMPTS


def tail(
    alpha: ArrayLike,
    positions: ArrayLike,
    prompts: ArrayLike,
    *,
    width: int = 2000,
    bins: int | None = None,
    quantile: float = 0.05,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Tail:
    """The tail of every length bin. α, positions (prompt + generated) and prompt ids are flat arrays, one per token.

    With `bins` given, later positions count in the last bin, as in a schedule.
    """
    require(0 < quantile < 1, f"quantile={quantile}: must lie between 0 and 1.")
    require(0 < confidence < 1, f"confidence={confidence}: must lie between 0 and 1.")
    values, bin_of = np.asarray(alpha, dtype=np.float64), np.asarray(positions) // width
    require(len(values) > 0, "alpha: no tokens.")
    if np.isnan(values).any():  # sorted last, they would count as agreement
        raise RunFailed("acceptance is not a number: the model's output is not finite; check its weights and dtype.")
    ids, prompt_of = np.unique(np.asarray(prompts), return_inverse=True)
    count = bins if bins is not None else int(bin_of.max()) + 1
    bin_of = np.minimum(bin_of, count - 1)

    rng = np.random.default_rng(seed)
    draws = rng.multinomial(len(ids), np.full(len(ids), 1 / len(ids)), size=resamples)
    estimate, resampled = np.full(count, np.nan), np.full((resamples, count), np.nan)
    tokens, present = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for j in range(count):
        inside = bin_of == j
        tokens[j], present[j] = inside.sum(), len(np.unique(prompt_of[inside]))
        if tokens[j]:
            estimate[j] = lower_quantile(values[inside], quantile)
            resampled[:, j] = resampled_quantiles(values[inside], prompt_of[inside], draws, quantile)
    lower, upper = simultaneous_band(estimate, resampled, present, confidence)
    overall = lower_quantile(values, quantile)
    return Tail(estimate, lower, upper, tokens, present, overall, width, quantile, confidence)


def lower_quantile(values: Array, quantile: float) -> float:
    """The smallest value with at least a `quantile` share of the values at or below it."""
    rank = max(ceil(quantile * len(values) - 1e-9), 1) - 1
    return float(np.partition(values, rank)[rank])


def resampled_quantiles(values: Array, prompt_of: Array, draws: Array, quantile: float) -> Array:
    """`lower_quantile` of every resample; resample b contains all tokens of prompt i draws[b, i] times.

    One sort and one matrix product: counts[i, c] tokens of prompt i lie at or below the c-th cut, so
    draws @ counts is every resample's distribution function. NaN where a resample contains no token.
    """
    order = np.argsort(values, kind="stable")
    total = len(values)
    near = min(ceil(4 * quantile * total), total) - 1
    cuts = np.unique(
        np.linspace(0, near, _CUTS // 2).astype(int).tolist()
        + np.linspace(near, total - 1, _CUTS // 2).astype(int).tolist()
    )
    cell = np.searchsorted(cuts, np.arange(total))
    counts = np.bincount(prompt_of[order] * len(cuts) + cell, minlength=draws.shape[1] * len(cuts))
    below = draws.astype(np.float64) @ counts.reshape(draws.shape[1], len(cuts)).cumsum(1)
    totals = below[:, -1:]
    quantiles = values[order][cuts[(below >= quantile * totals - 1e-9).argmax(1)]]
    return np.where(totals[:, 0] > 0, quantiles, np.nan)


def simultaneous_band(estimate: Array, resampled: Array, prompts: Array, confidence: float) -> tuple[Array, Array]:
    """The max-t band (formula: module docstring). Bins with too few prompts do not widen the band of the others."""
    lower, upper = np.full_like(estimate, np.nan), np.full_like(estimate, np.nan)
    seen = prompts >= 2
    lower[prompts == 1], upper[prompts == 1] = 0.0, 1.0  # one prompt gives no variance
    if not seen.any():
        return lower, upper
    centre, spread = _logit(estimate[seen]), _logit(resampled[:, seen])
    error = np.nanstd(spread, axis=0, ddof=1)
    studentised = np.nan_to_num(np.abs(spread - centre) / np.where(error > 0, error, 1.0))
    trusted = (prompts[seen] >= MIN_PROMPTS) & (error > 1e-9)  # a constant tail carries no information
    family = studentised[:, trusted] if trusted.any() else studentised
    multiplier = float(np.quantile(family.max(axis=1), confidence))
    half = multiplier * np.array([small_sample_factor(int(n), confidence) for n in prompts[seen]]) * error
    lower[seen] = np.minimum(_expit(centre - half), estimate[seen])
    upper[seen] = np.maximum(_expit(centre + half), estimate[seen])
    return lower, upper


def small_sample_factor(prompts: int, confidence: float) -> float:
    """sqrt(n/(n−1)) · t_{n−1}/z, Student's t from its Cornish-Fisher expansion (error < 1 % for n ≥ 10)."""
    z, df = NormalDist().inv_cdf((1 + confidence) / 2), prompts - 1
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    return sqrt(prompts / df) * t / z


def _logit(x: Array) -> Array:
    x = np.clip(x, 1e-6, 1 - 1e-6)
    return np.log(x / (1 - x))


def _expit(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
