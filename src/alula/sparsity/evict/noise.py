"""Random words of an eviction: a counter of the rollout, so that no draw depends on the batch."""

import torch
from torch import Tensor

from alula.ops.sample import philox
from alula.sparsity.evict.base import Cached

EVICTIONS_FROM = 3 << 30
"""Counters of evictions begin here; those of the sampler at the same position end below."""


def words(kv: Cached, count: int) -> Tensor:
    """int64 [R, count] in [0, 2³²): Philox4x32-10 under the rollout's key.

    The counter holds the sequence's length and the layer's entries, four words to a call. An eviction of the same
    rollout at the same length always draws the same words, in any batch and on any device.
    """
    assert kv.row_keys is not None
    assert kv.position is not None
    calls = -(-count // 4)
    layer = torch.arange(len(kv.row_keys), device=kv.row_keys.device) % kv.layers
    counter = EVICTIONS_FROM + layer[:, None] * calls + torch.arange(calls, device=layer.device)
    drawn = philox(kv.row_keys[:, None], kv.position[:, None], counter)
    return torch.stack(drawn, -1).flatten(1)[:, :count]
