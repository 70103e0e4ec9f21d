"""A run as one tree of settings: a YAML file, and `key=value` overrides on top (see `alula.config.load`).

Checks that need a registry or several sections are here. The text of every setting is its documentation;
docs/training.md lists them all.
"""

import os
from typing import Annotated

from pydantic import AfterValidator, model_validator

from alula.data.load import training_split
from alula.environments.registry import is_replayable
from alula.errors import in_section, require, unknown
from alula.mismatch.tail import MIN_PROMPTS
from alula.objective.settings import ObjectiveSettings
from alula.rewards.scoring import distinct
from alula.section import Section
from alula.settings import (
    CheckpointSettings,
    ControlSettings,
    Count,
    DataSettings,
    DistillSettings,
    EngineSettings,
    EnvironmentSettings,
    EvalSettings,
    LearnerSettings,
    LoggingSettings,
    ModelSettings,
    MonitorSettings,
    MoveSettings,
    RewardSettings,
    RolloutSettings,
    SamplingSettings,
    Seed,
)
from alula.sparsity.policy import DENSE, Sparsity


class RunConfig(Section):
    out: Annotated[str, AfterValidator(os.path.expanduser)]
    """The run's folder."""
    steps: Count = 100
    """Batches of rollouts to train on."""
    seed: Seed = 0
    """Seed for data order, rollouts, mini-batches and random weights."""
    model: ModelSettings
    """The model to train."""
    data: DataSettings
    """Training data and prompt format."""
    environment: EnvironmentSettings | None = None
    """An environment that answers the policy's turns, such as a tool; by default an answer is a single turn."""
    rewards: RewardSettings
    """Rewards of the answers."""
    sparsity: Sparsity = DENSE
    """Which part of the KV cache rollouts keep or read: these settings, or one text such as `rkv:512+128` or `dense`;
    by default dense."""
    sampling: SamplingSettings = SamplingSettings()
    """Sampling of the rollouts."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """Loss, advantages and correction."""
    learner: LearnerSettings = LearnerSettings()
    """Optimizer and learning-rate schedule."""
    distill: DistillSettings | None = None
    """Distillation of the dense policy into the sparse one during training (DistillSparse)."""
    engine: EngineSettings = EngineSettings()
    """Memory and speed of the rollouts."""
    rollouts: RolloutSettings = RolloutSettings()
    """Where rollouts are generated: here, or on a Ray cluster."""
    eval: EvalSettings = EvalSettings()
    """Held-out evaluation."""
    monitor: MonitorSettings = MonitorSettings()
    """Measurement of the mismatch between sparse and dense policy."""
    control: ControlSettings = ControlSettings()
    """Reaction to a growing mismatch."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints."""
    logging: LoggingSettings = LoggingSettings()
    """Logging of metrics and completions."""

    @property
    def page(self) -> int:
        """KV tokens per page."""
        return self.sparsity.page(self.engine.page)

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the run."""
        return self.steps * self.learner.updates

    def most_sampled(self, max_new_tokens: int | None = None) -> int:
        """Most sampled tokens of a rollout, where a turn has at most `max_new_tokens` (default: those of training)."""
        turn = max_new_tokens or self.sampling.max_new_tokens
        env = self.environment
        return turn if env is None else min(env.max_turns * turn, env.max_tokens - 1)

    def most_generated(self, prompt: int, max_new_tokens: int | None = None) -> int:
        """Most tokens that follow a prompt of this length, the environment's included."""
        if self.environment is None:
            return self.most_sampled(max_new_tokens)
        return max(1, self.environment.max_tokens - prompt)

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        """Reject sections that do not go together, before anything is loaded."""
        updates = self.learner.updates
        unit = self.sampling.prompts * (self.sampling.n if self.learner.minibatch == "rollouts" else 1)
        require(
            updates <= unit,
            f"learner.updates={updates}: must be at most {unit} (the {self.learner.minibatch} of a step); lower it, or "
            "raise sampling.prompts.",
        )
        self.learner.check_decay(self.total_updates)
        block = "sparsity.select.block" if self.sparsity.select else "engine.page"
        require(self.page.bit_count() == 1, f"{block}={self.page}: use a power of two, such as 16.")
        names = distinct([term.name for term in self.rewards.use])
        if self.rewards.correct is not None and self.rewards.correct not in names:
            raise unknown("reward that decides correctness: rewards.correct", self.rewards.correct, names)
        given = sorted(self.control.model_fields_set - {"enabled"})
        require(
            not given or "enabled" in self.control.model_fields_set,
            f"control.{', control.'.join(given)} without control.enabled: nothing is controlled; set "
            "control.enabled=true.",
        )
        if self.distill is not None:
            self._check_distill(self.distill)
        require(
            self.environment is not None or "environment" not in names,
            "rewards.use names the environment's reward, but the run has no environment; set environment.use.",
        )
        if self.environment is not None and self.objective.correction.reroll:
            require(
                is_replayable(self.environment.use),
                f"objective.correction={self.objective.correction.preset} rerolls, which replays the environment, and "
                f"environment.use={self.environment.use!r} does not say that it can be (replayable = True); use "
                "another correction, such as strict.",
            )
        self._check_rollouts(self.rollouts)
        training_split(self.data)
        return self

    def _check_rollouts(self, rollouts: RolloutSettings) -> None:
        given = [name for name, value in rollouts if value != getattr(RolloutSettings(), name)]
        require(
            rollouts.backend == "ray" or not given,
            f"rollouts.{given[0] if given else ''} without rollouts.backend=ray: a local engine has no workers, and "
            "generates by turns with the learner; set rollouts.backend=ray.",
        )
        require(
            rollouts.min_workers <= rollouts.workers,
            f"rollouts.min_workers={rollouts.min_workers}: there are only rollouts.workers={rollouts.workers}.",
        )
        require(
            not rollouts.stale or not self.sampling.dynamic,
            f"rollouts.stale={rollouts.stale} with sampling.dynamic: how many prompts a step draws is known only after "
            "its rewards; set rollouts.stale=0, or sampling.dynamic=false.",
        )
        require(
            not rollouts.stale or not rollouts.colocated,
            f"rollouts.stale={rollouts.stale} with rollouts.colocated: workers that generate while the learner learns "
            "need GPUs of their own; set rollouts.stale=0, or rollouts.colocated=false.",
        )

    def policies(self) -> list[Sparsity]:
        """The sparse policy that the run starts with, and the one that it may move to."""
        move = self.distill.move if self.distill else None
        return [self.sparsity, *([Sparsity.parse(move.sparsity)] if move else [])]

    def _check_distill(self, distill: DistillSettings) -> None:
        require(not self.sparsity.dense, "distill: the rollouts are dense; set a sparsity.")
        require(
            self.environment is None,
            "distill with an environment: distillation over several turns is not supported; leave out one of them.",
        )
        require(
            distill.first is None or distill.weight > 0,
            "distill.first trains on the KL alone, which distill.weight=0 switches off; raise distill.weight.",
        )
        require_one_part(self.sparsity, "distill")
        require(
            distill.move is None or not self.control.enabled,
            "distill.move and control.enabled both choose the budgets; use one of them.",
        )
        if distill.move is not None:
            self._check_move(distill.move)

    def _check_move(self, move: MoveSettings) -> None:
        setting, present = f"distill.move.sparsity={move.sparsity}", self.sparsity
        with in_section("distill.move.sparsity", setting):
            candidate = Sparsity.parse(move.sparsity)
        require(not candidate.dense, f"{setting}: the run moves to a sparser policy; name one with a smaller budget.")
        require_one_part(candidate, setting)
        for wanted, now in ((candidate.evict, present.evict), (candidate.select, present.select)):
            if wanted and now and wanted.method == now.method:
                fixed = isinstance(wanted.budget, int) and isinstance(now.budget, int)
                require(
                    not fixed or wanted.budget < now.budget,  # type: ignore[operator]
                    f"{setting}: not sparser than the run's budget of {now.budget}; name a smaller one.",
                )
        fewest = MIN_PROMPTS if move.at is None else 2
        require(
            move.prompts >= fewest,
            f"distill.move.prompts={move.prompts}: the tail's confidence interval needs at least {fewest}; raise it.",
        )
        require(
            move.at is None or move.at <= self.steps,
            f"distill.move.at={move.at}: the run ends after steps={self.steps}; move earlier.",
        )


def require_one_part(sparsity: Sparsity, setting: str) -> None:
    require(
        sparsity.evict is None or sparsity.select is None,
        f"{setting}: an evictor and a selector together cannot be replayed by the learner; use one of them.",
    )
