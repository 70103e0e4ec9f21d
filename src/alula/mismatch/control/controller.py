"""The budget controller: holds the tail of acceptance at its threshold, and vetoed rollouts rare, during training.

Per length bin, two tests run on the tokens of every step (`sequential_test`): is the tail below tau, and is it above
tau + margin? Evidence of the first raises the bin's budget by one rung of the ladder, evidence of the second lowers it.
Between the two thresholds nothing moves (hysteresis). A fall that had to be undone makes the time before the bin may
fall again four times as long, so reversals grow with the logarithm of the run's length.

A third test counts vetoed rollouts, one bet per prompt. A tail over tokens misses the single bad token that breaks an
answer. If too many rollouts are vetoed, every bin rises.
"""

from bisect import bisect_left, bisect_right
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alula.errors import require
from alula.mismatch.control.sequential_test import SequentialTest
from alula.settings import ControlSettings
from alula.sparsity.schedule import Schedule

Array = NDArray[Any]
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
class TailEvent:
    """A bin's tail crossed a threshold: the reaction, and the bin's budget before and after."""

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
            f"{quantile:.0%}; {_reaction(self.action, str(self.before), str(self.after))}."
        )


@dataclass(frozen=True)
class VetoEvent:
    """Too many rollouts were vetoed: the reaction, and the budgets of all bins before and after."""

    action: Action
    before: tuple[int, ...]
    after: tuple[int, ...]
    share: float
    """Share of the rollouts since the last change."""

    def describe(self, control: ControlSettings) -> str:
        assert control.vetoed is not None
        return (
            f"{self.share:.1%} of the rollouts are vetoed, confidently more than {100 * control.vetoed:g}%; "
            f"{_reaction(self.action, _span(self.before), _span(self.after))}."
        )


def _span(budgets: tuple[int, ...]) -> str:
    """The range of budgets, which never fall with length."""
    return str(budgets[0]) if budgets[0] == budgets[-1] else f"{budgets[0]}..{budgets[-1]}"


def _reaction(action: Action, before: str, after: str) -> str:
    return {
        "warn": "the schedule stays as it is (on_violation=warn)",
        "rise": f"budget {before} -> {after}",
        "dense": "dense from here on (on_violation=dense)",
        "stop": "the run stops (on_violation=stop)",
        "saturated": f"the budget {before} cannot rise further",
    }[action]


@dataclass
class _Bins:
    """State per bin, JSON-serialisable."""

    budget: list[int]
    since: list[int]
    """Schedule version of the bin's last change: older observations do not apply to its budget."""
    quiet: list[int]
    """Observed steps since then."""
    hold: list[int]
    """Quiet steps needed before the budget may fall."""
    fell: list[bool]
    """Whether the last change was a fall."""
    tokens: list[int]
    below: list[int]
    """Tokens below tau, out of `tokens`, since the last change."""
    seen: list[bool]
    """Whether any token was ever sampled at these lengths. Prompts may be longer than the first bins."""


class BudgetController:
    """Decides budgets per length bin from the tokens and vetoes of each step.

    `control` has its `tau` and `ladder` resolved (`monitor.resolve_control`). With an evictor (`kind`), earlier bins
    act on later ones. `max_length` is the longest sequence of the run; a budget of that size is dense. `samples` is
    the largest number of rollouts of one prompt in one observation.
    """

    def __init__(
        self,
        schedule: Schedule,
        control: ControlSettings,
        kind: Literal["select", "evict"],
        max_length: int,
        quantile: float = 0.05,
        samples: int = 1,
    ) -> None:
        require(kind in ("select", "evict"), f"kind={kind!r}: must be 'select' or 'evict'.")
        require(
            list(schedule.budgets) == sorted(schedule.budgets),
            f"schedule {schedule.name!r}: its budgets fall with length; a controlled schedule must not.",
        )
        require(
            control.tau is not None or control.vetoed is not None,
            "control.tau and control.vetoed are both unset; the controller needs one of them.",
        )
        n = len(schedule.budgets)
        self.max_length, self.quantile, self.samples = max_length, quantile, samples
        self.ladder = tuple(sorted(control.ladder or ()))
        self.original, self.control, self.evicts = schedule, control, kind == "evict"
        self.version, self.width, self.stopped = 0, schedule.width, False
        self.bins = _Bins(
            list(schedule.budgets),
            since=[0] * n,
            quiet=[0] * n,
            hold=[control.patience] * n,
            fell=[False] * n,
            tokens=[0] * n,
            below=[0] * n,
            seen=[False] * n,
        )
        self.low, self.high = SequentialTest(n, quantile, +1), SequentialTest(n, quantile, -1)
        room = max_length - self.width * np.arange(n)  # tokens of one rollout that fit into each bin
        room[:-1] = np.minimum(room[:-1], self.width)
        self.caps = np.maximum(room, 1) * samples
        self.bar, self.veto_bar = log(control.false_alarm_steps * n), log(control.false_alarm_steps)
        limit = control.vetoed or 1.0
        self.many_vetoes, self.few_vetoes = SequentialTest(1, limit, +1), SequentialTest(1, limit / 4, -1)
        self.vetoed, self.rollouts = 0, 0
        """Counts since the schedule's last change."""

    @property
    def schedule(self) -> Schedule:
        """The schedule with the current budgets."""
        if not self.version:
            return self.original
        name = f"{self.original.name}@{self.version}"
        return replace(self.original, budgets=tuple(self.bins.budget), name=name)

    def observe(
        self, alpha: ArrayLike, positions: ArrayLike, prompts: ArrayLike, version: ArrayLike | None = None
    ) -> list[TailEvent]:
        """Observe one step's tokens (flat, aligned) and react.

        `version` is the controller's `version` when a token's rollout began (one number, or one per token; None: the
        current one). Tokens sampled under an older budget of their bin are ignored. A delay between generation and
        observation therefore slows the controller but cannot make it react twice to the same violation.
        """
        if not self.control.enabled or self.stopped or self.control.tau is None:
            return []
        self._collect(np.asarray(alpha), np.asarray(positions), np.asarray(prompts), version)
        alarms = np.flatnonzero(self.low.value() >= self.bar)
        if len(alarms):
            return self._violation(alarms)
        return self._fall() if self.control.on_violation == "adapt" else []

    def observe_vetoes(
        self, vetoed: ArrayLike, rollouts: ArrayLike, version: ArrayLike | None = None
    ) -> VetoEvent | None:
        """Observe one step's prompts: the number of vetoed rollouts of each, and of all; `version` as in `observe`."""
        counts, sizes = np.asarray(vetoed), np.asarray(rollouts)
        fresh = np.broadcast_to(np.asarray(self.version if version is None else version), sizes.shape) == self.version
        counts, sizes = counts[fresh & (sizes > 0)], sizes[fresh & (sizes > 0)]
        if not self.control.enabled or self.stopped or self.control.vetoed is None or not len(sizes):
            return None
        for test in (self.many_vetoes, self.few_vetoes):
            test.add(np.zeros(len(sizes), np.int64), sizes, counts, np.full(len(sizes), sizes.max()))
        self.vetoed, self.rollouts = self.vetoed + int(counts.sum()), self.rollouts + int(sizes.sum())
        if self.many_vetoes.value()[0] < self.veto_bar:
            return None
        before, share = tuple(self.bins.budget), self.vetoed / self.rollouts
        if_changed, if_unchanged = self._react(np.arange(len(before)))
        after = tuple(self.bins.budget)
        self._forget_vetoes()
        return VetoEvent(if_changed if after != before else if_unchanged, before, after, share)

    def _forget_vetoes(self) -> None:
        self.many_vetoes.reset(np.array([0]))
        self.few_vetoes.reset(np.array([0]))
        self.vetoed = self.rollouts = 0

    def _collect(self, alpha: Array, positions: Array, prompts: Array, version: ArrayLike | None) -> None:
        assert self.control.tau is not None
        where = np.minimum(positions // self.width, len(self.bins.budget) - 1)
        drawn = np.broadcast_to(np.asarray(self.version if version is None else version), where.shape)
        fresh = drawn >= np.asarray(self.bins.since)[where]
        if not fresh.any():
            return
        alpha, where = alpha[fresh], where[fresh]
        names, who = np.unique(prompts[fresh], return_inverse=True)
        group = where * len(names) + who
        tokens = np.bincount(group)
        below = np.bincount(group, weights=alpha < self.control.tau)
        near = np.bincount(group, weights=alpha < self.control.tau + self.control.margin)
        present = np.flatnonzero(tokens)
        bins, tokens, below, near = present // len(names), tokens[present], below[present], near[present]
        require(
            bool((tokens <= self.caps[bins]).all()),
            f"samples={self.samples}, max_length={self.max_length}: a prompt has more tokens in a "
            "bin than these allow; raise the one that is too small.",
        )
        self.low.add(bins, tokens, below, self.caps[bins])
        self.high.add(bins, tokens, near, self.caps[bins])
        for j in np.unique(bins).tolist():
            self.bins.quiet[j] += 1
            self.bins.tokens[j] += int(tokens[bins == j].sum())
            self.bins.seen[j] = True
            self.bins.below[j] += int(below[bins == j].sum())

    def _violation(self, alarms: Array) -> list[TailEvent]:
        before, shares = list(self.bins.budget), self.shares()
        if_changed, if_unchanged = self._react(alarms)
        after = self.bins.budget
        events = []
        for j in range(len(after)):
            if after[j] != before[j]:
                events.append(TailEvent(if_changed, j, before[j], after[j], shares[j]))
            elif j in alarms:
                events.append(TailEvent(if_unchanged, j, before[j], after[j], shares[j]))
        self.low.reset(alarms)  # also without a change, or the alarm would repeat at every step
        return events

    def _react(self, alarms: Array) -> tuple[Action, Action]:
        """Apply `on_violation` to the alarmed bins. Returns the action for bins that changed, and for the others."""
        match self.control.on_violation:
            case "stop":
                self.stopped = True
                return "stop", "stop"
            case "dense":
                self._dense(int(alarms[0]))
                return "dense", "saturated"
            case "adapt":
                self._rise(alarms)
                return "rise", "saturated"
        return "warn", "warn"

    def _rise(self, alarms: Array) -> None:
        """Raise alarmed bins by one rung, with an evictor all earlier ones too; later ones follow to stay monotone."""
        rising = range(int(alarms.max()) + 1) if self.evicts else alarms.tolist()
        target = list(self.bins.budget)
        for j in rising:
            target[j] = self._up(target[j])
        self._move(np.maximum.accumulate(target).tolist())

    def _dense(self, first: int) -> None:
        """Make bins dense from the first alarmed one; with an evictor all, since evicted tokens stay missing."""
        first = 0 if self.evicts else first
        block = self.original.block or 1
        everything = -(-self.max_length // block) * block
        self._move([max(b, everything) if j >= first else b for j, b in enumerate(self.bins.budget)])

    def _fall(self) -> list[TailEvent]:
        if self.control.vetoed is not None and self.few_vetoes.value()[0] < self.veto_bar:
            return []
        ready = self.high.value() >= self.bar
        ready &= np.asarray(self.bins.quiet) >= np.asarray(self.bins.hold)
        if self.evicts:  # a smaller budget acts on every later bin with tokens, so all of them must be ready
            agree = ready | (np.asarray(self.bins.tokens) == 0)
            ready &= np.logical_and.accumulate(agree[::-1])[::-1]
        before, target = list(self.bins.budget), list(self.bins.budget)
        for j in np.flatnonzero(ready).tolist():
            down = self._down(target[j])
            used = next((i for i in range(j - 1, -1, -1) if self.bins.seen[i]), None)
            if down < target[j] and (used is None or down >= target[used]):
                target[j] = down
                for i in range(0 if used is None else used + 1, j):  # unused lengths must not pin this one
                    target[i] = min(target[i], down)
                if self.evicts:
                    break
        shares = self.shares()
        self._move(target)
        changed = [j for j in range(len(before)) if target[j] != before[j] and self.bins.seen[j]]
        return [TailEvent("fall", j, before[j], target[j], shares[j]) for j in changed]

    def _move(self, target: list[int]) -> None:
        changed = [j for j, (old, new) in enumerate(zip(self.bins.budget, target)) if old != new]
        if not changed:
            return
        self.version += 1
        for j in changed:
            rose = target[j] > self.bins.budget[j]
            if rose and self.bins.fell[j]:
                self.bins.hold[j] *= 4
            self.bins.fell[j] = not rose
            self.bins.budget[j] = target[j]
        stale = list(range(changed[0], len(target))) if self.evicts else changed
        for j in stale:
            self.bins.since[j], self.bins.quiet[j] = self.version, 0
            self.bins.tokens[j] = self.bins.below[j] = 0
        self.low.reset(np.array(stale))
        self.high.reset(np.array(stale))
        self._forget_vetoes()

    def _up(self, budget: int) -> int:
        at = bisect_right(self.ladder, budget)
        return self.ladder[at] if at < len(self.ladder) else budget

    def _down(self, budget: int) -> int:
        at = bisect_left(self.ladder, budget) - 1
        return self.ladder[at] if at >= 0 else budget

    @property
    def _tail_limits(self) -> list[float | None]:
        return [self.control.tau, self.quantile, self.control.margin]

    def shares(self) -> list[float]:
        """Share of tokens below tau per bin since its last change; NaN where there were none."""
        return [b / n if n else float("nan") for b, n in zip(self.bins.below, self.bins.tokens)]

    def state_dict(self) -> dict[str, Any]:
        """The state that `observe` depends on, JSON-serialisable."""
        return {
            "schedule": self.original.to_dict(),
            "version": self.version,
            "stopped": self.stopped,
            "bins": asdict(self.bins),
            "tail_limits": self._tail_limits,
            "veto_limit": self.control.vetoed,
            "low": self.low.log_m.tolist(),
            "high": self.high.log_m.tolist(),
            "many_vetoes": self.many_vetoes.log_m.tolist(),
            "few_vetoes": self.few_vetoes.log_m.tolist(),
            "vetoed": [self.vetoed, self.rollouts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, unless the run's budget or longest sequence has changed."""
        if Schedule.from_dict(state["schedule"]) != self.original:
            return  # resumed with another budget or longer answers: the old bins do not apply
        self.version, self.stopped = state["version"], state["stopped"]
        self.bins = _Bins(**{name: list(values) for name, values in state["bins"].items()})
        # Evidence applies to the limits it was gathered against: with other limits it starts anew.
        if state["tail_limits"] == self._tail_limits:
            self.low.log_m, self.high.log_m = np.array(state["low"]), np.array(state["high"])
        else:
            n = len(self.bins.budget)
            self.bins.tokens, self.bins.below = [0] * n, [0] * n
        if state["veto_limit"] == self.control.vetoed:
            self.many_vetoes.log_m = np.array(state["many_vetoes"])
            self.few_vetoes.log_m = np.array(state["few_vetoes"])
            self.vetoed, self.rollouts = state["vetoed"]
