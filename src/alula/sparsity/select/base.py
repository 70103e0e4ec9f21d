"""The interface of a selector."""

from typing import ClassVar

from torch import Tensor


class Selector:
    """A method that scores the pages of the KV cache for every query, from a summary of each page's keys.

    All KV is kept. Per layer and KV head, each decode step reads the pages with the highest scores
    (`alula.ops.select_pages`). Hq = G · Hkv query heads share Hkv KV heads in groups of G.
    """

    vectors: ClassVar[int]
    """Vectors [head_dim] in the summary of a page."""
    fused: ClassVar[bool] = False
    """Whether the Triton kernels of `ops.append` and `ops.select_pages` compute it; they choose by `vectors`.
    Otherwise `summarise` and `score` run on the GPU as they are, which is slower."""

    def summarise(self, keys: Tensor) -> Tensor:
        """The summaries [..., vectors, D] of pages of keys [..., tokens, D]."""
        raise NotImplementedError

    def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
        """fp32 [B, Hkv, W], higher = read: queries fp32 [B, Hkv, G, D], summaries fp32 [B, W, Hkv, vectors, D]."""
        raise NotImplementedError

    def query_parts(self, queries: Tensor) -> tuple[Tensor, ...]:
        """`score` as a scalar product: Σ_v mean_group(part_v) · summary_v, with one part [..., D] per vector.

        The learner replays a selector in this form (`alula.distill.attention`).
        """
        raise NotImplementedError
