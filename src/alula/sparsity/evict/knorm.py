"""Knorm: keeps keys of small norm."""

from dataclasses import dataclass

import torch
from torch import Tensor

from alula.sparsity.evict.base import Cached, Evictor

BITS = 10
"""Bits of the norm's significand that count: about three decimal digits."""


@dataclass(frozen=True)
class Knorm(Evictor):
    """score_j = −‖k_j‖, rounded to three significant digits

    Copies of one token have the same key in the first layer, rotated by their positions: equal norms up to rounding
    errors, which depend on the batch. Rounded, they tie, and the earlier copy stays whatever the batch.
    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv 2406.11430).
    """

    def score(self, kv: Cached) -> Tensor:
        norm = torch.linalg.vector_norm(kv.keys, dim=-1, dtype=torch.float32)
        significand, exponent = torch.frexp(norm)
        return -torch.ldexp((significand * 2**BITS).round(), exponent - BITS)
