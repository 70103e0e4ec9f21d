"""The learning rate as a pure function of the step."""

import math

from alula.config.settings import Decay


def learning_rate(
    step: int, peak: float, warmup: int = 0, total: int = 0, decay: Decay = "constant", floor: float = 0.0
) -> float:
    """Rate of optimizer step `step`, counted from 0.

    peak · (step + 1) / warmup while it warms up, then constant, or falling from `peak` to `floor` · `peak`
    over the steps left until `total`, along a line or half a cosine, and staying there.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if decay == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 1 - done if decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (floor + (1 - floor) * left)
