"""TOVA: keeps the tokens that the newest query attends to, averaged over all heads."""

from dataclasses import dataclass

from torch import Tensor

from alula.ops.importance import importance
from alula.sparsity.evict.base import Cached, Evictor


@dataclass(frozen=True)
class TOVA(Evictor):
    """score_j = mean over all query heads of softmax_j(q_last·k_j/√d)

    All heads of a layer keep the same tokens. Source: TOVA (arXiv 2401.06104), which evicts at every step
    and protects nothing; here it runs at the common trigger.
    """

    @property
    def queries(self) -> int:
        return 1

    def score(self, kv: Cached) -> Tensor:
        assert kv.queries is not None
        kv_heads = kv.shape[1]
        # The query heads of a KV head, passed as separate queries with a group size of one.
        as_queries = kv.queries.squeeze(2).unflatten(1, (kv_heads, -1))
        per_head = importance(as_queries, kv.paged, kv.scaling, window=0, kernel=1)
        return per_head.mean(1, keepdim=True).expand(-1, kv_heads, -1).contiguous()
