"""The ladder of budgets, and the events that the controller reports."""

from dataclasses import dataclass
from typing import Literal

from alula.config.settings import ControlSettings

Action = Literal["warn", "rise", "fall", "dense", "stop", "saturated"]
PAGES = (32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1152)
"""Sparrow's grid of budgets, in pages of 16 tokens."""


def default_ladder(start: int, longest: int, block: int = 1) -> tuple[int, ...]:
    """Rungs a quarter apart (multiples of `block`) from a budget below Sparrow's grid, the grid, and a dense top."""
    rungs, budget = [16 * pages for pages in PAGES], start
    while budget < rungs[0]:
        rungs.append(budget)
        budget = -(-max(budget + 1, budget * 5 // 4) // block) * block
    return (*sorted({rung for rung in rungs if rung < longest}), -(-longest // 16) * 16)


@dataclass(frozen=True)
class Event:
    """What happened to one bin, and why."""

    action: Action
    bin: int
    before: int
    after: int
    share: float
    """Share of the bin's tokens below tau, since its last change."""

    def describe(self, control: ControlSettings, quantile: float, width: int) -> str:
        assert control.tau is not None
        where = f"lengths {self.bin * width}-{(self.bin + 1) * width}"
        if self.action == "fall":
            return (
                f"{where}: the tail is confidently above {control.tau + control.margin:.3f}; "
                f"budget {self.before} -> {self.after}."
            )
        return (
            f"{where}: {self.share:.1%} of the tokens are below tau={control.tau:.3f}, confidently more than "
            f"{quantile:.0%}; {_answer(self.action, str(self.before), str(self.after))}."
        )


@dataclass(frozen=True)
class VetoEvent:
    """Too many rollouts were vetoed, and what happened to the budgets of all bins."""

    action: Action
    before: tuple[int, ...]
    after: tuple[int, ...]
    share: float
    """Share of the rollouts since the last change."""

    def describe(self, control: ControlSettings) -> str:
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
