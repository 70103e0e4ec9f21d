"""A terminal that is closed, or a pipe that nobody reads any more, costs a run what it prints and nothing else.

A progress bar on a terminal, nothing in a pipe."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

GONE = (errno.EPIPE, errno.EIO)
"""What writing into a closed pipe and to a terminal that hung up are answered with."""


class Lasting:
    """`stream` until it is gone, then nothing."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.gone = False

    def write(self, text: str) -> int:
        self._do(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _do(self, call: Any) -> None:
        if self.gone:
            return
        try:
            call()
        except OSError as error:
            if error.errno not in GONE:
                raise
            self.gone = True
            self._let_go()

    def _let_go(self) -> None:
        """What is still buffered is written when the process ends, and an error then would be its exit code."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


def lasting(stream: TextIO | None) -> Any:
    """Python has no stream where the descriptor was closed from the start, and prints nothing then."""
    return None if stream is None else Lasting(stream)


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

    columns = (
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, made = bar.add_task("", total=rollouts, rate=""), 0

        def advance(tokens: int) -> None:
            nonlocal made
            made += tokens
            elapsed = bar.tasks[0].elapsed or 1e-9
            bar.update(task, advance=1, rate=f"{made / elapsed:,.0f} tokens/s")

        yield advance
