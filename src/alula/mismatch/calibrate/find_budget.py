"""Finds the smallest budget with few vetoed rollouts, to start a run with.

A budget holds the limit if the 95 % interval of its share of vetoed rollouts lies below it, measured on rollouts that
the policy sampled itself. Budgets are bisected, so few are measured. The result was measured to hold, and the next
smaller budget of the ladder not to. A larger budget usually has fewer vetoes, but not always; `sweep` measures all.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from alula.errors import require
from alula.mismatch.calibrate.verify import Verification
from alula.mismatch.control.controller import default_ladder
from alula.objective.veto import Share
from alula.sparsity.family import PolicyFamily


@dataclass(frozen=True)
class BudgetSearch:
    """Result of the search in one family."""

    family: PolicyFamily
    limit: float
    tried: dict[int, Verification]
    """Measured budgets."""

    @property
    def budget(self) -> int | None:
        """The smallest budget that holds the limit and was sparse; None if there is none."""
        return min((b for b, one in self.tried.items() if below_limit(one, self.limit) and one.kv.sparse), default=None)

    def to_dict(self) -> dict[str, Any]:
        tried = [
            {
                "budget": b,
                "policy": self.family.policy(b).describe(),
                "holds": below_limit(one, self.limit),
                **one.to_dict(),
            }
            for b, one in sorted(self.tried.items())
        ]
        return {"family": self.family.describe(), "budget": self.budget, "limit": self.limit, "tried": tried}


def below_limit(result: Verification, limit: float) -> bool:
    return result.vetoed.interval[1] < limit


def find_budget(
    family: PolicyFamily,
    ladder: Sequence[int],
    limit: float,
    measure: Callable[[int], Verification],
    *,
    sweep: bool = False,
) -> BudgetSearch:
    """Bisect the ascending `ladder`, or measure every budget of it with `sweep`."""
    tried: dict[int, Verification] = {}

    def holds(budget: int) -> bool:
        tried[budget] = measure(budget)
        return below_limit(tried[budget], limit)

    if sweep:
        for budget in ladder:
            holds(budget)
    else:
        bisect_left(ladder, True, key=holds)
    return BudgetSearch(family, limit, tried)


def check_limit(limit: float, prompts: int) -> None:
    """Raise if this number of prompts is too small to show the limit."""
    require(0 < limit < 1, f"--vetoed {limit}: must be between 0 and 1, since it is a share of rollouts.")
    none = Share(0, prompts)
    require(
        none.interval[1] < limit,
        f"--vetoed {limit}: --prompts {prompts} cannot show it, since without any veto the interval still reaches "
        f"{none.interval[1]:.1%}; use --prompts {none.prompts_to_tell_from(limit)} or more.",
    )


def budgets_to_try(family: PolicyFamily, length: int) -> tuple[int, ...]:
    """Default ladder: from a thirty-second of the length up to the length, in steps of a quarter."""
    ladder = default_ladder(max(16, length // 512 * 16), length, 16)[:-1]
    budgets = tuple(budget for budget in ladder if budget >= family.part.least_budget)
    require(len(budgets) > 0, f"length={length}: no default budget is valid for {family.describe()}; set --budgets.")
    return budgets
