"""Trade-off table: predicted speed-up and KV memory of the best plan for a range of thresholds tau."""

from collections.abc import Sequence
from dataclasses import dataclass

from alula.mismatch.calibrate.file import Calibration
from alula.mismatch.plan.cost import CostModel
from alula.mismatch.plan.plan import GAP, Infeasible, Plan, Workload, digits, plan

GAPS = (0.02, 0.04, 0.06, GAP, 0.11, 0.14, 0.17, 0.20)
"""Usual thresholds, as distances below the dense floor."""


@dataclass(frozen=True)
class Tradeoff:
    tau: float
    plan: Plan | None
    reachable: float
    """tau if there is a plan, otherwise the largest threshold that has one."""


def usual_taus(calibration: Calibration) -> list[float]:
    """The thresholds of a table without --tau."""
    return [tau for gap in GAPS if (tau := calibration.floor.overall - gap) > 0]


def tradeoffs(calibration: Calibration, cost: CostModel, workload: Workload, taus: Sequence[float]) -> list[Tradeoff]:
    """A row for every threshold, strictest first; rows out of reach have no plan."""
    rows = []
    for tau in sorted(taus, reverse=True):
        try:
            rows.append(Tradeoff(tau, plan(calibration, cost, workload, tau=tau), tau))
        except Infeasible as error:
            rows.append(Tradeoff(tau, None, error.reachable))
    return rows


def table(rows: Sequence[Tradeoff]) -> str:
    """The trade-offs as a Markdown table."""
    lines = [
        "| tau | speed-up | KV read | KV GiB | rows | budgets | method |",
        "|---:|---:|---:|---:|---:|---|---|",
    ]
    shown = [tau for row in rows for tau in (row.tau, row.reachable)]
    for row in rows:
        n = digits(row.tau, shown)
        if row.plan is None:
            lines.append(f"| {row.tau:.{n}f} | out of reach | | | | best reachable {row.reachable:.{n}f} | |")
            continue
        best, budgets = row.plan, row.plan.schedule.budgets
        span = f"{budgets[0]} to {budgets[-1]}" if budgets[0] != budgets[-1] else f"{budgets[0]}"
        lines.append(
            f"| {row.tau:.{n}f} | {best.speedup:.2f}x | {best.sparse.read_share:.0%} "
            f"| {best.sparse.peak_kv_bytes / 2**30:.2f} | {best.sparse.batch} | {span} "
            f"| {best.family.describe()} |"
        )
    return "\n".join(lines)
