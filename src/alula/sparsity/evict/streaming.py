"""StreamingLLM: keeps the sinks and the most recent tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from alula.sparsity.evict.base import Cached, Evictor


@dataclass(frozen=True)
class Streaming(Evictor):
    """score_j = j

    Keeps the sinks and the newest budget − sinks tokens. Source: StreamingLLM (arXiv 2309.17453), but keys
    keep their original positions, as in Sparse-RL and kvpress; the original rotates them by cache slot.
    """

    def score(self, kv: Cached) -> Tensor:
        rows, heads, n = kv.shape
        return torch.arange(n, dtype=torch.float32, device=kv.paged.pool.device).expand(rows, heads, n).contiguous()
