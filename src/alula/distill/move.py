"""When a run may move to a sparser policy: the tail is measured at that policy, not guessed from the present one."""

from dataclasses import dataclass

from alula.errors import require
from alula.mismatch.tail import MIN_PROMPTS, Tail


@dataclass(frozen=True)
class Move:
    """A sparser policy that the run moves to once the sparse policy, φ included, is close enough to the dense one."""

    sparsity: str
    """The candidate, as one short text: `block-topk:512`, `rkv:256+64`, `block-topk:qwen3-4b-0.80`."""
    tau: float = 0.86
    """The least tail of acceptance, measured at the candidate."""
    at: int | None = None
    """Move at this training step whatever the tail, which is measured all the same; None waits for the tail."""
    every: int = 20
    """Measure the candidate at every so many training steps."""
    prompts: int = 64
    """Held-out prompts of a measurement, one rollout each."""
    width: int = 2000
    """Length bins in which the tail must meet tau."""

    def __post_init__(self) -> None:
        require(0 < self.tau < 1, f"move.tau={self.tau}: must lie between 0 and 1.")
        require(self.at is None or self.at >= 1, f"move.at={self.at}: training steps count from 1.")
        require(self.every >= 1, f"move.every={self.every}: must be at least 1.")
        least = MIN_PROMPTS if self.at is None else 2
        require(self.prompts >= least, f"move.prompts={self.prompts}: the tail's interval needs at least {least}.")

    def due(self, step: int) -> bool:
        """Whether the candidate is measured after training step `step`."""
        return step == self.at or (self.at is None and step % self.every == 0)

    def allowed(self, step: int, measured: Tail) -> bool:
        """Whether to move after training step `step`."""
        return step == self.at or (self.at is None and meets(measured, self.tau))


def meets(measured: Tail, tau: float) -> bool:
    """Whether the tail is confidently at least tau: its lower bound is, in every bin with enough prompts."""
    return least(measured) >= tau


def least(measured: Tail) -> float:
    """The smallest lower bound of all bins with enough prompts; -inf where none has."""
    return float(measured.lower[measured.enough].min()) if measured.enough.any() else float("-inf")
