"""Least squares with non-negative coefficients."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def nnls(a: Array, b: Array, tolerance: float = 1e-10) -> Array:
    """argmin_x ‖a x − b‖² subject to x ≥ 0: the active-set method of Lawson and Hanson (1974, chapter 23).

    Columns are scaled to unit length first, so that features may come in any unit.
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x, passive = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    threshold = tolerance * max(float(np.linalg.norm(b)), 1e-300)
    for _ in range(10 * a.shape[1]):  # it ends long before; rounding could make two columns swap for ever
        gradient = np.where(passive, -np.inf, a.T @ (b - a @ x))
        if gradient.max() <= threshold:
            break
        passive[gradient.argmax()] = True
        x = _least_squares_inside(a, b, x, passive)
    return x / scale


def _least_squares_inside(a: Array, b: Array, x: Array, passive: Array) -> Array:
    """Move from x towards the least-squares solution on `passive`, dropping columns that turn negative."""
    while True:
        target = np.zeros_like(x)
        target[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
        falling = passive & (target <= 0)
        if not falling.any():
            return target
        gap = np.where(falling, x - target, 1.0)
        share = np.where(falling, np.divide(x, gap, out=np.zeros_like(x), where=gap > 0), np.inf)
        x = x + share.min() * (target - x)
        passive[share.argmin()] = False
        x[~passive] = 0
