"""KeyDiff: keeps keys that differ from the mean direction of all keys."""

from dataclasses import dataclass

from torch import Tensor

from alula.ops.rkv_score import alignment
from alula.sparsity.evict.base import Cached, Evictor


@dataclass(frozen=True)
class KeyDiff(Evictor):
    """score_j = −cos(k_j, a),  a = mean_i k_i / ‖k_i‖

    Source: KeyDiff (arXiv 2504.15364), as kvpress computes it.
    """

    def score(self, kv: Cached) -> Tensor:
        aligned = alignment(kv.keys.flatten(0, 1))
        # Σ_j k̂_j · Σ_i k̂_i is the squared length of the anchor.
        length = aligned.sum(-1, keepdim=True).clamp_min(1e-12).sqrt()
        return (-aligned / length).view(kv.shape)
