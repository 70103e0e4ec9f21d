"""SIGTERM, Ctrl-C and a closed terminal (SIGHUP) as a request to stop at the next place where nothing is half done."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from alula.distributed import World


class Stopped(Exception):
    """Somebody asked the run to stop."""


class StopRequest:
    """The first signal asks, the second one is obeyed at once; but every SIGHUP asks, since a closed terminal may send
    several."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        if before[signal.SIGHUP] == signal.SIG_IGN:
            del before[signal.SIGHUP]  # nohup

        def ask(number: int, frame: FrameType | None) -> None:
            self.asked = True
            for kind, handler in before.items():
                if kind != signal.SIGHUP:
                    signal.signal(kind, handler)

        for kind in before:
            signal.signal(kind, ask)
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def obey(self) -> None:
        """Between two phases: all ranks leave together, whichever of them was asked."""
        if self.world.all_max(int(self.asked)):
            raise Stopped

    def obey_alone(self) -> None:
        """Between two rollouts, where the ranks are not in step: only where there is one."""
        if self.asked and not self.world.is_distributed:
            raise Stopped
