"""R-KV: keeps important tokens that no later token repeats."""

from dataclasses import dataclass

from torch import Tensor

from alula.errors import require
from alula.ops.importance import importance
from alula.ops.rkv_score import pool_and_mix, redundancy
from alula.sparsity.evict.base import Cached, Evictor, require_pooling


@dataclass(frozen=True)
class RKV(Evictor):
    """score_j = mix · importance_j − (1 − mix) · softmax_j(redundancy_j)

    importance is SnapKV's score (`alula.ops.importance`); redundancy_j is the mean cosine similarity of key j
    to the other keys of its head; every key's similarity to the last key similar to it is not counted
    (`alula.ops.rkv_score`). The softmax runs over all n keys. All in fp32, separately for each head of each
    sequence. Source: R-KV (arXiv 2505.24133); the paper's λ is `mix`.

    mix: weight of importance against redundancy. 0.1 in the paper, 0.07 in its code's class.
    kernel: width of the max-pooling over neighbouring tokens.
    threshold: cosine similarity above which two keys are similar.
    """

    mix: float = 0.1
    kernel: int = 7
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.mix <= 1, f"mix={self.mix}: must be between 0 (only redundancy) and 1 (only importance).")
        require_pooling(self.kernel)
        require(0 <= self.threshold < 1, f"threshold={self.threshold}: must be a cosine similarity in [0, 1).")

    @property
    def queries(self) -> int:
        return self.window

    def score(self, kv: Cached) -> Tensor:
        assert kv.queries is not None
        attention = importance(kv.queries, kv.paged, kv.scaling, self.window, kernel=1).flatten(0, 1)
        redundant = redundancy(kv.keys.flatten(0, 1), self.threshold).softmax(-1)
        return pool_and_mix(attention, redundant, self.kernel, self.mix).view(kv.shape)
