"""What a person sees while a run is going: one live line on a terminal, one plain line per step in a log."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

RECENT_STEPS = 20
WIDE = 140
"""Columns that a terminal needs for the bar beside the numbers."""


class LiveLine:
    """Progress of a run: reward, length, rollouts vetoed and rejected, KV saved, tokens/s, time left.

    `step` counts from 1 to `total_steps`; `first_step` is the checkpoint's step where a run continues.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.step = first_step
        self.console = Console(file=stream or sys.stdout)
        self.clock = clock
        # The clock at the end of each recent step, so that work between steps counts in the time left.
        self._ends: deque[float] = deque([clock()], maxlen=RECENT_STEPS + 1)
        self._metrics: Mapping[str, float] = {}
        self._phase = "starting"
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step, self._metrics = step, metrics
        self._ends.append(self.clock())
        if self._live is None:
            line = f"step {step}/{self.total_steps} · {describe(metrics)} · {self.time_left()} left"
            print(line, file=self.console.file, flush=True)

    def phase(self, name: str) -> None:
        """Say what the run is doing now; shown on a terminal only."""
        self._phase = name

    def message(self, text: str) -> None:
        """Print a line of its own, above the live one: warnings, checkpoints."""
        if self._live is None:
            print(text, file=self.console.file, flush=True)
        else:
            self.console.print(Text(text))

    def time_left(self) -> str:
        steps = len(self._ends) - 1
        if steps == 0:
            return "?"
        return duration((self._ends[-1] - self._ends[0]) / steps * (self.total_steps - self.step))

    def close(self) -> None:
        if self._live is not None:
            self._phase = "done" if self.step >= self.total_steps else "stopped"
            self._live.stop()
            self._live = None

    def __enter__(self) -> "LiveLine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _render(self) -> Table:
        step = Text(f"step {self.step}/{self.total_steps}", style="bold")
        words = [f"{self.time_left()} left", describe(self._metrics)] if self._metrics else []
        line = Text(" · ".join([*words, self._phase]), no_wrap=True, overflow="ellipsis")
        row = Table.grid(padding=(0, 1))
        row.add_column(min_width=len(step))
        if self.console.width >= WIDE:
            row.add_row(step, ProgressBar(total=max(self.total_steps, 1), completed=self.step, width=16), line)
        else:
            row.add_row(step, line)
        return row


def describe(metrics: Mapping[str, float]) -> str:
    """The numbers of one step in one line; those that were not measured are left out."""
    shown = (
        ("reward", "reward/mean", lambda value: f"{value:.3f}"),
        ("length", "response/length_mean", lambda value: f"{value:.0f}"),
        ("vetoed", "mismatch/veto_rate", lambda value: f"{value:.1%}"),
        ("rejected", "mismatch/rejected", lambda value: f"{value:.1%}"),
        ("KV saved", "kv/saved", lambda value: f"{value:.0%}"),
        ("tok/s", "speed/tokens_per_s", lambda value: f"{value:,.0f}"),
    )
    return " · ".join(f"{name} {write(metrics[key])}" for name, key, write in shown if metrics.get(key) is not None)


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 3 min 05 s, 2 h 07 min, 1 d 03 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
