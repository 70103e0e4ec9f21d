"""Random eviction: the control that every method must beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from alula.sparsity.evict.base import Cached, Evictor


@dataclass(frozen=True)
class Random(Evictor):
    """score_j = uniform in [0, 1), a hash of (rollout, layer, KV head, slot, length)

    Counter-based: the same rollout evicts the same tokens again, in any batch and on any device, and torch's
    own generators are neither read nor moved.
    """

    seeded = True

    def score(self, kv: Cached) -> Tensor:
        assert kv.row_keys is not None
        assert kv.position is not None
        rows, heads, n = kv.shape
        device = kv.row_keys.device
        counter = mix(kv.row_keys) ^ kv.position
        counter = mix(counter) ^ (torch.arange(rows, device=device) % kv.layers)
        counter = mix(counter)[:, None] ^ torch.arange(heads, device=device)
        counter = mix(counter)[..., None] ^ torch.arange(n, device=device)
        return shift(mix(counter), 40).float() * 2**-24


def mix(x: Tensor) -> Tensor:
    """SplitMix64 (Steele et al., 2014) on int64, whose products wrap as unsigned ones do."""
    x = x - 0x61C8864680B583EB  # + 0x9E3779B97F4A7C15
    x = (x ^ shift(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ shift(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ shift(x, 31)


def shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
