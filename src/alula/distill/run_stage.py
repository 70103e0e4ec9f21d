"""DistillSparse inside a training run: which rollouts are distilled, and when the run moves to a sparser policy."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from alula.data.dataset import Example
from alula.distill.distiller import Acceptance, Distiller
from alula.engine.rollout import Rollout
from alula.mismatch.tail import Tail
from alula.rollouts.rollouts import Rollouts
from alula.settings import DistillSettings, MoveSettings
from alula.sparsity.policy import Sparsity


class RunDistiller:
    """After each update of the policy: train the adapter on a share of the step's rollouts, merge it into the engine.

    `settings.first` trains the adapter before the first step. `settings.move` names a sparser policy (`candidate`),
    which is measured on `prompts` with the present adapter. The trainer generates the rollouts and owns the policy in
    force; it adopts the candidate when `moved` becomes true.
    """

    def __init__(
        self, distiller: Distiller, rollouts: Rollouts, settings: DistillSettings, prompts: list[Example]
    ) -> None:
        self.distiller, self.rollouts, self.settings = distiller, rollouts, settings
        self.divergences: list[float] = []
        """KL(sparse ‖ dense) of every batch of `first`, before the adapter was trained on it."""
        self.candidate: Sparsity | None = None
        if settings.move is not None:
            self.candidate = Sparsity.parse(settings.move.sparsity)
            rollouts.check(self.candidate)
            measured = prompts[: settings.move.prompts]
            self.prompts = distiller.world.local_slice(measured)
            self.prompt_indices = distiller.world.local_slice(range(len(measured)))
        self.moved = False
        self.checked = 0
        """The step after which the candidate was last measured."""
        self.measured: dict[str, float] = {}
        """Metrics of that measurement."""
        self.before_move = [0.0, 0.0]
        """Tokens generated before the move, and the seconds they took."""

    # -- before the first step ----------------------------------------------------------------------------

    def first_due(self) -> bool:
        return self.settings.first is not None and len(self.divergences) < self.settings.first.steps

    def first_step(self, rollouts: Sequence[Rollout]) -> None:
        """Train the adapter on rollouts without rewards."""
        assert self.settings.first is not None
        with self.rollouts.asleep():
            metrics = self.distiller.step(rollouts, minibatches=self.settings.first.minibatches)
            self.divergences.append(metrics["kl"])
            self.publish()

    # -- every step ---------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether training step `step`, counted from 1, distils."""
        return step % self.settings.every == 0

    def record(self, step: int, indices: Sequence[int], sparsity: Sparsity) -> bool | list[bool]:
        """Which prompts of a step, by their indices in the run, have their evictions recorded: those to distil."""
        if sparsity.evict is None or not self.due(step):
            return False
        return [self.distiller.is_chosen(index) for index in indices]

    def step(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        advantages: Tensor,
        rerolled: Sequence[bool] = (),
    ) -> dict[str, float]:
        """Distil the chosen rollouts of a step, vetoed ones included. `rerolled` ones are left out: they were continued
        densely."""
        if not self.due(step):
            return dict(self.measured)
        rows = [
            i
            for i, rollout in enumerate(rollouts)
            if self.distiller.is_chosen(rollout.prompt_index) and len(rollout) and not (rerolled and rerolled[i])
        ]
        if not self.distiller.world.all_max(len(rows)):  # none is chosen, or all those were continued densely
            return dict(self.measured)
        metrics = self.distiller.step([rollouts[i] for i in rows], advantages[rows])
        del metrics["time"]
        return {f"distill/{name}": value for name, value in metrics.items()} | self.measured

    def publish(self) -> None:
        """Publish the adapter for sparse rollouts: after every change of the adapter or of the weights."""
        self.rollouts.publish_adapter(self.distiller.adapter())

    def cost_metrics(self, metrics: Mapping[str, float], generating: float) -> dict[str, float]:
        """Time of distillation relative to the rest of the step; after the move also the rollout speed relative to
        that of all steps before it. The step's rollouts took `generating` seconds."""
        speed, distill = metrics["speed/tokens_per_s"], metrics["time/distill"]
        costs = {"speed/distill_cost": distill / max(metrics["time/step"] - distill, 1e-9)}
        tokens, seconds = self.before_move
        if not self.moved:
            self.before_move = [tokens + speed * generating, seconds + generating]
        elif tokens:
            costs["speed/sparser"] = speed * seconds / tokens
        return costs

    # -- moving to a sparser policy -----------------------------------------------------------------------

    def move_due(self, step: int) -> bool:
        """Whether the candidate is measured after training step `step`."""
        move = self.settings.move
        return move is not None and not self.moved and step > self.checked and measures_at(move, step)

    def try_move(self, step: int, rollouts: list[Rollout]) -> str:
        """Measure the candidate on its `rollouts` and decide whether to move to it; the result as a sentence."""
        move = self.settings.move
        assert move is not None
        assert self.candidate is not None
        with self.rollouts.asleep():
            acceptance = self._gathered(rollouts)
        tails = acceptance.tails(move.width)
        self.checked, self.moved = step, may_move(move, step, tails)
        self.measured = {"distill/candidate_tail": acceptance.tail, "distill/candidate_mean": acceptance.mean}
        known = f"confidently at least {lowest_bound(tails):.3f} at every length" if tails.enough.any() else ""
        return f"{self.candidate.describe()}: tail {acceptance.tail:.3f}, {known or 'from few prompts'}; " + (
            "the run moves to it." if self.moved else f"the run stays (tau={move.tau})."
        )

    def _gathered(self, rollouts: list[Rollout]) -> Acceptance:
        """The measurements of all ranks."""
        world = self.distiller.world
        local = self.distiller.measure(rollouts) if rollouts else None
        parts = [(rank, part) for rank, part in enumerate(world.all_gather(local)) if part is not None]
        tokens = np.array([len(part.alpha) for _, part in parts])
        return Acceptance(
            np.concatenate([part.alpha for _, part in parts]),
            np.concatenate([part.positions for _, part in parts]),
            np.concatenate([part.prompts * world.size + rank for rank, part in parts]),
            float(np.average([part.kl for _, part in parts], weights=tokens)),
        )

    # -- checkpoints --------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        return self.distiller.tensors()

    def state(self) -> dict[str, Any]:
        return {
            "divergences": [*self.divergences],
            "moved": self.moved,
            "checked": self.checked,
            "measured": self.measured,
            "before_move": self.before_move,
            "distiller": self.distiller.state(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        self.distiller.resume(state["distiller"])
        self.moved, self.checked, self.measured = state["moved"], state["checked"], dict(state["measured"])
        self.before_move, self.divergences = state["before_move"], list(state["divergences"])


def measures_at(move: MoveSettings, step: int) -> bool:
    """Whether the candidate is measured after training step `step`."""
    return step == move.at or (move.at is None and step % move.every == 0)


def may_move(move: MoveSettings, step: int, tails: Tail) -> bool:
    """Whether to move after training step `step`: at the set step, or once the tail is confidently at least tau."""
    return step == move.at or (move.at is None and lowest_bound(tails) >= move.tau)


def lowest_bound(tails: Tail) -> float:
    """The smallest lower bound of all length bins with enough prompts; -inf if none has."""
    return float(tails.lower[tails.enough].min()) if tails.enough.any() else float("-inf")
