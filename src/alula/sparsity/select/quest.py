"""Quest: an upper bound of the attention logits inside a page."""

import torch
from torch import Tensor

from alula.sparsity.select.base import Selector


class Quest(Selector):
    """score = mean over the group of Σ_d max(q_d · max_d, q_d · min_d)

    min and max are the page's channelwise minimum and maximum, so the sum bounds q · k for each of its keys.
    Source: Quest (arXiv 2406.10774).
    """

    vectors = 2
    fused = True

    def summarise(self, keys: Tensor) -> Tensor:
        return torch.stack([keys.amin(-2), keys.amax(-2)], -2)

    def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
        low, high = summaries.unbind(3)
        bound = torch.maximum(queries[:, None] * low[:, :, :, None], queries[:, None] * high[:, :, :, None])
        return bound.sum(-1).mean(-1).transpose(1, 2)

    def query_parts(self, queries: Tensor) -> tuple[Tensor, ...]:
        """Σ_d max(q_d·max_d, q_d·min_d) = q⁻·min + q⁺·max, with q⁻ and q⁺ the negative and the positive part of q."""
        return queries.clamp(max=0), queries.clamp(min=0)
