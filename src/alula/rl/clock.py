"""Seconds per phase of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Phases may come several times; their seconds add up. A phase inside another is not counted twice."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = self._now()
        self._start = self._since

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    @property
    def total(self) -> float:
        return self._now() - self._start

    def _settle(self) -> None:
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
