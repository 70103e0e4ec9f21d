"""How runs are judged; fixed before any of them was made.

collapse      the dense policy's held-out accuracy is below its start at two or more later evaluations
final         the dense policy's held-out accuracy at the last evaluation
interval      over seeds, mean ± t·s/√n at 95 %
equivalence   to the dense arm: the 90 % interval of the paired differences lies within ± MARGIN (two one-sided tests)
"""

from collections.abc import Sequence
from math import hypot, sqrt
from statistics import fmean, stdev
from typing import Any

MARGIN = 0.05
T95 = {3: 4.303, 4: 3.182, 5: 2.776}
T90 = {3: 2.920, 4: 2.353, 5: 2.132}
"""Student's t, two-sided, by the number of seeds. Fewer than three say nothing of a spread."""

Row = dict[str, Any]
"""A line of a raw file: one run."""


def dense_accuracy(run: Row) -> list[tuple[int, float]]:
    return [(row["step"], row["accuracy"]) for row in run["evals"] if row["policy"] == "dense"]


def start(run: Row) -> float:
    return dense_accuracy(run)[0][1]


def final(run: Row) -> float:
    return dense_accuracy(run)[-1][1]


def reached(run: Row, goal: float) -> int | None:
    """The step of the first evaluation at which the dense policy is so good."""
    return next((step for step, accuracy in dense_accuracy(run) if accuracy >= goal), None)


def collapsed(run: Row) -> bool:
    _, *later = dense_accuracy(run)
    return sum(accuracy < start(run) for _, accuracy in later) >= 2


def outcome(run: Row) -> str:
    """On the long beds, by changes of more than two standard errors: `fell` if two or more later evaluations are below
    the start, `learned` if the last one is above it, else `stalled`. For finished runs."""
    first, *later = [row for row in run["evals"] if row["policy"] == "dense"]
    gains = [(row["accuracy"] - first["accuracy"]) / hypot(first["stderr"], row["stderr"]) for row in later]
    if sum(gain < -2 for gain in gains) >= 2:
        return "fell"
    return "learned" if gains[-1] > 2 else "stalled"


def over_run(run: Row, metric: str) -> float:
    values = [value for value in run["steps"].get(metric, []) if value is not None]
    return fmean(values) if values else 0.0


def at_end(run: Row, metric: str) -> float:
    """Mean of the last eighth of the steps."""
    values = run["steps"][metric]
    return fmean(values[-max(1, len(values) // 8) :])


def interval(values: Sequence[float], t: dict[int, float] = T95) -> tuple[float, float]:
    """Mean and half-width, which is infinite for fewer than three."""
    if len(values) < min(t):
        return fmean(values), float("inf")
    return fmean(values), t[len(values)] * stdev(values) / sqrt(len(values))


def against(arm: Sequence[Row], dense: Sequence[Row]) -> tuple[float, float]:
    """Paired difference of the final accuracies over the seeds that both have: mean and half-width at 90 %."""
    base = {run["seed"]: final(run) for run in dense}
    return interval([final(run) - base[run["seed"]] for run in arm if run["seed"] in base], T90)


def equivalent(difference: tuple[float, float]) -> bool:
    return abs(difference[0]) + difference[1] <= MARGIN
