"""Acceptance of the sparse policy on given rollouts, and its tail."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alula.engine.rollout import Rollout
from alula.mismatch.tail import Tail, lower_quantile, tail

QUANTILE = 0.05


@dataclass
class Acceptance:
    """Flat and aligned: α of every generated token, its position (prompt + generated) and its prompt."""

    alpha: np.ndarray
    positions: np.ndarray
    prompts: np.ndarray
    kl: float
    """Mean of KL(sparse ‖ dense) over the tokens."""

    @classmethod
    def of(cls, rollouts: Iterable[Rollout], alpha: Iterable[Tensor], kl: Iterable[Tensor]) -> "Acceptance":
        rollouts = list(rollouts)
        positions = [len(r.prompt_ids) + np.arange(len(r)) for r in rollouts]
        prompts = [np.full(len(r), r.prompt_index) for r in rollouts]
        every = torch.cat([a.cpu() for a in alpha]).numpy()
        mean = float(torch.cat([k.cpu() for k in kl]).double().mean())
        return cls(every, np.concatenate(positions), np.concatenate(prompts), mean)

    @property
    def mean(self) -> float:
        return float(self.alpha.mean())

    @property
    def tail(self) -> float:
        """The 5th percentile over all tokens."""
        return lower_quantile(self.alpha, QUANTILE)

    def tails(self, width: int = 2000, bins: int | None = None) -> Tail:
        """The tail per length bin, with its interval over prompts."""
        return tail(self.alpha, self.positions, self.prompts, width=width, bins=bins, quantile=QUANTILE)

    def metrics(self) -> dict[str, float]:
        return {"acceptance_mean": self.mean, "acceptance_tail": self.tail, "kl": self.kl}
