"""A controller that holds the tail of acceptance at its threshold, and vetoed rollouts rare, while the policy trains.

Per length bin, two tests run on the tokens of every step (`sequential_test`): is the tail below tau, is
it above tau + margin? A bin rises one rung of the ladder on evidence of the first, falls one on evidence of the
second. Between the two thresholds nothing moves (hysteresis), and a fall that had to be taken back makes the
time before the bin may fall again four times as long: its reversals grow with the logarithm of the run's length.

A third test counts vetoed rollouts, each prompt one bet. A tail over tokens is blind to the one spoilt token that
spoils an answer; where too many answers are, every bin rises.
"""

from bisect import bisect_left, bisect_right
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alula.config.settings import ControlSettings
from alula.errors import require
from alula.mismatch.control.control import Action, Event, VetoEvent
from alula.mismatch.control.sequential_test import SequentialTest
from alula.sparsity.schedule import Schedule

Array = NDArray[Any]


@dataclass
class _Bins:
    """State per bin, all JSON."""

    budget: list[int]
    since: list[int]
    """Schedule version of the bin's last change: older observations say nothing about its budget."""
    quiet: list[int]
    hold: list[int]
    fell: list[bool]
    tokens: list[int]
    below: list[int]


class Controller:
    """Watches a schedule and, if enabled, changes it. Evictors are `forward`: earlier bins act on later ones.

    `control` has its `tau` and `ladder` filled in (`monitor.filled_in`). `max_length` is the longest sequence of the
    run, where a budget is dense; `samples` the most rollouts of one prompt in one observation.
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
        self.original, self.control, self.forward = schedule, control, kind == "evict"
        self.version, self.width, self.stopped = 0, schedule.width, False
        self.bins = _Bins(
            list(schedule.budgets), [0] * n, [0] * n, [control.patience] * n, [False] * n, [0] * n, [0] * n
        )
        self.low, self.high = SequentialTest(n, quantile, +1), SequentialTest(n, quantile, -1)
        room = max_length - self.width * np.arange(n)  # tokens of one rollout that fit into each bin
        room[:-1] = np.minimum(room[:-1], self.width)
        self.caps = np.maximum(room, 1) * samples
        self.bar, self.veto_bar = log(control.false_alarm_steps * n), log(control.false_alarm_steps)
        limit = control.vetoed or 1.0
        self.spoilt, self.sound = SequentialTest(1, limit, +1), SequentialTest(1, limit / 4, -1)
        self.vetoed, self.rollouts = 0, 0
        """Since the schedule's last change."""

    @property
    def schedule(self) -> Schedule:
        """The schedule in force."""
        if not self.version:
            return self.original
        name = f"{self.original.name}@{self.version}"
        return replace(self.original, budgets=tuple(self.bins.budget), name=name)

    def observe(
        self, alpha: ArrayLike, positions: ArrayLike, prompts: ArrayLike, version: ArrayLike | None = None
    ) -> list[Event]:
        """Take one step's tokens (flat, aligned) and act on them.

        `version` is the controller's `version` when a token's rollout began (one number, or one per token; None:
        the present one). Tokens drawn under an older budget of their bin are left out, so a delay between
        generation and observation slows the controller but cannot make it act twice on the same fault.
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
        """Take one step's prompts: how many rollouts of each were vetoed, of how many; `version` as in `observe`."""
        counts, of = np.asarray(vetoed), np.asarray(rollouts)
        fresh = np.broadcast_to(np.asarray(self.version if version is None else version), of.shape) == self.version
        counts, of = counts[fresh & (of > 0)], of[fresh & (of > 0)]
        if not self.control.enabled or self.stopped or self.control.vetoed is None or not len(of):
            return None
        for evidence in (self.spoilt, self.sound):
            evidence.add(np.zeros(len(of), np.int64), of, counts, np.full(len(of), of.max()))
        self.vetoed, self.rollouts = self.vetoed + int(counts.sum()), self.rollouts + int(of.sum())
        if self.spoilt.value()[0] < self.veto_bar:
            return None
        before, share = tuple(self.bins.budget), self.vetoed / self.rollouts
        moved, still = self._act(np.arange(len(before)))
        after = tuple(self.bins.budget)
        self._forget_vetoes()
        return VetoEvent(moved if after != before else still, before, after, share)

    def _forget_vetoes(self) -> None:
        self.spoilt.reset(np.array([0]))
        self.sound.reset(np.array([0]))
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
            self.bins.below[j] += int(below[bins == j].sum())

    def _violation(self, alarms: Array) -> list[Event]:
        before, shares = list(self.bins.budget), self.shares()
        moved, still = self._act(alarms)
        after = self.bins.budget
        events = []
        for j in range(len(after)):
            if after[j] != before[j]:
                events.append(Event(moved, j, before[j], after[j], shares[j]))
            elif j in alarms:
                events.append(Event(still, j, before[j], after[j], shares[j]))
        self.low.reset(alarms)  # an alarm without a change starts to count anew, or it would ring at every step
        return events

    def _act(self, alarms: Array) -> tuple[Action, Action]:
        """Do what `on_violation` says to the alarmed bins; what that is called where a budget moved and where not."""
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
        """Alarmed bins rise a rung; so do, for an evictor, all earlier ones; later ones follow to stay monotone."""
        rising = range(int(alarms.max()) + 1) if self.forward else alarms.tolist()
        target = list(self.bins.budget)
        for j in rising:
            target[j] = self._up(target[j])
        self._move(np.maximum.accumulate(target).tolist())

    def _dense(self, first: int) -> None:
        """From the alarmed bin on; for an evictor everywhere, since what is evicted earlier is missing later."""
        first = 0 if self.forward else first
        block = self.original.block or 1
        everything = -(-self.max_length // block) * block
        self._move([max(b, everything) if j >= first else b for j, b in enumerate(self.bins.budget)])

    def _fall(self) -> list[Event]:
        if self.control.vetoed is not None and self.sound.value()[0] < self.veto_bar:
            return []
        ready = self.high.value() >= self.bar
        ready &= np.asarray(self.bins.quiet) >= np.asarray(self.bins.hold)
        if self.forward:  # a smaller budget here acts on every later bin that has been seen, so all must agree
            agree = ready | (np.asarray(self.bins.tokens) == 0)
            ready &= np.logical_and.accumulate(agree[::-1])[::-1]
        before, target = list(self.bins.budget), list(self.bins.budget)
        for j in np.flatnonzero(ready).tolist():
            down = self._down(target[j])
            if down < target[j] and (j == 0 or down >= target[j - 1]):
                target[j] = down
                if self.forward:
                    break
        shares = self.shares()
        self._move(target)
        changed = [j for j in range(len(before)) if target[j] != before[j]]
        return [Event("fall", j, before[j], target[j], shares[j]) for j in changed]

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
        stale = list(range(changed[0], len(target))) if self.forward else changed
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
        """Everything that `observe` depends on, as JSON."""
        return {
            "schedule": self.original.to_dict(),
            "version": self.version,
            "stopped": self.stopped,
            "bins": asdict(self.bins),
            "tail_limits": self._tail_limits,
            "veto_limit": self.control.vetoed,
            "low": self.low.log_m.tolist(),
            "high": self.high.log_m.tolist(),
            "spoilt": self.spoilt.log_m.tolist(),
            "sound": self.sound.log_m.tolist(),
            "vetoed": [self.vetoed, self.rollouts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if Schedule.from_dict(state["schedule"]) != self.original:
            return  # another budget or longer answers at a resume: where the old bins went says nothing about it
        self.version, self.stopped = state["version"], state["stopped"]
        self.bins = _Bins(**{name: list(values) for name, values in state["bins"].items()})
        # Evidence is about the limits that it was gathered against: a run resumed with others begins anew.
        if state.get("tail_limits", self._tail_limits) == self._tail_limits:
            self.low.log_m, self.high.log_m = np.array(state["low"]), np.array(state["high"])
        else:
            n = len(self.bins.budget)
            self.bins.tokens, self.bins.below = [0] * n, [0] * n
        if state.get("veto_limit") == self.control.vetoed and "vetoed" in state:
            self.spoilt.log_m, self.sound.log_m = np.array(state["spoilt"]), np.array(state["sound"])
            self.vetoed, self.rollouts = state["vetoed"]
