"""DistillSparse's settings, free of torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from alula.errors import require, unknown

LossTerm = Literal["both", "policy", "divergence"]
Divergence = Literal["kl", "topk-kl", "sampled-kl", "overlap"]
Teacher = Literal["after", "before"]


@dataclass(frozen=True)
class DistillConfig:
    """Training of φ, a LoRA that only the sparse rollout uses: L = L_policy + weight · D(sparse ‖ dense)."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("all",)
    """Linear layers with an adapter, by the last part of their name (q_proj, ...), or `all` of them but the head."""
    seed: int = 0
    """Of the adapter's first values and of which prompts are distilled."""
    loss: LossTerm = "both"
    """`policy`: the clipped objective of the sparse policy against its own recorded log-probs; `divergence`; `both`."""
    divergence: Divergence = "kl"
    """`kl`: KL(sparse ‖ dense) over the whole vocabulary; `topk-kl`: over the teacher's `top_k` tokens and the rest as
    one; `sampled-kl`: ½ (log q − log p)² of the sampled tokens (k2); `overlap`: 1 − α."""
    top_k: int = 64
    weight: float = 1.0
    """λ, of the divergence."""
    teacher: Teacher = "after"
    """The dense policy after θ's update (one more forward pass), or before it, from the scores already taken: those
    hold single tokens and top-K lists, so `before` goes with `sampled-kl` and `topk-kl`."""
    lr: float = 1e-4
    max_grad_norm: float | None = 1.0
    minibatches: int = 1
    """Optimizer steps that the rollouts of a training step are shared out to."""
    every: int = 1
    """Distil at every so many training steps."""
    fraction: float = 0.25
    """Share of a step's prompts whose rollouts are distilled; only theirs are recorded."""
    token_budget: int = 16384
    """Tokens per micro-batch, prompts included."""
    chunk: int = 1024
    """Positions whose logits, of both policies, exist at one time."""
    activation_checkpointing: bool = True
    compile: bool | None = None
    """Compile the decoder layers; None: on a GPU."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        for setting, kind in (("loss", LossTerm), ("divergence", Divergence), ("teacher", Teacher)):
            if getattr(self, setting) not in get_args(kind):
                raise unknown(f"value of distill.{setting}", getattr(self, setting), get_args(kind))
        for setting in ("rank", "top_k", "minibatches", "every", "token_budget", "chunk"):
            value = getattr(self, setting)
            require(value >= 1, f"distill.{setting}={value}: must be at least 1.")
        for setting in ("alpha", "lr"):
            require(getattr(self, setting) > 0, f"distill.{setting}={getattr(self, setting)}: must be above 0.")
        require(len(self.targets) > 0, "distill.targets: an empty list; name layers, or all.")
        require(self.weight >= 0, f"distill.weight={self.weight}: must be 0 or above.")
        require(0 < self.fraction <= 1, f"distill.fraction={self.fraction}: must lie in (0, 1].")
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"distill.max_grad_norm={self.max_grad_norm}: must be above 0, or null for no clipping.",
        )
        require(
            self.teacher == "after" or not self.whole_vocabulary,
            f"distill.teacher=before with divergence={self.divergence}: the scores taken before the update hold no "
            "whole distribution; use topk-kl or sampled-kl, or teacher=after.",
        )

    @property
    def whole_vocabulary(self) -> bool:
        """Whether the divergence needs the teacher's whole distribution."""
        return self.loss != "policy" and self.divergence in ("kl", "overlap")

    @property
    def asks_teacher_now(self) -> bool:
        """Whether the dense policy is run beside the sparse one."""
        return self.loss != "policy" and self.teacher == "after"

    def due(self, step: int) -> bool:
        """Whether training step `step`, counted from 1, distils."""
        return step % self.every == 0
