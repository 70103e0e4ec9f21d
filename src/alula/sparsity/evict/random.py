"""Random eviction: the baseline that every method must beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from alula.ops.splitmix64 import logical_shift, splitmix64_tensor
from alula.sparsity.evict.base import Cached, Evictor


@dataclass(frozen=True)
class Random(Evictor):
    """score_j = uniform in [0, 1), a hash of (rollout, layer, KV head, slot, length)

    Counter-based: a rollout always evicts the same tokens, in any batch and on any device. The state of torch's
    generators is neither read nor changed.
    """

    seeded = True

    def score(self, kv: Cached) -> Tensor:
        assert kv.row_keys is not None
        assert kv.position is not None
        rows, heads, n = kv.shape
        device = kv.row_keys.device
        counter = splitmix64_tensor(kv.row_keys) ^ kv.position
        counter = splitmix64_tensor(counter) ^ (torch.arange(rows, device=device) % kv.layers)
        counter = splitmix64_tensor(counter)[:, None] ^ torch.arange(heads, device=device)
        counter = splitmix64_tensor(counter)[..., None] ^ torch.arange(n, device=device)
        return logical_shift(splitmix64_tensor(counter), 40).float() * 2**-24
