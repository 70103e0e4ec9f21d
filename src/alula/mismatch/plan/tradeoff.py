"""What each threshold would cost: predicted speed-up and KV memory over a range of tau, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from alula.mismatch.calibrate.file import Calibration
from alula.mismatch.plan.cost import Cost
from alula.mismatch.plan.plan import GAP, Infeasible, Plan, Workload, plan

GAPS = (0.02, 0.04, 0.06, GAP, 0.11, 0.14, 0.17, 0.20)
"""Distances under the dense floor that a table shows unless told otherwise."""


@dataclass(frozen=True)
class Tradeoff:
    tau: float
    plan: Plan | None
    reachable: float
    """Equal to tau where there is a plan; otherwise the largest threshold that has one."""


def tradeoffs(
    calibration: Calibration, cost: Cost, workload: Workload, taus: Sequence[float] | None = None
) -> list[Tradeoff]:
    """A plan for every threshold, strictest first; out of reach is a row too."""
    rows = []
    for tau in sorted(taus or [calibration.floor.overall - gap for gap in GAPS], reverse=True):
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
    for row in rows:
        if row.plan is None:
            lines.append(f"| {row.tau:.3f} | out of reach | | | | best reachable {row.reachable:.3f} | |")
            continue
        made, budgets = row.plan, row.plan.schedule.budgets
        reach = f"{budgets[0]} to {budgets[-1]}" if budgets[0] != budgets[-1] else f"{budgets[0]}"
        lines.append(
            f"| {row.tau:.3f} | {made.speedup:.2f}x | {made.sparse.read_share:.0%} "
            f"| {made.sparse.peak_kv_bytes / 2**30:.2f} | {made.sparse.batch} | {reach} "
            f"| {made.family.describe()} |"
        )
    return "\n".join(lines)
