"""The budget to train at, chosen from the probe before any training.

Usually the one that tempts: a careful answer under it is right less often than the shortcut, by a margin. For
`transfer` the one next below the threshold τ.
"""

from pathlib import Path
from typing import Any

from beds import Bed, TaskBed
from lines import read_lines
from probe import EVICTORS

TEMPTING = 0.7
"""Times the hint's accuracy: below that the shortcut is worth more, beyond the probe's noise."""


TAU = 0.977
"""The threshold of the tiny bed: no run with a tail of 0.977 or above collapsed there, every one below did
(docs/results/threshold.md). It was fixed before any tail of the programs bed was measured."""


def chosen_budgets(bed: Bed, seed: int, work: Path, budget: int | None = None) -> dict[str, int]:
    """The largest budget of every probed evictor that tempts the seed's model; where none does, the smallest.

    Models of different seeds spread their attention differently: at one budget chains may break in one and hold in
    another, so it is the temptation that is held equal, not the budget. A bed without a shortcut tempts nobody: there
    it is the second of its budgets.
    """
    if budget is not None:
        return dict.fromkeys(EVICTORS, budget)
    if not isinstance(bed, TaskBed):
        return dict.fromkeys(EVICTORS, bed.budgets[1])
    found = probed_rows(bed, seed, work)
    probed = [method for method in EVICTORS if any(row["sparsity"].startswith(method) for row in found)]
    return {method: largest_tempting(bed, found, method) for method in probed}


def probed_rows(bed: Bed, seed: int, work: Path) -> list[dict[str, Any]]:
    """What was measured of the model that the seed starts from."""
    return [row for row in read_lines(work / "probe.jsonl") if row["seed"] == bed.warm_seed(seed)]


def largest_tempting(bed: TaskBed, rows: list[dict[str, Any]], method: str) -> int:
    careful = {row["sparsity"]: row["careful"] or 0.0 for row in rows}
    policies = {budget: bed.evictor(method, budget) for budget in bed.budgets}
    limit = TEMPTING * bed.task.hint
    tempting = [b for b, policy in policies.items() if careful.get(policy, 1.0) < limit]
    return max(tempting, default=bed.budgets[0])


def below_threshold(bed: TaskBed, seed: int, work: Path) -> int:
    """The largest R-KV budget whose tail is below τ for the seed's model; the smallest of all where none is."""
    tails = {row["sparsity"]: row["tail"] for row in probed_rows(bed, seed, work)}
    return max((b for b in bed.budgets if tails[bed.evictor("rkv", b)] < TAU), default=bed.budgets[0])
