"""The smallest budget whose rollouts are seldom vetoed: the one to begin a run with.

A budget holds a limit if the 95 % interval of its share of vetoed rollouts, on rollouts of its own, lies below it.
Budgets are bisected, so few are measured. A larger budget mostly has fewer vetoes, but it need not: of the one that is
found it is known that it holds, and that the next smaller one of the ladder does not, and of the others what was tried.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from alula.errors import SettingError, require
from alula.mismatch.calibrate.verify import Verification
from alula.mismatch.control.controller import default_ladder
from alula.objective.veto import Share
from alula.sparsity.family import PolicyFamily


@dataclass(frozen=True)
class Smallest:
    """Of one family."""

    family: PolicyFamily
    limit: float
    tried: dict[int, Verification]
    """By budget."""

    @property
    def budget(self) -> int | None:
        """None where none holds, or only such as were never sparse, which shows nothing."""
        return min((b for b, one in self.tried.items() if below(one, self.limit) and one.kv.sparse), default=None)

    def to_dict(self) -> dict[str, Any]:
        tried = [
            {"budget": b, "policy": self.family.policy(b).describe(), "holds": below(one, self.limit), **one.to_dict()}
            for b, one in sorted(self.tried.items())
        ]
        return {"family": self.family.describe(), "budget": self.budget, "limit": self.limit, "tried": tried}


def below(found: Verification, limit: float) -> bool:
    return found.vetoed.interval[1] < limit


def smallest(
    family: PolicyFamily,
    ladder: Sequence[int],
    limit: float,
    measure: Callable[[int], Verification],
    *,
    sweep: bool = False,
) -> Smallest:
    """`sweep` measures every budget of the ascending ladder instead."""
    tried: dict[int, Verification] = {}

    def holds(budget: int) -> bool:
        tried[budget] = measure(budget)
        return below(tried[budget], limit)

    if sweep:
        for budget in ladder:
            holds(budget)
    else:
        bisect_left(ladder, True, key=holds)
    return Smallest(family, limit, tried)


def check_limit(limit: float, prompts: int) -> None:
    """Refuse a limit that so few prompts cannot show."""
    require(0 < limit < 1, f"--vetoed {limit}: must lie between 0 and 1, as a share of rollouts.")
    none = Share(0, prompts)
    require(
        none.interval[1] < limit,
        f"--vetoed {limit}: of {prompts} prompts not one vetoed would still leave up to {none.interval[1]:.1%}; use "
        f"--prompts {none.prompts_to_tell_from(limit)} or more.",
    )


def rungs(family: PolicyFamily, length: int) -> tuple[int, ...]:
    """Budgets to try where none are named: from a thirty-second of the length, a quarter apart, below the length."""

    def possible(budget: int) -> bool:
        try:
            family.policy(budget)
        except SettingError:
            return False
        return True

    found = tuple(filter(possible, default_ladder(max(16, length // 512 * 16), length, 16)[:-1]))
    require(len(found) > 0, f"budgets: name them; a length of {length} leaves none for {family.describe()}.")
    return found
