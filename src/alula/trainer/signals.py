"""Stop signals: SIGTERM, Ctrl-C and a closed terminal (SIGHUP) ask the run to stop where its state is consistent."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from alula.distributed import World


class Stopped(Exception):
    """The run was asked to stop."""


class StopRequest:
    """Remembers a stop signal until the run can stop. A second signal acts at once, except SIGHUP, of which a closed
    terminal may send several."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals inside this context."""
        handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        if handlers[signal.SIGHUP] == signal.SIG_IGN:
            del handlers[signal.SIGHUP]  # nohup

        def request(number: int, frame: FrameType | None) -> None:
            self.requested = True
            for kind, handler in handlers.items():
                if kind != signal.SIGHUP:
                    signal.signal(kind, handler)

        for kind in handlers:
            signal.signal(kind, request)
        try:
            yield
        finally:
            for kind, handler in handlers.items():
                signal.signal(kind, handler)

    def raise_if_stop_requested(self, *, all_ranks: bool = True) -> None:
        """Raise `Stopped` if a signal arrived.

        With `all_ranks` every rank must call this, and all of them stop if one received a signal. Without it (between
        two rollouts, where ranks are not in step) only a run of one process stops.
        """
        if all_ranks:
            stop = bool(self.world.all_max(int(self.requested)))
        else:
            stop = self.requested and not self.world.is_distributed
        if stop:
            raise Stopped
