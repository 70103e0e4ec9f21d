"""H2O: the tokens that have received most attention so far."""

from dataclasses import dataclass

from torch import Tensor

from alula.sparsity.evict.base import Cached, Evictor


@dataclass(frozen=True)
class H2O(Evictor):
    """score_j = Σ over all queries so far, and over the group, of softmax_j(q·k_j/√d)

    Prompt queries count; each query's softmax is over what was cached when it ran, and a kept token carries
    its sum on. Under a selector a token that was not read counts too: exp(q·k) over the sum of those read.
    Source: H2O (arXiv 2306.14048); its recent tokens are `window` here.
    """

    accumulates = True

    def score(self, kv: Cached) -> Tensor:
        assert kv.attention is not None
        return kv.attention
