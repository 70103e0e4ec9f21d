"""H2O: keeps the tokens that have received the most attention so far."""

from dataclasses import dataclass

from torch import Tensor

from alula.sparsity.evict.base import Cached, Evictor


@dataclass(frozen=True)
class H2O(Evictor):
    """score_j = Σ over all queries so far, and over the group, of softmax_j(q·k_j/√d)

    Prompt queries count. Each query's softmax runs over the tokens cached at that step, and a kept token keeps its
    sum. Under a selector, tokens that were not read count too: exp(q·k) over the sum of those read.
    Source: H2O (arXiv 2306.14048); its recent tokens are `window` here.
    """

    accumulates = True

    def score(self, kv: Cached) -> Tensor:
        assert kv.attention is not None
        return kv.attention
