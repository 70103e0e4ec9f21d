"""What a step tells a person at once, and when a run must end: nothing learned, answers not graded, no finite loss."""

from collections import Counter
from typing import Any

from alula.distributed import World
from alula.errors import RunFailed
from alula.learner.learner import Update
from alula.run.run_log import RunLogger
from alula.trainer.batch import Experience
from alula.trainer.step_metrics import whole_sum
from alula.trainer.update import Learned


class TrainingFailed(RunFailed):
    """The run cannot go on; the message says why and what to try."""


class Notices:
    """A trouble is told when it begins, not at every step that it lasts."""

    def __init__(self, record: RunLogger, world: World, max_skipped: int) -> None:
        self.record, self.world, self.max_skipped = record, world, max_skipped
        self.idle = False
        """Whether the last step had nothing to learn from."""
        self.failing = False
        """Whether some of its answers could not be graded."""
        self.not_finite = 0
        """Updates in a row that were skipped."""

    def state_dict(self) -> dict[str, Any]:
        return {"idle": self.idle, "failing": self.failing, "not_finite": self.not_finite}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.idle, self.failing, self.not_finite = state["idle"], state["failing"], state["not_finite"]

    def after(self, step: int, batch: Experience, learned: Learned) -> None:
        self._nothing_learned(step, batch, learned)
        self._not_graded(step, batch)
        self._not_finite(step, learned.updates)

    def _nothing_learned(self, step: int, batch: Experience, learned: Learned) -> None:
        taught, rejected, everyone = (
            whole_sum(self.world, count) for count in (learned.taught, sum(learned.rejected), len(batch.rollouts))
        )
        if not taught and not self.idle:
            if rejected == everyone:
                why = "every rollout was rejected"
                advice = "Raise the KV budget, keep sinks and a window, widen a mask, or use the reroll correction."
            else:
                why = "no group had rollouts of different reward that were kept"
                advice = "Use easier or harder prompts, more rollouts per prompt, or sampling.dynamic=true."
            self.record.event(step, "nothing-learned", f"Step {step} taught nothing: {why}.", advice)
        self.idle = not taught

    def _not_graded(self, step: int, batch: Experience) -> None:
        failed = [why for share in self.world.all_gather(batch.failures) for why in share if why]
        reasons = Counter(reason for why in failed for reason in why)
        if failed and not self.failing:
            reason, count = reasons.most_common(1)[0]
            message = (
                f"{len(failed)} answers of step {step} could not be graded and count 0; {count} of them: {reason}."
            )
            advice = "Look at the reward; rewards.timeout is what one answer may take."
            self.record.event(step, "not-graded", message, advice)
        self.failing = bool(failed)

    def _not_finite(self, step: int, updates: list[Update]) -> None:
        for update in updates:
            self.not_finite = 0 if update.taken else self.not_finite + 1
        if self.not_finite:
            self.record.say(f"step {step}: an update was skipped, its loss or gradient is not finite.")
        if self.not_finite >= self.max_skipped:
            raise TrainingFailed(
                f"step {step}: the loss or its gradient was not finite in {self.not_finite} updates in a row "
                f"(learner.max_skipped={self.max_skipped}). Lower learner.lr, cap the weights "
                "(objective.correction=tis), or use float32; the last checkpoint is from before."
            )
