"""Settings of the controller, and what it reports."""

from dataclasses import dataclass
from typing import Literal

from alula.errors import require, unknown

Action = Literal["warn", "rise", "fall", "dense", "stop", "saturated"]
ON_VIOLATION = ("warn", "adapt", "dense", "stop")
PAGES = (32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1152)
"""Sparrow's grid of budgets, in pages of 16 tokens."""


def default_ladder(start: int, longest: int, block: int = 1) -> tuple[int, ...]:
    """From a budget below Sparrow's grid rungs a quarter apart, multiples of `block`; the grid; and a dense top."""
    rungs, budget = [16 * pages for pages in PAGES], start
    while budget < rungs[0]:
        rungs.append(budget)
        budget = -(-max(budget + 1, budget * 5 // 4) // block) * block
    return (*sorted({rung for rung in rungs if rung < longest}), -(-longest // 16) * 16)


@dataclass(frozen=True)
class Control:
    """Settings of the controller."""

    tau: float | None
    """The tail to hold; None: only vetoed rollouts count."""
    max_length: int
    """The longest sequence of the run: a budget of that many tokens is dense."""
    enabled: bool = False
    on_violation: str = "warn"
    """What confident evidence of a tail below tau, or of too many vetoes, does: `warn` reports it, `adapt` changes
    budgets, `dense` reads and keeps everything from that length on, `stop` asks the trainer to stop."""
    quantile: float = 0.05
    margin: float = 0.03
    """A budget falls only where the tail is confidently above tau + margin."""
    false_alarm_steps: float = 200.0
    """While no tail is below tau, the expected number of steps to the first false alarm is at least this; the
    same holds for a false fall while no tail is above tau + margin."""
    patience: int = 10
    """Observed steps without a change of its budget before a bin may fall."""
    samples: int = 1
    """The most rollouts of one prompt in one observation."""
    ladder: tuple[int, ...] = tuple(16 * pages for pages in PAGES)
    """Budgets that a bin may move to; the ends bound it."""
    vetoed: float | None = None
    """The largest share of rollouts that may be vetoed (`alula.objective.veto`); None: they are not counted. Confident
    evidence of more does what `on_violation` says, to all bins; under `adapt` no budget falls without confident
    evidence of less than a quarter of it."""

    def __post_init__(self) -> None:
        if self.on_violation not in ON_VIOLATION:
            raise unknown("on_violation", self.on_violation, ON_VIOLATION)
        require(self.tau is not None or self.vetoed is not None, "tau and vetoed: the controller needs one of them.")
        for name, value in (("tau", self.tau), ("vetoed", self.vetoed)):
            require(value is None or 0 < value < 1, f"{name}={value}: must lie between 0 and 1.")
        require(self.margin > 0, f"margin={self.margin}: must be positive, or budgets would never rest.")
        require(self.false_alarm_steps >= 1, f"false_alarm_steps={self.false_alarm_steps}: must be at least 1.")
        require(self.samples >= 1, f"samples={self.samples}: must be at least 1.")
        require(len(self.ladder) > 0, "ladder: an empty list; give the budgets that may be used.")
        object.__setattr__(self, "ladder", tuple(sorted(self.ladder)))


@dataclass(frozen=True)
class Event:
    """What happened to one bin, and why."""

    action: Action
    bin: int
    before: int
    after: int
    share: float
    """Share of the bin's tokens below tau, since its last change."""

    def describe(self, control: Control, width: int) -> str:
        assert control.tau is not None
        where = f"lengths {self.bin * width}-{(self.bin + 1) * width}"
        if self.action == "fall":
            return (
                f"{where}: the tail is confidently above {control.tau + control.margin:.3f}; "
                f"budget {self.before} -> {self.after}."
            )
        return (
            f"{where}: {self.share:.1%} of the tokens are below tau={control.tau:.3f}, confidently more than "
            f"{control.quantile:.0%}; {_answer(self.action, str(self.before), str(self.after))}."
        )


@dataclass(frozen=True)
class VetoEvent:
    """Too many rollouts were vetoed, and what happened to the budgets of all bins."""

    action: Action
    before: tuple[int, ...]
    after: tuple[int, ...]
    share: float
    """Of the rollouts since the last change."""

    def describe(self, control: Control) -> str:
        assert control.vetoed is not None
        return (
            f"{self.share:.1%} of the rollouts are vetoed, confidently more than {100 * control.vetoed:g}%; "
            f"{_answer(self.action, _span(self.before), _span(self.after))}."
        )


def _span(budgets: tuple[int, ...]) -> str:
    """Budgets never fall with length."""
    return str(budgets[0]) if budgets[0] == budgets[-1] else f"{budgets[0]}..{budgets[-1]}"


def _answer(action: Action, before: str, after: str) -> str:
    return {
        "warn": "the schedule stays as it is (on_violation=warn)",
        "rise": f"budget {before} -> {after}",
        "dense": "dense from here on (on_violation=dense)",
        "stop": "the run stops (on_violation=stop)",
        "saturated": f"the budget {before} cannot rise further",
    }[action]
