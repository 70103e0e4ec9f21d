"""Which rollouts Sparse-RL would reject (arXiv 2601.10079): those with a token that the dense policy hardly has.

    vetoed = some t has ξ_t = p_dense(o_t) / q_sparse(o_t) < 1e-4

A percentile over tokens, as the tail of acceptance is, does not see one spoilt token in a hundred, and one may spoil
an answer. Of runs with the same tail those with many vetoed rollouts collapsed (docs/results/threshold.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the report reads the thresholds, and comes without torch
    from torch import Tensor

    from alula.engine.rollout import Rollout, Scores

REFERENCE_VETO = 1e-4
"""Sparse-RL's threshold: what the veto rates count under a correction that has no veto of its own."""
TOO_MANY = 0.15
"""Share of vetoed rollouts that a run warns of; Sparse-RL's stable run averaged 7 %."""

Z2 = 1.959964**2
"""Of a 95 % interval."""


def below_veto(log_ratio: "Tensor", veto: float | None = None) -> "Tensor":
    """bool, as log ξ: the tokens with ξ < veto, Sparse-RL's own where there is none."""
    return log_ratio < math.log(REFERENCE_VETO if veto is None else veto)


def vetoed(rollout: "Rollout", dense: "Scores") -> bool:
    """`dense`: the same tokens' log-probs under the dense policy."""
    assert rollout.logprobs is not None
    return bool(below_veto(dense.logprobs.cpu() - rollout.logprobs.cpu()).any())


@dataclass(frozen=True)
class Share:
    """So many of so many, with Wilson's 95 % interval (JASA 22, 1927)."""

    count: int
    of: int
    samples: int = 1
    """Rollouts of one prompt: they are alike, so in the interval they are worth one."""

    @classmethod
    def vetoed(cls, rollouts: "Sequence[Rollout]", dense: "Sequence[Scores]", samples: int) -> "Share":
        return cls(sum(map(vetoed, rollouts, dense)), len(rollouts), samples)

    @property
    def value(self) -> float:
        return self.count / self.of

    @property
    def interval(self) -> tuple[float, float]:
        n, count = self.of / self.samples, self.count / self.samples
        middle = (count + Z2 / 2) / (n + Z2)
        half = math.sqrt(Z2 * (count * (n - count) / n + Z2 / 4)) / (n + Z2)
        return max(0.0, middle - half), min(1.0, middle + half)

    def prompts_to_tell_from(self, limit: float) -> int | None:
        """Prompts whose interval would not hold `limit`, if the share stays; None where it is the limit."""
        apart = (self.value - limit) ** 2
        return math.floor(Z2 * limit * (1 - limit) / apart) + 1 if apart else None
