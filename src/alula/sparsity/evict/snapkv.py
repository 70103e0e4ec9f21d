"""SnapKV while decoding: keeps the tokens that the last queries attend to."""

from dataclasses import dataclass

from torch import Tensor

from alula.ops.importance import importance
from alula.sparsity.evict.base import Cached, Evictor, require_pooling


@dataclass(frozen=True)
class SnapKV(Evictor):
    """score_j = maxpool(mean over the last `window` queries of softmax_j(max over the group of q·k_j/√d))

    The softmax excludes the keys of the window. This is R-KV's decoding variant of SnapKV: R-KV with
    mix = 1. Source: SnapKV (arXiv 2404.14469); R-KV (arXiv 2505.24133) for the variant.

    kernel: width of the max-pooling over neighbouring tokens.
    """

    kernel: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        require_pooling(self.kernel)

    @property
    def queries(self) -> int:
        return self.window

    def score(self, kv: Cached) -> Tensor:
        assert kv.queries is not None
        return importance(kv.queries, kv.paged, kv.scaling, self.window, self.kernel)
