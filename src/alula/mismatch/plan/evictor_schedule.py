"""Growing schedules for evictors, built bin by bin: evicted tokens never return, so a bin depends on earlier ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from alula.errors import require
from alula.mismatch.plan.plan import Infeasible, PlannedBin, inherit_from
from alula.mismatch.tail import BinTail

Measure = Callable[[tuple[int, ...], int, int], BinTail]
"""measure(budgets of the earlier bins, bin, candidate budget) -> tail of that bin under this schedule."""


@dataclass
class _Bin:
    rung: int
    tail: BinTail | None


def grow_schedule(
    measure: Measure, candidates: Sequence[int], *, bins: int, width: int, tau: float
) -> tuple[PlannedBin, ...]:
    """The smallest candidate for every bin, not below the previous bin's, whose lower bound of the tail is ≥ tau.

    Assumes that the tail grows with the budgets of this bin and of earlier ones, so candidates are bisected. If even
    the largest candidate fails, earlier bins are raised (the nearest first, by as few rungs as possible) and measured
    again. A bin with too few prompts inherits the next trusted bin's budget, or the last trusted bin's at the end.
    """
    ladder = sorted(set(candidates))
    require(len(ladder) > 0, "candidates: give at least one budget.")

    @cache
    def tail(rungs: tuple[int, ...]) -> BinTail:
        """The tail of the last bin, under the budgets of all of them."""
        return measure(tuple(ladder[r] for r in rungs[:-1]), len(rungs) - 1, ladder[rungs[-1]])

    path: list[_Bin] = []
    for j in range(bins):
        path.append(_plan_bin(tail, path, len(ladder) - 1, tau, f"{j * width}-{(j + 1) * width}"))
    source = inherit_from(np.array([planned.tail is not None for planned in path]))
    return tuple(PlannedBin(j * width, ladder[path[i].rung], path[j].tail) for j, i in enumerate(source.tolist()))


def _plan_bin(tail: Callable[[tuple[int, ...]], BinTail], path: list[_Bin], top: int, tau: float, where: str) -> _Bin:
    """The rung of the next bin. Modifies `path` if earlier bins must be raised, too."""
    before = [planned.rung for planned in path]
    start = before[-1] if before else 0

    def passes(rung: int, raises: int = 0) -> bool:
        return tail((*_raised(before, raises, top), rung)).lower >= tau

    first = tail((*before, start))
    if first.lower >= tau or not first.enough:
        return _Bin(start, first if first.enough else None)
    if passes(top):
        rung = _bisect(start, top, passes)
        return _Bin(rung, tail((*before, rung)))
    most = sum(top - rung for rung in before)

    def holds(raises: int) -> bool:
        """Whether the earlier bins still hold tau: noise can make a larger budget look worse."""
        rungs = (*_raised(before, raises, top), top)
        return all(tail(rungs[: i + 1]).lower >= tau for i, planned in enumerate(path) if planned.tail is not None)

    enough = _bisect(0, most, lambda count: passes(top, count)) if passes(top, most) else most + 1
    raises = next((count for count in range(enough, most + 1) if passes(top, count) and holds(count)), None)
    if raises is None:
        last = tail((*_raised(before, most, top), top))
        raise Infeasible(
            f"tau={tau:.3f} is out of reach at lengths {where}: with the largest budget in this and every earlier "
            f"bin, the tail is {last.value:.3f} and its lower bound {last.lower:.3f}; lower tau or use larger budgets.",
            last.lower,
        )
    raised = _raised(before, raises, top)
    for i, planned in enumerate(path):
        planned.rung = raised[i]
        planned.tail = planned.tail and tail(tuple(raised[: i + 1]))
    rung = raised[-1] if passes(raised[-1], raises) else _bisect(raised[-1], top, lambda one: passes(one, raises))
    return _Bin(rung, tail((*raised, rung)))


def _raised(before: list[int], raises: int, top: int) -> list[int]:
    """`before` raised by `raises` rungs in total: the nearest bin first up to the top, then the one before it."""
    rungs = list(before)
    for i in reversed(range(len(rungs))):
        step = min(raises, top - rungs[i])
        rungs[i] += step
        raises -= step
    return rungs


def _bisect(failing: int, passing: int, passes: Callable[[int], bool]) -> int:
    """The smallest passing number, by bisection between one that fails and one that passes. The result was tested."""
    while passing - failing > 1:
        middle = (failing + passing) // 2
        if passes(middle):
            passing = middle
        else:
            failing = middle
    return passing
