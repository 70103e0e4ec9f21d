"""Known signs of trouble in a run, said in plain words with what to try.

The monitor only looks: numbers in, warnings out, no clock and no files, so a resumed run warns exactly as
an uninterrupted one does. A problem is reported when it starts, and again only after it has been away for
`REARM` steps (trouble in a held-out evaluation: after one without it).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from alula.trainer.advice import ANOTHER, filled
from alula.trainer.signs import CHECKS, HealthWarning, Trace

__all__ = ["HealthMonitor", "HealthWarning"]

REARM = 20
WATCHED = (
    "mismatch/veto_rate",
    "mismatch/rejected",
    "mismatch/rerolled",
    "mismatch/kl_k3",
    "policy/grad_norm",
    "policy/entropy",
    "response/length_mean",
    "reward/mean",
    "reward/accuracy",
    "groups/no_signal",
)


@dataclass(frozen=True)
class Held:
    """One held-out evaluation of the dense policy, beside what the run itself showed at that time."""

    accuracy: float
    stderr: float
    reward: float | None
    sparse_accuracy: float | None
    sparse_stderr: float | None


class HealthMonitor:
    """Feed it every step's metrics and every held-out evaluation; it answers with the new warnings. What they advise
    depends on the preset of the correction in use, and on whether a controller moves the budget."""

    def __init__(self, correction: str = "none", controlled: bool = False) -> None:
        self.correction, self.controlled = correction, controlled
        self.traces = {name: Trace() for name in WATCHED}
        self.away: dict[str, int] = {}
        """Reported problems, and for how many steps each has been away since."""
        self.held: dict[str, list[Held]] = {}
        self.sparse: dict[str, list[float]] = {}
        """Accuracy and standard error of the sparse policy's last evaluation."""
        self.falling: set[str] = set()
        self.first_reward: float | None = None
        """Of the first five steps: what an evaluation before the first step is compared by."""

    def observe(self, metrics: Mapping[str, float | None]) -> list[HealthWarning]:
        """One training step. A metric that is missing or not finite is skipped."""
        present = set()
        for name, trace in self.traces.items():
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                trace.add(value)
                present.add(name)
        rewards = list(self.traces["reward/mean"].recent)[:5]
        if self.first_reward is None and len(rewards) == 5:
            self.first_reward = fmean(rewards)
        found = [warning for name, check in CHECKS if name in present and (warning := check(self.traces))]
        new = [warning for warning in found if self.away.get(warning.kind, REARM) >= REARM]
        self.away = {kind: steps + 1 for kind, steps in self.away.items()}
        self.away.update({warning.kind: 0 for warning in found})
        return self._told(new)

    def _told(self, warnings: list[HealthWarning]) -> list[HealthWarning]:
        return [replace(w, advice=filled(w.advice, self.correction, self.controlled)) for w in warnings]

    def observe_eval(
        self, name: str, policy: str, *, accuracy: float, stderr: float, **_: float
    ) -> list[HealthWarning]:
        """One held-out evaluation; where a step evaluates both policies, the sparse one comes first."""
        if policy == "sparse":
            self.sparse[name] = [accuracy, stderr]
            return []
        rewards = self.traces["reward/mean"].last(5)
        history = self.held.setdefault(name, [])
        history.append(
            Held(accuracy, stderr, fmean(rewards) if rewards else None, *self.sparse.get(name, (None, None)))
        )
        was_falling = name in self.falling
        warning = dense_falling(name, history, self.first_reward) or sparse_ahead(name, history[-1])
        (self.falling.add if warning else self.falling.discard)(name)
        return self._told([warning]) if warning and not was_falling else []

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "traces": {name: trace.state_dict() for name, trace in self.traces.items()},
            "away": dict(self.away),
            "held": {name: [asdict(one) for one in history] for name, history in self.held.items()},
            "sparse": dict(self.sparse),
            "falling": sorted(self.falling),
            "first_reward": self.first_reward,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, trace in self.traces.items():
            if name in state["traces"]:  # a checkpoint from before a metric was watched
                trace.load_state_dict(state["traces"][name])
        self.away = dict(state["away"])
        self.held = {name: [Held(**one) for one in history] for name, history in state["held"].items()}
        self.sparse = dict(state["sparse"])
        self.falling = set(state["falling"])
        self.first_reward = state.get("first_reward")  # a checkpoint of an older version has none


def dense_falling(name: str, history: list[Held], first_reward: float | None = None) -> HealthWarning | None:
    """Dense held-out accuracy significantly below its best: the last evaluation by 4 standard errors of the
    difference from the best one, or the mean of the last two by 3.5 from the best two in a row.

    The bars are above the usual 2 because the best of many evaluations is lucky. `first_reward` is what the run earned
    at its beginning, where the first evaluation, which has no reward beside it, is the best one.
    """
    single = [(one, one.accuracy, one.stderr) for one in history]
    pairs = [
        (late, (early.accuracy + late.accuracy) / 2, math.hypot(early.stderr, late.stderr) / 2)
        for early, late in pairwise(history)
    ]
    for candidates, errors in ((single, 4.0), (pairs, 3.5)):
        if len(candidates) < 2:
            continue
        best, best_accuracy, best_stderr = max(candidates, key=lambda candidate: candidate[1])
        now, accuracy, stderr = candidates[-1]
        if best_accuracy - accuracy > errors * math.hypot(best_stderr, stderr):
            earned = first_reward if best.reward is None else best.reward
            return _falling_warning(name, replace(best, reward=earned), now, best_accuracy, accuracy)
    return None


def sparse_ahead(name: str, now: Held) -> HealthWarning | None:
    """The sparse policy right significantly more often than the dense one: by 4 standard errors of the difference."""
    if now.sparse_accuracy is None or now.sparse_stderr is None:
        return None
    if now.sparse_accuracy - now.accuracy <= 4 * math.hypot(now.stderr, now.sparse_stderr):
        return None
    return HealthWarning(
        "dense-sparse-divergence",
        f"On {name} the sparse policy is right {now.sparse_accuracy:.1%} of the time and the dense one, which is what "
        f"you will ship, only {now.accuracy:.1%}: the run is learning to do well with a sparse cache, not to do well.",
        f"Do not trust the reward curve. Raise the budget, or {ANOTHER}.",
    )


def _falling_warning(name: str, best: Held, now: Held, high: float, low: float) -> HealthWarning:
    fell = f"Held-out accuracy of the dense policy on {name} has fallen from {high:.1%} to {low:.1%}"
    gained = None if best.reward is None or now.reward is None else now.reward - best.reward
    reward_rose = gained is not None and gained > 0
    sparse_rose = (
        best.sparse_accuracy is not None
        and now.sparse_accuracy is not None
        and now.sparse_accuracy > best.sparse_accuracy
    )
    if reward_rose or sparse_rose:
        rising = "the training reward" if reward_rose else "the sparse policy's accuracy"
        return HealthWarning(
            "dense-sparse-divergence",
            f"{fell} while {rising} rose: the run is learning to do well with a sparse cache, not to do well.",
            f"Do not trust the reward curve. Go back to the best checkpoint, raise the budget, or {ANOTHER}.",
        )
    with_it = ", and the training reward fell with it" if gained is not None and gained < 0 else ""
    return HealthWarning(
        "dense-falling",
        f"{fell}{with_it}: the policy is breaking down.",
        "Go back to the best checkpoint; lower the learning rate, raise the KV budget, and look at the steps "
        "where policy/grad_norm and mismatch/veto_rate first rose.",
    )
