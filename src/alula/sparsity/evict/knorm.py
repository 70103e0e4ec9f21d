"""Knorm: keeps keys of small norm."""

from dataclasses import dataclass

import torch
from torch import Tensor

from alula.sparsity.evict.base import Cached, Evictor


@dataclass(frozen=True)
class Knorm(Evictor):
    """score_j = −‖k_j‖

    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv 2406.11430).
    """

    def score(self, kv: Cached) -> Tensor:
        return -torch.linalg.vector_norm(kv.keys, dim=-1, dtype=torch.float32)
