"""DistillSparse inside a training run: which rollouts are recorded and distilled, and when the run goes sparser."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from alula.distill.distiller import Distiller
from alula.distill.first import First
from alula.distill.measure import Acceptance
from alula.distill.move import Move, least
from alula.engine.engine import Engine
from alula.engine.rollout import Rollout, Sampling, Scores
from alula.sparsity.text import parse_sparsity

if TYPE_CHECKING:
    from alula.trainer.batch import RolloutBatch
    from alula.trainer.collector import Collector


class Stage:
    """Each step: train φ on a share of the step's rollouts, after θ's update; merge it into the engine.

    `first` says how φ is trained before the first of them. `move` names a sparser policy, which is measured on
    `prompts` with φ as it is.
    """

    def __init__(
        self,
        distiller: Distiller,
        engine: Engine,
        collector: "Collector",
        first: First | None,
        move: Move | None,
        prompts: list[list[int]],
    ) -> None:
        self.distiller, self.engine, self.collector = distiller, engine, collector
        self.first = first
        self.divergences: list[float] = []
        """Of every batch that `first` has trained φ on, before it did."""
        self.move, self.candidate = move, None
        if move is not None:
            self.candidate = parse_sparsity(move.sparsity)
            engine.check(self.candidate)
            self.prompts = distiller.world.local_slice(prompts[: move.prompts])
        self.moved = False
        self.checked = 0
        """The step after which the candidate was last measured."""
        self.measured: dict[str, float] = {}
        """What was found then."""
        self.before_move = [0.0, 0.0]
        """Tokens generated before the move, and the seconds they took."""

    # -- before the first step ----------------------------------------------------------------------------

    def first_due(self) -> bool:
        return self.first is not None and len(self.divergences) < self.first.steps

    def first_step(self, prompts: list[list[int]], sampling: Sampling) -> None:
        """Train φ on rollouts of its own."""
        assert self.first is not None
        sparsity = self.collector.sparsity
        rollouts = self.collector.generate(prompts, sampling, sparsity, record=sparsity.evict is not None)
        with self.engine.asleep(), self.distiller.by_divergence(self.first.minibatches):
            self.divergences.append(self.distiller.step(rollouts)["divergence"])
            self.publish()

    # -- every step ---------------------------------------------------------------------------------------

    def record(self, place: tuple[int, int], prompts: int) -> bool | list[bool]:
        """Which prompts' evictions are recorded: only those that this step distils."""
        evicts = self.collector.sparsity.evict is not None
        return self.distiller.chosen(prompts, *place) if evicts and self.distiller.config.due(place[0]) else False

    def step(self, step: int, batch: "RolloutBatch", advantages: Tensor) -> dict[str, float]:
        """Distil the chosen rollouts, vetoed ones included. One that was continued densely is no sparse rollout."""
        if not self.distiller.config.due(step):
            return dict(self.measured)
        rerolled = batch.rerolled or [False] * len(batch.rollouts)
        chosen = self._chosen(step, batch)
        rows = [i for i in range(len(batch.rollouts)) if chosen[i] and not rerolled[i] and len(batch.rollouts[i])]
        if not rows and not self.distiller.world.is_distributed:  # all of them were continued densely
            return dict(self.measured)
        rollouts = [batch.rollouts[i] for i in rows]
        teacher = [Scores(batch.dense[i]) for i in rows] if batch.dense else None
        metrics = self.distiller.step(rollouts, advantages[rows], teacher)
        for rollout in batch.rollouts:
            rollout.history = None
        del metrics["time"]
        return {f"distill/{name}": value for name, value in metrics.items()} | self.measured

    def _chosen(self, step: int, batch: "RolloutBatch") -> list[bool]:
        if self.collector.sparsity.evict is not None:
            return [rollout.history is not None for rollout in batch.rollouts]
        groups = self.distiller.chosen(batch.groups, step)
        return [chosen for chosen in groups for _ in range(batch.n)]

    def publish(self) -> None:
        """Merge φ into the engine's weights: after every change of φ or θ."""
        self.engine.update_sparse_adapter(self.distiller.adapter())

    def balance(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What φ costs: its share of the step's other time. After the move, what it wins: rollout speed against that
        of all steps before."""
        speed, rollout, distil = (metrics[name] for name in ("speed/tokens_per_s", "time/rollout", "time/distill"))
        found = {"speed/distill_cost": distil / max(metrics["time/step"] - distil, 1e-9)}
        tokens, seconds = self.before_move
        if not self.moved:
            self.before_move = [tokens + speed * rollout, seconds + rollout]
        elif tokens:
            found["speed/sparser"] = speed * seconds / tokens
        return found

    # -- going sparser ------------------------------------------------------------------------------------

    def move_due(self, step: int) -> bool:
        return self.move is not None and not self.moved and step > self.checked and self.move.due(step)

    def try_move(self, step: int, sampling: Sampling) -> str:
        """Measure the candidate and move to it where the tail allows or the plan says so; what happened, in words."""
        move = self.move
        assert move is not None
        assert self.candidate is not None
        rollouts = self.collector.generate(
            self.prompts, sampling, self.candidate, record=self.candidate.evict is not None
        )
        with self.engine.asleep():
            found = self._joined(rollouts)
        tails = found.tails(move.width)
        self.checked, self.moved = step, move.allowed(step, tails)
        self.measured = {"distill/candidate_tail": found.tail, "distill/candidate_mean": found.mean}
        if self.moved:
            self._adopt()
        known = f"confidently at least {least(tails):.3f} at every length" if tails.enough.any() else "of few prompts"
        return f"{self.candidate.describe()}: tail {found.tail:.3f}, {known}; " + (
            "the run moves to it." if self.moved else f"the run stays (tau={move.tau})."
        )

    def _joined(self, rollouts: list[Rollout]) -> Acceptance:
        """The measurements of all ranks."""
        world = self.distiller.world
        mine = self.distiller.measure(rollouts) if rollouts else None
        found = [(rank, one) for rank, one in enumerate(world.all_gather(mine)) if one is not None]
        tokens = np.array([len(one.alpha) for _, one in found])
        return Acceptance(
            np.concatenate([one.alpha for _, one in found]),
            np.concatenate([one.positions for _, one in found]),
            np.concatenate([one.prompts * world.size + rank for rank, one in found]),
            float(np.average([one.kl for _, one in found], weights=tokens)),
        )

    def _adopt(self) -> None:
        assert self.candidate is not None
        self.collector.monitor.move(self.candidate)

    # -- checkpoints --------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        return self.distiller.tensors()

    def state(self) -> dict[str, Any]:
        own = {
            "divergences": [*self.divergences],
            "moved": self.moved,
            "checked": self.checked,
            "measured": self.measured,
            "before_move": self.before_move,
        }
        return own | {"distiller": self.distiller.state()}

    def resume(self, state: Mapping[str, Any]) -> None:
        self.distiller.resume(state["distiller"])
        self.moved, self.checked, self.measured = state["moved"], state["checked"], dict(state["measured"])
        self.before_move, self.divergences = state["before_move"], list(state.get("divergences", ()))
        if self.moved:
            self._adopt()
