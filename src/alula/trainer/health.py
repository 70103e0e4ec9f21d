"""Per-step warnings and abort conditions.

`HealthMonitor` turns metrics into warnings. It uses no clock and no files, so a resumed run warns exactly as an
uninterrupted one. A problem is reported when it starts, and again only after it was absent for `REARM` steps (for
held-out evaluations: after one without it). `StepAlerts` reports steps without a usable update and ends a run whose
loss stays non-finite.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

from alula.errors import RunFailed
from alula.files import count_text
from alula.trainer.health_checks import (
    STEP_CHECKS,
    Evaluation,
    HealthWarning,
    Hints,
    Trace,
    dense_falling,
    sparse_ahead,
)

if TYPE_CHECKING:  # the monitor works without torch
    from alula.distributed import World
    from alula.learner.learner import Update
    from alula.run.run_log import RunLogger
    from alula.trainer.batch import RolloutBatch
    from alula.trainer.update import StepResult

REARM = 20
WATCHED = (
    "mismatch/veto_rate",
    "mismatch/rejected",
    "mismatch/rerolled",
    "mismatch/kl_k3",
    "policy/grad_norm",
    "policy/entropy",
    "response/length_mean",
    "response/repetitive",
    "reward/mean",
    "reward/accuracy",
    "groups/no_signal",
)


class TrainingFailed(RunFailed):
    """The run cannot continue. The message says why and what to try."""


class HealthMonitor:
    """Takes every step's metrics and every held-out evaluation, and returns the new warnings. `correction` (a preset),
    `controlled` (whether a controller adapts the budget) and `sparse` (rollouts) decide what the warnings advise."""

    def __init__(self, correction: str = "none", controlled: bool = False, sparse: bool = True) -> None:
        self.hints = Hints(correction, controlled, sparse)
        self.traces = {name: Trace() for name in WATCHED}
        self.absent: dict[str, int] = {}
        """Reported problems, and the number of steps that each has been absent since."""
        self.evaluations: dict[str, list[Evaluation]] = {}
        self.sparse: dict[str, list[float]] = {}
        """Accuracy and standard error of the sparse policy's last evaluation, by data set."""
        self.falling: set[str] = set()
        """Data sets whose last evaluation raised a warning."""
        self.first_reward: float | None = None
        """Mean reward of the first five steps, which the evaluation before the first step is compared with."""

    def observe(self, metrics: Mapping[str, float | None]) -> list[HealthWarning]:
        """Check one training step. A metric that is missing or not finite is skipped."""
        present = set()
        for name, trace in self.traces.items():
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                trace.add(value)
                present.add(name)
        rewards = list(self.traces["reward/mean"].recent)[:5]
        if self.first_reward is None and len(rewards) == 5:
            self.first_reward = fmean(rewards)
        checks = [check for name, check in STEP_CHECKS if name in present]
        warnings = [warning for check in checks if (warning := check(self.traces, self.hints))]
        new = [warning for warning in warnings if self.absent.get(warning.kind, REARM) >= REARM]
        self.absent = {kind: steps + 1 for kind, steps in self.absent.items()}
        self.absent.update({warning.kind: 0 for warning in warnings})
        return new

    def observe_eval(
        self, name: str, policy: str, *, accuracy: float, stderr: float, **_: float
    ) -> list[HealthWarning]:
        """Check one held-out evaluation. At a step that evaluates both policies, the sparse one comes first."""
        if policy == "sparse":
            self.sparse[name] = [accuracy, stderr]
            return []
        rewards = self.traces["reward/mean"].last(5)
        history = self.evaluations.setdefault(name, [])
        history.append(
            Evaluation(accuracy, stderr, fmean(rewards) if rewards else None, *self.sparse.get(name, (None, None)))
        )
        was_falling = name in self.falling
        warning = dense_falling(name, history, self.first_reward, self.hints)
        warning = warning or sparse_ahead(name, history[-1], self.hints)
        (self.falling.add if warning else self.falling.discard)(name)
        return [warning] if warning and not was_falling else []

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "traces": {name: trace.state_dict() for name, trace in self.traces.items()},
            "absent": dict(self.absent),
            "evaluations": {name: [asdict(one) for one in history] for name, history in self.evaluations.items()},
            "sparse": dict(self.sparse),
            "falling": sorted(self.falling),
            "first_reward": self.first_reward,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, trace in self.traces.items():
            trace.load_state_dict(state["traces"][name])
        self.absent = dict(state["absent"])
        self.evaluations = {
            name: [Evaluation(**one) for one in history] for name, history in state["evaluations"].items()
        }
        self.sparse = dict(state["sparse"])
        self.falling = set(state["falling"])
        self.first_reward = state["first_reward"]


class StepAlerts:
    """Reports a problem at the first of the consecutive steps that have it."""

    def __init__(self, logger: "RunLogger", world: "World", max_skipped: int) -> None:
        self.logger, self.world, self.max_skipped = logger, world, max_skipped
        self.idle = False
        """Whether the last step had nothing to learn from."""
        self.ungraded = False
        """Whether some answers of the last step could not be graded."""
        self.gave_up = False
        """Whether the environment failed in some episodes of the last step."""
        self.unclosed = False
        """Whether some environments could not be closed in the last step."""
        self.not_finite = 0
        """Consecutive updates skipped because of a non-finite loss or gradient."""

    def state_dict(self) -> dict[str, Any]:
        names = ("idle", "ungraded", "gave_up", "unclosed", "not_finite")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.state_dict():
            setattr(self, name, state[name])

    def check(self, step: int, batch: "RolloutBatch", result: "StepResult") -> None:
        """Report the problems of a step; raise TrainingFailed if the run must end."""
        self._nothing_learned(step, batch, result)
        self._not_graded(step, batch)
        self._environment_failed(step, batch)
        self._environment_not_closed(step, batch)
        self._not_finite(step, result.updates)

    def _nothing_learned(self, step: int, batch: "RolloutBatch", result: "StepResult") -> None:
        counts = self.world.all_gather((result.trained, sum(result.rejected), len(batch.rollouts)))
        trained, rejected, rollouts = map(sum, zip(*counts))
        if not trained and not self.idle:
            if rejected == rollouts:
                reason = "every rollout was rejected"
                advice = "Raise the KV budget, keep sinks and a window, widen a mask, or use the reroll correction."
            else:
                reason = "no group had kept rollouts with different rewards"
                advice = "Use easier or harder prompts, more rollouts per prompt, or sampling.dynamic=true."
            self.logger.event(step, "nothing-learned", f"Step {step} taught nothing: {reason}.", advice)
        self.idle = not trained

    def _not_graded(self, step: int, batch: "RolloutBatch") -> None:
        failed = [why for share in self.world.all_gather(batch.failures) for why in share if why]
        reasons = Counter(reason for why in failed for reason in why)
        if failed and not self.ungraded:
            reason, count = reasons.most_common(1)[0]
            message = (
                f"{count_text(len(failed), 'answer')} of step {step} could not be graded (counted as 0); {count} of "
                f"them: {reason}."
            )
            advice = "Check the reward function; rewards.timeout limits the time per answer."
            self.logger.event(step, "not-graded", message, advice)
        self.ungraded = bool(failed)

    def _environment_failed(self, step: int, batch: "RolloutBatch") -> None:
        reasons = [reason for share in self.world.all_gather(batch.environment_failures()) for reason in share]
        if reasons and not self.gave_up:
            reason, count = Counter(reasons).most_common(1)[0]
            message = (
                f"The environment failed in {count_text(len(reasons), 'episode')} of step {step}, not used for "
                f"training; {count} of them: {reason}."
            )
            advice = (
                "Answer wrong tool calls with a message instead of an exception; environment.timeout limits a call."
            )
            self.logger.event(step, "environment-failed", message, advice)
        self.gave_up = bool(reasons)

    def _environment_not_closed(self, step: int, batch: "RolloutBatch") -> None:
        reasons = [reason for share in self.world.all_gather(batch.unclosed_environments()) for reason in share]
        if reasons and not self.unclosed:
            reason, count = Counter(reasons).most_common(1)[0]
            message = f"close() failed after {count_text(len(reasons), 'episode')} by step {step}; {count}: {reason}."
            advice = "Their rewards count, but what such an environment holds, such as a container, is left behind."
            self.logger.event(step, "environment-not-closed", message, advice)
        self.unclosed = bool(reasons)

    def _not_finite(self, step: int, updates: "list[Update]") -> None:
        in_a_row = self.not_finite
        for update in updates:
            self.not_finite = 0 if update.taken else self.not_finite + 1
            in_a_row = max(in_a_row, self.not_finite)
        if skipped := sum(not update.taken for update in updates):
            what = count_text(skipped, "update")
            self.logger.message(f"step {step}: skipped {what} whose loss or gradient is not finite.")
        if in_a_row >= self.max_skipped:
            raise TrainingFailed(
                f"step {step}: the loss or its gradient was not finite in {in_a_row} updates in a row "
                f"(learner.max_skipped={self.max_skipped}). Lower learner.lr, cap the weights "
                "(objective.correction=tis), or use float32, and --resume: skipped updates changed nothing."
            )
