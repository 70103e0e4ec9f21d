"""A progress bar on a terminal, nothing in a pipe."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar(rollouts: int, shown: bool) -> Iterator[Any]:
    """A bar on a terminal, nothing in a pipe."""
    if not shown:
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, made = bar.add_task("", total=rollouts, rate=""), 0

        def advance(tokens: int) -> None:
            nonlocal made
            made += tokens
            elapsed = bar.tasks[0].elapsed or 1e-9
            bar.update(task, advance=1, rate=f"{made / elapsed:,.0f} tokens/s")

        yield advance
