"""Distillation before a run's first step: what it takes."""

from dataclasses import dataclass, fields

from alula.errors import require


@dataclass(frozen=True)
class First:
    """φ alone is trained, on rollouts of the policy that the run begins with, while θ stands still."""

    steps: int = 20
    """Batches of rollouts."""
    prompts: int = 64
    """Prompts of a batch, one rollout each, over all ranks."""
    minibatches: int = 4
    """Optimizer steps that a batch is shared out to."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(value >= 1, f"distill.first.{field.name}={value}: must be at least 1.")
        require(
            self.minibatches <= self.prompts,
            f"distill.first.minibatches={self.minibatches}: a batch has only {self.prompts} rollouts to share out; "
            "lower it, or raise distill.first.prompts.",
        )
