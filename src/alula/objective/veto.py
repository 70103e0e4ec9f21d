"""Vetoed rollouts, as in Sparse-RL (arXiv 2601.10079): those with a token that is very unlikely under the dense policy.

    vetoed = some t has ξ_t = p_dense(o_t) / q_sparse(o_t) < 1e-4

The tail of acceptance is a percentile over tokens. It misses one bad token in a hundred, which may be enough to break
an answer. Among runs with the same tail, those with many vetoed rollouts collapsed (docs/results/threshold.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the report reads the thresholds, and comes without torch
    from torch import Tensor

    from alula.engine.rollout import Rollout, Scores

REFERENCE_VETO = 1e-4
"""Sparse-RL's threshold: used by the veto rates if the correction has no veto."""
TOO_MANY = 0.15
"""Share of vetoed rollouts above which a run warns; Sparse-RL's stable run averaged 7 %."""

Z2 = 1.959964**2
"""Squared normal quantile of a 95 % interval."""


def below_veto(log_ratio: "Tensor", veto: float | None = None) -> "Tensor":
    """bool, shaped as log ξ: tokens with ξ < veto (default: Sparse-RL's threshold)."""
    return log_ratio < math.log(REFERENCE_VETO if veto is None else veto)


def vetoed(rollout: "Rollout", dense: "Scores") -> bool:
    """Whether the rollout is vetoed; `dense` holds its tokens' log-probs under the dense policy."""
    assert rollout.logprobs is not None
    sampled = rollout.sampled
    return bool(below_veto(dense.logprobs.cpu()[sampled] - rollout.logprobs.cpu()[sampled]).any())


@dataclass(frozen=True)
class Share:
    """A proportion with Wilson's 95 % interval (JASA 22, 1927)."""

    count: int
    of: int
    samples: int = 1
    """Rollouts per prompt. They are correlated, so the interval counts them as one."""

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
        """Number of prompts whose interval would exclude `limit` at the same share; None if the share is the limit."""
        apart = (self.value - limit) ** 2
        return math.floor(Z2 * limit * (1 - limit) / apart) + 1 if apart else None
