"""`alula calibrate` without a mode: measures tails of a grid of policies, writes and prints them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from alula.errors import RunFailed, require
from alula.mismatch.calibrate.calibrate import Grid, TextSettings, calibrate
from alula.mismatch.control.controller import PAGES
from alula.mismatch.plan.plot import plot_tails

if TYPE_CHECKING:
    from alula.cli.common import Engines
    from alula.mismatch.calibrate.file import Calibration
    from alula.mismatch.measure import Bins
    from alula.sparsity.policy import Sparsity


@dataclass(frozen=True)
class MeasureTails:
    """A calibration: the tails of a grid of policies."""

    grid: Grid
    bins: "Bins"

    @property
    def policies(self) -> list["Sparsity"]:
        return [family.template for family in self.grid.families]

    def run(self, engines: "Engines", text: TextSettings, out: Path, progress: bool) -> int:
        """Calibrate or continue, write and print the tails; the exit code is 0."""
        work_file = out.with_suffix(".work.json")
        tails = calibrate(engines.with_page, text, self.grid, self.bins, work_file, log=typer.echo, progress=progress)
        write(tails, out)
        return 0


def default_budgets(length: int) -> tuple[int, ...]:
    """Sparrow's grid, in tokens, below `length`."""
    budgets = tuple(16 * pages for pages in PAGES if 16 * pages < length)
    require(len(budgets) >= 2, f"--length {length}: Sparrow's grid of budgets starts at 512; set --budgets.")
    return budgets


def write(calibration: "Calibration", out: Path) -> None:
    """Write the calibration and its plot, and print a table."""
    calibration.save(out)
    plot = out.with_suffix(".svg")
    plot.write_text(plot_tails(calibration))
    lines = [
        "| configuration | budget | tail | worst trusted bin | its lower bound | KV saved | KV not read | evictions |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for measured in (m for family in calibration.families().values() for m in family):
        worst = min((bin_ for bin_ in measured.tail if bin_.enough), key=lambda bin_: bin_.value, default=None)
        trusted = f"{worst.value:.4f} | {worst.lower:.4f}" if worst else "none |"  # own answers may be too short
        kv = measured.kv
        lines.append(
            f"| {measured.family.describe()} | {measured.budget} | {measured.tail.overall:.4f} | {trusted} "
            f"| {kv.saved:.1%} | {kv.not_read:.1%} | {kv.evictions} |"
        )
    for grown in calibration.growing:
        lines.append(
            f"| {grown.family.describe()} | {', '.join(map(str, grown.budgets))} | growing, "
            f"tau {grown.tau:.4f} | | | | | |"
        )
    typer.echo("\n".join([*lines, *never_sparse(calibration)]))
    floor = calibration.floor.overall
    if all(measured.kv.sparse == 0 for measured in calibration.measured):
        raise RunFailed(f"{out}: nothing was sparse, so there is nothing to plan; see the last lines above.")
    typer.echo(f"{out} and {plot}: dense floor {floor:.4f}; plan a schedule with `alula plan {out}`.")


def never_sparse(calibration: "Calibration") -> list[str]:
    """A note for every family with budgets that no rollout exceeded: their tails are those of the dense policy."""
    notes = []
    for family, measured in calibration.families().items():
        dense = [one for one in measured if one.kv.sparse == 0]
        if dense:
            budgets = ", ".join(str(one.budget) for one in dense)
            notes.append(dense[0].kv.never_sparse(f"{family.describe()} with budget {budgets}", dense[0].policy))
    return notes
