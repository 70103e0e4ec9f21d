"""A run as one tree of settings: a YAML file, and `key=value` overrides on top (see `alula.config.load`).

Checks that need a registry or several sections are here. The text of every setting is its documentation;
docs/training.md lists them all.
"""

from pydantic import model_validator

from alula.config.settings import (
    CheckpointSettings,
    ControlSettings,
    Count,
    DataSettings,
    DistillSettings,
    EngineSettings,
    EvalSettings,
    LearnerSettings,
    LoggingSettings,
    ModelSettings,
    MonitorSettings,
    MoveSettings,
    RewardSettings,
    SamplingSettings,
    Section,
)
from alula.errors import require, unknown
from alula.mismatch.tail import MIN_PROMPTS
from alula.objective.settings import Correction, Loss, ObjectiveSettings
from alula.rewards.scoring import distinct
from alula.sparsity.policy import DENSE, Sparsity


class RunConfig(Section):
    out: str
    """The run's folder."""
    steps: Count = 100
    """Batches of rollouts to train on."""
    seed: int = 0
    """Seed for data order, rollouts, mini-batches and random weights."""
    model: ModelSettings
    """What is trained."""
    data: DataSettings
    """What it is trained on."""
    rewards: RewardSettings
    """What an answer is worth."""
    sparsity: Sparsity = DENSE
    """Which part of the KV cache rollouts keep or read: these settings, or one text such as `rkv:512+128` or `dense`;
    by default dense."""
    sampling: SamplingSettings = SamplingSettings()
    """How rollouts are drawn."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """What is optimized."""
    learner: LearnerSettings = LearnerSettings()
    """How it is optimized."""
    distill: DistillSettings | None = None
    """Pull the sparse policy towards the dense one while training (DistillSparse)."""
    engine: EngineSettings = EngineSettings()
    """Memory and speed of the rollouts."""
    eval: EvalSettings = EvalSettings()
    """Held-out evaluation."""
    monitor: MonitorSettings = MonitorSettings()
    """How the mismatch is watched."""
    control: ControlSettings = ControlSettings()
    """What is done when it grows."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """What survives."""
    logging: LoggingSettings = LoggingSettings()
    """What is written down."""

    @property
    def loss(self) -> Loss:
        return self.objective

    @property
    def correction(self) -> Correction:
        return self.objective.correction

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the run."""
        return self.steps * self.learner.updates

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        """Refuse what means nothing together, before anything is loaded."""
        one_update, updates = self.objective.one_update, self.learner.updates
        require(
            not one_update or updates == 1,
            f"objective.one_update=true with learner.updates={updates}: after the first update the old log-probs "
            "are gone; set learner.updates=1 or objective.one_update=false.",
        )
        unit = self.sampling.prompts * (self.sampling.n if self.learner.minibatch == "rollouts" else 1)
        require(
            updates <= unit,
            f"learner.updates={updates}: a step has only {unit} {self.learner.minibatch} to share out; lower it, or "
            "raise sampling.prompts.",
        )
        self.learner.check_decay(self.total_updates)
        names = distinct([term.name for term in self.rewards.use])
        if self.rewards.correct is not None and self.rewards.correct not in names:
            raise unknown("reward that decides correctness: rewards.correct", self.rewards.correct, names)
        asked = sorted(self.control.model_fields_set - {"enabled"})
        require(
            not asked or "enabled" in self.control.model_fields_set,
            f"control.{', control.'.join(asked)} without control.enabled: nothing is controlled; set "
            "control.enabled=true.",
        )
        if self.distill is not None:
            self._check_distill(self.distill)
        return self

    def policies(self) -> list[Sparsity]:
        """What the run samples with, and what it may move to."""
        move = self.distill.move if self.distill else None
        return [self.sparsity, *([Sparsity.parse(move.sparsity)] if move else [])]

    def _check_distill(self, distill: DistillSettings) -> None:
        sparsity = self.sparsity
        require(not sparsity.dense, "distill: the rollouts are dense; set a sparsity.")
        require(
            distill.first is None or distill.weight > 0,
            "distill.first trains on the KL alone, which distill.weight=0 switches off; raise distill.weight.",
        )
        require_one_part(sparsity, "distill")
        require(
            distill.move is None or not self.control.enabled,
            "distill.move and control.enabled both choose the budgets; use one of them.",
        )
        if distill.move is not None:
            self._check_move(distill.move)

    def _check_move(self, move: MoveSettings) -> None:
        candidate, present = Sparsity.parse(move.sparsity), self.sparsity
        said = f"distill.move.sparsity={move.sparsity}"
        require(not candidate.dense, f"{said}: the run moves to a sparser policy; name one with a smaller budget.")
        require_one_part(candidate, said)
        for wanted, now in ((candidate.evict, present.evict), (candidate.select, present.select)):
            if wanted and now and wanted.method == now.method:
                fixed = isinstance(wanted.budget, int) and isinstance(now.budget, int)
                require(
                    not fixed or wanted.budget < now.budget,  # type: ignore[operator]
                    f"{said}: no sparser than the run's own budget of {now.budget}; name a smaller one.",
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


def require_one_part(sparsity: Sparsity, said: str) -> None:
    require(
        sparsity.evict is None or sparsity.select is None,
        f"{said}: an evictor and a selector together cannot be replayed by the learner; use one of them.",
    )
