"""Live progress of a run: two updating lines on a terminal, one plain line per step in a log."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

RECENT_STEPS = 20
SEPARATOR = " · "


class LiveLine:
    """Progress of a run: step, time left, what it is doing; reward, length, rollouts vetoed, KV saved, tokens/s.

    `step` counts from 1 to `total_steps`; `first_step` is the step of the checkpoint of a resumed run.
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
        # Clock at the end of each recent step, so that the time left includes work between steps.
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
        """Show what the run is doing now, on a terminal only."""
        self._phase = name

    def progress(self, rollouts: int, of: int, tokens: int, about: int) -> None:
        """Show how far the phase is: finished rollouts and their tokens, of about how many."""
        name = self._phase.partition(SEPARATOR)[0]
        self._phase = f"{name}{SEPARATOR}{rollouts:,} of {of:,}{SEPARATOR}{tokens:,} of about {about:,} tokens"

    def message(self, text: str) -> None:
        """Print a line above the live one, such as a warning."""
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

    def _render(self) -> Group:
        words = [f"{self.time_left()} left"] if self._metrics else []
        line = Text(f"step {self.step}/{self.total_steps}", style="bold", no_wrap=True, overflow="ellipsis")
        line.append(SEPARATOR.join(["", *words, self._phase]), style="not bold")
        numbers = describe(self._metrics, self.console.width)
        return Group(line, Text(numbers, no_wrap=True)) if numbers else Group(line)


def describe(metrics: Mapping[str, float], width: int | None = None) -> str:
    """The main numbers of one step as one line of at most `width` characters; missing ones are left out."""
    shown = (
        ("reward", "reward/mean", lambda value: f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"),
        ("length", "response/length_mean", lambda value: f"{value:.0f}"),
        ("turns", "environment/turns", lambda value: f"{value:.1f}"),
        ("vetoed", "mismatch/veto_rate", lambda value: f"{value:.1%}"),
        ("KV saved", "kv/saved", lambda value: f"{value:.0%}"),
        ("tok/s", "speed/tokens_per_s", lambda value: f"{value:,.0f}"),
        ("rejected", "mismatch/rejected", lambda value: f"{value:.1%}"),
        ("tool failures", "environment/failed", lambda value: f"{value:.1%}"),
        ("waiting for tools", "time/environment_mean", seconds),
        ("given tokens", "environment/given_tokens", lambda value: f"{value:.0f}"),
    )
    words = [f"{name} {write(metrics[key])}" for name, key, write in shown if metrics.get(key) is not None]
    while width is not None and words and len(SEPARATOR.join(words)) > width:
        words.pop()
    return SEPARATOR.join(words)


def duration(seconds: float) -> str:
    """Seconds as text: 42 s, 3 min 05 s, 2 h 07 min, 1 d 03 h."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600:02d} h"


def seconds(value: float) -> str:
    """The same, with the digits of a short time: 0.25 s, 7.3 s."""
    return f"{value:.2g} s" if value < 1 else f"{value:.1f} s" if value < 100 else duration(value)
