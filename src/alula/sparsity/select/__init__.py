"""Selectors: what is kept about a page, and how a query scores it. The arithmetic is in `alula.ops.select_pages`.

A selector keeps every page and reads, per layer and KV head, the best-scored ones at every step.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Selector:
    summary_kinds: int
    """Vectors kept per page and head: 1 = the mean key, 2 = the channelwise minimum and maximum."""
    source: str


METHODS = {
    "block-topk": Selector(1, "Sparrow, arXiv 2606.08446: group-mean query · page-mean key"),
    "quest": Selector(2, "Quest, arXiv 2406.10774: Σ_d max(q_d·max_d, q_d·min_d), mean over the group"),
}
