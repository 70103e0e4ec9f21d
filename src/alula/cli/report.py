"""`alula report`: compare runs in one HTML page."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders to compare, in the order to show them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
) -> None:
    """Compare runs in one self-contained HTML page: curves, tables, settings that differ, completions."""
    from alula.files import count_text
    from alula.report import write_report

    write_report(runs, out)
    typer.echo(f"{out}: {count_text(len(runs), 'run')}")
