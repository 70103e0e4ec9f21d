"""Schedules for evictors, built forward: what was evicted never returns, so a bin's tail depends on the past."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from alula.errors import require
from alula.mismatch.plan.plan import Infeasible, PlannedBin, inherit_from
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
    do) and are measured again. A bin with too few prompts inherits: the next trusted bin's budget, or the last
    one's at the end.
    """
    ladder = sorted(set(candidates))
    require(len(ladder) > 0, "candidates: an empty list; give at least one budget.")

    @cache
    def tail(rungs: tuple[int, ...]) -> Estimate:
        """Of the last of these bins, under all of them."""
        return measure(tuple(ladder[r] for r in rungs[:-1]), len(rungs) - 1, ladder[rungs[-1]])

    path: list[_Bin] = []
    for j in range(bins):
        path.append(_plan_bin(tail, path, len(ladder) - 1, tau, f"{j * width}-{(j + 1) * width}"))
    owner = inherit_from(np.array([planned.tail is not None for planned in path]))
    return tuple(PlannedBin(j * width, ladder[path[own].rung], path[j].tail) for j, own in enumerate(owner.tolist()))


def _plan_bin(tail: Callable[[tuple[int, ...]], Estimate], path: list[_Bin], top: int, tau: float, where: str) -> _Bin:
    """The next bin's rung; raises the rungs of `path` in place where that alone does not help."""
    before = [planned.rung for planned in path]
    start = before[-1] if before else 0

    def passes(rung: int, raises: int = 0) -> bool:
        return tail((*_raised(before, raises, top), rung)).lower >= tau

    first = tail((*before, start))
    if first.lower >= tau or not first.enough:
        return _Bin(start, first if first.enough else None)
    if passes(top):
        rung = _smallest(start, top, passes)
        return _Bin(rung, tail((*before, rung)))
    most = sum(top - rung for rung in before)

    def holds(raises: int) -> bool:
        """Also in the earlier bins: noise can make a larger budget look worse."""
        rungs = (*_raised(before, raises, top), top)
        return all(tail(rungs[: i + 1]).lower >= tau for i, planned in enumerate(path) if planned.tail is not None)

    enough = _smallest(0, most, lambda count: passes(top, count)) if passes(top, most) else most + 1
    raises = next((count for count in range(enough, most + 1) if passes(top, count) and holds(count)), None)
    if raises is None:
        last = tail((*_raised(before, most, top), top))
        raise Infeasible(
            f"tau={tau:.3f} is out of reach at lengths {where}: with the largest budget in this and every earlier "
            f"bin the tail is {last.value:.3f} with lower bound {last.lower:.3f}, the best reachable; lower tau, or "
            "allow larger budgets.",
            last.lower,
        )
    raised = _raised(before, raises, top)
    for i, planned in enumerate(path):
        planned.rung = raised[i]
        planned.tail = planned.tail and tail(tuple(raised[: i + 1]))
    rung = raised[-1] if passes(raised[-1], raises) else _smallest(raised[-1], top, lambda one: passes(one, raises))
    return _Bin(rung, tail((*raised, rung)))


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
