"""Downsampling and smoothing of curves."""

import numpy as np

from alula.report.runs import Curve

MOST_POINTS = 500


def thin(curve: Curve) -> Curve:
    """At most `MOST_POINTS`: the first, the last, and the lowest and highest of every interval, so that spikes stay."""
    count = len(curve.steps)
    if count <= MOST_POINTS:
        return curve
    kept = {0, count - 1}
    for part in np.array_split(np.arange(1, count - 1), (MOST_POINTS - 2) // 2):
        kept |= {int(part[curve.values[part].argmin()]), int(part[curve.values[part].argmax()])}
    return _at(curve, np.array(sorted(kept)))


def smooth(curve: Curve) -> Curve:
    """Exponential moving average over about a twentieth of the run, corrected for its start at zero."""
    decay = 1 - 2 / (span(curve) + 1)
    level = weight = 0.0
    levels = np.empty(len(curve.values))
    for index, value in enumerate(curve.values):
        level, weight = decay * level + value, decay * weight + 1
        levels[index] = level / weight
    most = min(MOST_POINTS // 2, len(levels))
    picked = np.unique(np.linspace(0, len(levels) - 1, most).round().astype(int))
    return _at(Curve(curve.steps, levels), picked)


def span(curve: Curve) -> int:
    return int(np.clip(len(curve.values) / 20, 1, 200))


def points(curve: Curve) -> dict[str, list[float]]:
    """Plain numbers for the page, with five digits."""
    return {"x": curve.steps.tolist(), "y": [float(f"{value:.5g}") for value in curve.values]}


def _at(curve: Curve, index: np.ndarray) -> Curve:
    return Curve(curve.steps[index], curve.values[index])
