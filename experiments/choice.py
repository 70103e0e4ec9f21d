"""The budget to train at: a careful chain under it is right less often than the shortcut, by a margin."""

from pathlib import Path
from typing import Any

from beds import Bed
from probe import EVICTORS, measured

TEMPTING = 0.7
"""Of the hint's accuracy: below it the shortcut is worth more, beyond the probe's noise."""


def chosen_budgets(bed: Bed, work: Path, budget: int | None = None) -> dict[str, int]:
    """The largest budget of every probed evictor that tempts on every seed; where none does, the smallest."""
    if budget is not None:
        return dict.fromkeys(EVICTORS, budget)
    rows = measured(work / "probe.jsonl")
    probed = [method for method in EVICTORS if any(row["sparsity"].startswith(method) for row in rows)]
    return {method: largest_tempting(bed, rows, method) for method in probed}


def largest_tempting(bed: Bed, rows: list[dict[str, Any]], method: str) -> int:
    careful: dict[int, list[float]] = {budget: [] for budget in bed.budgets}
    for row in rows:
        for budget in bed.budgets:
            if row["sparsity"] == bed.evictor(method, budget) and row["careful"] is not None:
                careful[budget].append(row["careful"])
    tempting = [b for b, found in careful.items() if found and max(found) < TEMPTING * bed.task.hint]
    return max(tempting, default=bed.budgets[0])
