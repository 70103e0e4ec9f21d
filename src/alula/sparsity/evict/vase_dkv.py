"""VaSE's variant for diverse keys and values: keeps the tokens that stand out in a few random directions."""

import math
from dataclasses import dataclass

from torch import Tensor

from alula.errors import require
from alula.ops.projected_norm import projected_norm
from alula.sparsity.evict.base import Cached, Evictor
from alula.sparsity.evict.noise import words


@dataclass(frozen=True)
class VaSEDKV(Evictor):
    """score_j = ‖k_j G‖² · ‖v_j G‖²,  G: `rank` columns of N(0, 1/`rank`), drawn anew in every eviction

    All heads of a layer share G. Its numbers come from the rollout's own counter. Source: VaSE (arXiv 2606.03928),
    its variant DKV, as its released code computes it (`cur_resample_gauss`, after kvpress's CUR); it needs no queries.

    rank: number of random directions.
    """

    rank: int = 20

    seeded = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rank >= 1, f"rank={self.rank}: must be at least one direction.")

    def score(self, kv: Cached) -> Tensor:
        directions = self.directions(kv)
        return projected_norm(kv.paged, directions) * projected_norm(kv.values, directions)

    def directions(self, kv: Cached) -> Tensor:
        """fp32 [R, D, rank]: G of every sequence and layer, by Box and Muller's transform."""
        dim = kv.paged.pool.shape[-1]
        uniform = (words(kv, 2 * dim * self.rank).float() + 0.5) * 2.0**-32
        radius, angle = uniform.view(-1, 2, dim, self.rank).unbind(1)
        normal = (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()
        return normal * self.rank**-0.5
