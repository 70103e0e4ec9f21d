"""Counters, gauges and histograms in Prometheus' text format."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Durations in seconds, counted by upper bound."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> list[str]:
        total, lines = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """What the server has done since it started."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        """By route and status."""
        self.rollouts: Counter[str] = Counter()
        """By finish reason."""
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.sessions: Counter[str] = Counter()
        """Turns of sessions: new or continued."""
        self.request_seconds, self.first_token_seconds = Histogram(), Histogram()

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All of it; `gauges` maps names to a description and a value."""
        blocks = [
            block("responses_total", "counter", "Answers by route and HTTP status.", [
                f'alula_responses_total{{route="{route}",status="{status}"}} {count}'
                for (route, status), count in sorted(self.responses.items())
            ]),
            block("rollouts_total", "counter", "Finished rollouts by finish reason.", [
                f'alula_rollouts_total{{finish="{finish}"}} {count}' for finish, count in sorted(self.rollouts.items())
            ]),
            block("session_turns_total", "counter", "Turns of sessions, new or continued.", [
                f'alula_session_turns_total{{session="{kind}"}} {count}'
                for kind, count in sorted(self.sessions.items())
            ]),
            single("prompt_tokens_total", "counter", "Prompt tokens.", self.prompt_tokens),
            single("cached_prompt_tokens_total", "counter", "Prompt tokens found in the cache.", self.cached_tokens),
            single("generated_tokens_total", "counter", "Sampled tokens.", self.generated_tokens),
            block("request_seconds", "histogram", "Time from a request to the end of its answer.",
                  self.request_seconds.lines("alula_request_seconds")),
            block("first_token_seconds", "histogram", "Time to the first token of streamed answers.",
                  self.first_token_seconds.lines("alula_first_token_seconds")),
            *(single(name, "gauge", line, value) for name, (line, value) in gauges.items()),
        ]  # fmt: skip
        return "\n".join(blocks) + "\n"


def block(name: str, kind: str, line: str, lines: list[str]) -> str:
    return "\n".join([f"# HELP alula_{name} {line}", f"# TYPE alula_{name} {kind}", *lines])


def single(name: str, kind: str, line: str, value: float) -> str:
    return block(name, kind, line, [f"alula_{name} {value:g}" if isinstance(value, float) else f"alula_{name} {value}"])
