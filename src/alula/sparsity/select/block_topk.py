"""block-topk: the mean query of the group against the mean key of the page."""

import torch
from torch import Tensor

from alula.sparsity.select.base import Selector


class BlockTopK(Selector):
    """score = (mean of the group's queries) · (mean of the page's keys). Source: Sparrow (arXiv 2606.08446)."""

    vectors = 1
    fused = True

    def summarise(self, keys: Tensor) -> Tensor:
        return keys.float().mean(-2, keepdim=True)

    def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
        return torch.einsum("bhd,bwhd->bhw", queries.mean(2), summaries[:, :, :, 0])

    def query_parts(self, queries: Tensor) -> tuple[Tensor, ...]:
        return (queries,)
