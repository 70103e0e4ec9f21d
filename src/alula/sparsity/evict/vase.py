"""VaSE: keeps the tokens with large values, and draws the others by the attention that they receive."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from alula.errors import require
from alula.ops.importance import importance
from alula.ops.sample import gumbel
from alula.ops.top_indices import top_indices
from alula.sparsity.evict.base import Cached, Evictor, require_pooling
from alula.sparsity.evict.noise import words

RESERVED = 1e30
"""The score of a token that is kept for its value: above every perturbed log-probability."""


@dataclass(frozen=True)
class VaSE(Evictor):
    """score_j = ∞ if max(v_j) − min(v_j) is among the `large` · budget largest, else log A_j + g_j

    A_j = avgpool(mean over the group and its last `window` queries of softmax_j(q·k_j/√d)), where the softmax and the
    reserved share exclude the window, and the share counts the sinks. g_j is Gumbel noise of the rollout's own counter:
    the best log A_j + g_j are a draw without replacement in proportion to A. Source: VaSE (arXiv 2606.03928), its
    variant AttnV, as its released code computes it; window = buffer = 64 there.

    large: share of the budget reserved for the largest values. The code has 1/4, and 1/2 for GSM8K.
    kernel: width of the average over neighbouring tokens.
    """

    large: float = 0.25
    kernel: int = 5

    seeded = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.large <= 1, f"large={self.large}: must be a share of the budget, between 0 and 1.")
        require_pooling(self.kernel)

    @property
    def queries(self) -> int:
        return self.window

    def score(self, kv: Cached) -> Tensor:
        assert kv.queries is not None
        _, heads, n = kv.shape
        # The query heads of a KV head, passed as further queries: the mean runs over them too.
        as_queries = kv.queries.unflatten(1, (heads, -1)).flatten(2, 3)
        attention = importance(as_queries, kv.paged, kv.scaling, self.window, kernel=1)
        if self.kernel > 1:
            attention = avg_pool1d(attention, self.kernel, stride=1, padding=self.kernel // 2)
        noise = gumbel(words(kv, heads * n)).view(kv.shape)
        drawn = attention.clamp_min(torch.finfo(torch.float32).tiny).log() + noise
        return drawn.scatter_(2, self.reserved(kv), RESERVED)

    def reserved(self, kv: Cached) -> Tensor:
        """int64 [R, Hkv, count]: the slots kept for their values."""
        values = kv.values.gathered[:, :, : kv.paged.n - self.window]
        size = values.amax(-1).float() - values.amin(-1).float()
        size[..., : kv.sinks] = torch.inf
        size[..., : kv.protected] = -torch.inf
        budget = kv.keep - kv.protected
        count = min(int(self.large * budget), budget - self.window)
        return top_indices(size.flatten(0, 1), count).view(*kv.shape[:2], count).long()
