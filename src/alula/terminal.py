"""A terminal that is closed, or a pipe that nobody reads any more, costs a run what it prints and nothing else."""

import errno
import os
from contextlib import suppress
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
