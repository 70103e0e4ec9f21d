"""Terminal output: streams that survive a closed terminal, and a progress bar."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

CLOSED = (errno.EPIPE, errno.EIO)
"""Errors of writing to a closed pipe and to a terminal that hung up."""


class BrokenPipeSafeStream:
    """Stream wrapper that swallows EPIPE and EIO, so that a closed terminal does not end the run."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.closed_by_reader = False

    def write(self, text: str) -> int:
        self._call(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._call(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _call(self, operation: Any) -> None:
        if self.closed_by_reader:
            return
        try:
            operation()
        except OSError as error:
            if error.errno not in CLOSED:
                raise
            self.closed_by_reader = True
            self._redirect_to_devnull()

    def _redirect_to_devnull(self) -> None:
        """Python flushes the remaining buffer at exit; an error there would become the exit code."""
        with suppress(OSError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.stream.fileno())
            os.close(devnull)


def broken_pipe_safe(stream: TextIO | None) -> Any:
    """`stream` wrapped; None stays None (Python's value for a descriptor that was closed from the start)."""
    return None if stream is None else BrokenPipeSafeStream(stream)


@contextmanager
def progress_bar(rollouts: int, shown: bool) -> Iterator[Any]:
    """A progress bar on standard error; yields `advance(tokens)`, to be called once per rollout."""
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
        task, generated = bar.add_task("", total=rollouts, rate=""), 0

        def advance(tokens: int) -> None:
            nonlocal generated
            generated += tokens
            elapsed = bar.tasks[0].elapsed or 1e-9
            bar.update(task, advance=1, rate=f"{generated / elapsed:,.0f} tokens/s")

        yield advance
