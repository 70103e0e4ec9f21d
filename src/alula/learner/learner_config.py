"""The learner's settings, free of torch."""

from dataclasses import dataclass

from alula.errors import require, unknown
from alula.learner.learning_rate import DECAYS, Decay


@dataclass(frozen=True)
class LoRA:
    """Train low-rank updates of every linear layer (peft) instead of the weights themselves."""

    rank: int = 32
    alpha: float = 64.0
    seed: int = 0
    """Of the adapters' first values, which must agree on all ranks."""

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"lora.rank={self.rank}: must be at least 1.")
        require(self.alpha > 0, f"lora.alpha={self.alpha}: must be above 0.")


@dataclass(frozen=True)
class LearnerConfig:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None leaves them."""
    warmup_steps: int = 0
    decay: Decay = "constant"
    total_steps: int = 0
    """Optimizer steps of the whole run; what `decay` decays over."""
    min_lr_ratio: float = 0.0
    """Where the decay ends, as a share of `lr`."""
    token_budget: int = 16384
    """Tokens per micro-batch, prompts included; a longer sequence goes alone."""
    logprob_chunk: int = 2048
    """Positions whose logits exist at one time."""
    activation_checkpointing: bool = True
    """Keep only each layer's input and compute the rest again in the backward pass: a third more work."""
    compile: bool | None = None
    """Compile the decoder layer once and use it for all layers; None: on a single GPU."""
    reference: bool = False
    """Keep the initial policy for `score(reference=True)`: a frozen copy, or nothing at all under LoRA."""
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        require(self.lr > 0, f"lr={self.lr}: must be above 0.")
        require(all(0 <= beta < 1 for beta in self.betas), f"betas={self.betas}: both must lie in [0, 1).")
        require(self.eps > 0, f"eps={self.eps}: must be above 0.")
        require(self.weight_decay >= 0, f"weight_decay={self.weight_decay}: must be 0 or above.")
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"max_grad_norm={self.max_grad_norm}: must be above 0, or none for no clipping.",
        )
        require(self.warmup_steps >= 0, f"warmup_steps={self.warmup_steps}: must be 0 or above.")
        if self.decay not in DECAYS:
            raise unknown("decay", self.decay, DECAYS)
        require(
            self.decay == "constant" or self.total_steps > self.warmup_steps,
            f"decay={self.decay} needs total_steps above warmup_steps={self.warmup_steps}, "
            f"but it is {self.total_steps}.",
        )
        require(0 <= self.min_lr_ratio <= 1, f"min_lr_ratio={self.min_lr_ratio}: must lie in [0, 1].")
        require(self.token_budget >= 1, f"token_budget={self.token_budget}: must be at least 1.")
        require(self.logprob_chunk >= 1, f"logprob_chunk={self.logprob_chunk}: must be at least 1.")
