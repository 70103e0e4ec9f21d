"""What the requests of one call need beside plain decoding: decides buffers and which graph is captured."""

from collections.abc import Iterable
from dataclasses import dataclass

from alula.engine.sequence import Request
from alula.errors import require
from alula.sparsity.evict import build
from alula.sparsity.schedule import Schedule
from alula.sparsity.select import METHODS as SELECTORS


@dataclass(frozen=True)
class Features:
    selector: str | None = None
    dense_layers: int = 0
    ring: int = 0
    """Recent queries kept for evictors."""
    accumulates: bool = False
    proposal: bool = False
    """Whether tokens are drawn from a cut distribution: top-p, top-k or min_new_tokens."""
    topk: int = 0
    teacher: bool = False
    """Whether forced tokens are compared with the dense policy's hidden states."""
    hidden: bool = False
    """Whether hidden states go to the host."""
    adapted: bool = False
    """Whether the sparse policy's own weights are used (`Engine(sparse_adapter=...)`)."""
    record_selected: bool = False
    schedule_bins: int = 1
    banned: int = 1

    @property
    def summary_kinds(self) -> int:
        return SELECTORS[self.selector].summary_kinds if self.selector else 0

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "Features":
        requests = list(requests)
        selects = {r.sparsity.select for r in requests if r.sparsity.select}
        kinds = {(s.method, s.dense_layers) for s in selects}
        require(
            len(kinds) <= 1,
            "select: one call can mix budgets but not selectors or dense_layers, "
            f"got {sorted(kinds)}; use one call each.",
        )
        evictors = [build(e) for e in {r.sparsity.evict for r in requests if r.sparsity.evict}]
        method, dense_layers = next(iter(kinds), (None, 0))
        samplings = {r.sampling for r in requests}
        return cls(
            selector=method,
            dense_layers=dense_layers,
            ring=max((e.queries for e in evictors), default=0),
            accumulates=any(e.accumulates for e in evictors),
            proposal=any(s.filtered or s.min_new_tokens for s in samplings),
            topk=max((s.topk_logprobs for s in samplings), default=0),
            teacher=any(r.teacher is not None for r in requests),
            hidden=any(r.keep_hidden > 0 for r in requests),
            record_selected=any(r.record and r.sparsity.select for r in requests),
            schedule_bins=max((len(s.budget.budgets) for s in selects if isinstance(s.budget, Schedule)), default=1),
            banned=max((len(r.stop) for r in requests if r.sampling.min_new_tokens), default=1),
        )
