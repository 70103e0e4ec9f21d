"""Schedules for evictors, built forward: what was evicted never returns, so a bin's tail depends on the past."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from alula.errors import require
from alula.mismatch.plan import Infeasible, PlannedBin, inherit_from
from alula.mismatch.tail import Estimate

Measure = Callable[[tuple[int, ...], int, int], Estimate]
"""measure(budgets of the earlier bins, bin, candidate budget) -> tail in that bin under that schedule."""


@dataclass
class _Bin:
    rung: int
    tail: Estimate | None


def plan_forward(
    measure: Measure, candidates: Sequence[int], *, bins: int, width: int, tau: float
) -> tuple[PlannedBin, ...]:
    """In every bin the smallest candidate, not below the bin before, whose tail's lower bound is ≥ tau.

    The tail is taken to grow with the budget, of this bin and of earlier ones: so candidates are bisected, not
    swept, and where even the largest fails, earlier bins rise (the nearest first, as few rungs in all as will
    do). A bin with too few prompts inherits: the next trusted bin's budget, or the last one's at the end.
    """
    ladder = sorted(set(candidates))
    require(len(ladder) > 0, "candidates: an empty list; give at least one budget.")
    top = len(ladder) - 1
    path: list[_Bin] = []
    for j in range(bins):

        def tail(rung: int, before: list[int], j: int = j) -> Estimate:
            return measure(tuple(ladder[r] for r in before), j, ladder[rung])

        path.append(_plan_bin(tail, path, top, tau, f"{j * width}-{(j + 1) * width}"))
    owner = inherit_from(np.array([planned.tail is not None for planned in path]))
    return tuple(PlannedBin(j * width, ladder[path[own].rung], path[j].tail) for j, own in enumerate(owner.tolist()))


def _plan_bin(tail: Callable[[int, list[int]], Estimate], path: list[_Bin], top: int, tau: float, where: str) -> _Bin:
    """The next bin's rung; raises the rungs of `path` in place where that alone does not help."""
    before = [planned.rung for planned in path]
    start = before[-1] if before else 0
    seen: dict[tuple[int, int], Estimate] = {}

    def passes(rung: int, raises: int = 0) -> bool:
        if (rung, raises) not in seen:
            seen[rung, raises] = tail(rung, _raised(before, raises, top))
        return seen[rung, raises].lower >= tau

    if passes(start) or not seen[start, 0].enough:
        first = seen[start, 0]
        return _Bin(start, first if first.enough else None)
    if passes(top):
        rung = _smallest(start, top, passes)
        return _Bin(rung, seen[rung, 0])
    most = sum(top - rung for rung in before)
    if not passes(top, most):
        best = seen[top, most].lower
        raise Infeasible(
            f"tau={tau:.3f} is out of reach at lengths {where}: with the largest budget in this and every earlier "
            f"bin the tail is {seen[top, most].value:.3f} with lower bound {best:.3f}, the best reachable; lower "
            "tau, or allow larger budgets.",
            best,
        )
    raises = _smallest(0, most, lambda count: passes(top, count))
    for planned, rung in zip(path, _raised(before, raises, top)):
        planned.rung = rung
    return _Bin(top, seen[top, raises])


def _raised(before: list[int], raises: int, top: int) -> list[int]:
    """`raises` single-rung raises, spent on the nearest earlier bin until it is at the top, then on the next."""
    rungs = list(before)
    for i in reversed(range(len(rungs))):
        step = min(raises, top - rungs[i])
        rungs[i] += step
        raises -= step
    return rungs


def _smallest(failing: int, passing: int, passes: Callable[[int], bool]) -> int:
    """Bisect between a number that fails and one that passes; the answer was itself tried and passed."""
    while passing - failing > 1:
        middle = (failing + passing) // 2
        if passes(middle):
            passing = middle
        else:
            failing = middle
    return passing
