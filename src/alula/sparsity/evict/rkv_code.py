"""R-KV as Sparse-RL's released code applies it: heads are summed, and layer 0 decides for all layers."""

from dataclasses import dataclass, replace

from torch import Tensor

from alula.sparsity.evict.base import Cached
from alula.sparsity.evict.rkv import RKV


@dataclass(frozen=True)
class RKVCode(RKV):
    """score_j = Σ over KV heads of R-KV's score of key j in layer 0, for every head of every layer

    For comparison with the results of that code, which keys the kept set by request only: layer 0 cuts the cache, and
    no layer after it drops anything. Source: Sparse-RL (arXiv 2601.10079), released code.

    mix: weight of importance against redundancy.
    kernel: width of the max-pooling over neighbouring tokens.
    threshold: cosine similarity above which two keys are similar.
    """

    def score(self, kv: Cached) -> Tensor:
        assert kv.queries is not None
        first = replace(kv, paged=kv.paged.first_layer(), queries=kv.queries[:: kv.layers])
        summed = super().score(first).sum(1, keepdim=True)  # [C, 1, n]
        return summed.repeat_interleave(kv.layers, 0).expand(kv.shape).contiguous()
