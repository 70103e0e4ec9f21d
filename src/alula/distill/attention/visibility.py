"""Which keys every query of a micro-batch attends to under the sparse policy that sampled it.

Evictors are replayed: the key at j is visible to the query at t while j <= t < evicted_at[layer, head, j], as the
engine recorded it. Selectors are recomputed from the learner's own queries and keys, exactly as the engine chooses
while decoding: page summaries in the cache's dtype, the budget in force at t + 1 tokens, the first page and the last
two always, ties to the lower page. The prompt's own queries are dense, as prefill is. No gradient flows through a
choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from alula.engine.rollout import NEVER, Rollout
from alula.errors import SettingError, require
from alula.ops.select_pages import FIRST, LAST
from alula.sparsity.footprint import UNLIMITED, pages_read
from alula.sparsity.policy import Select, Sparsity
from alula.sparsity.select import METHODS


@dataclass
class Visibility:
    """Packed sequences of a micro-batch, their padded rows [B, L], and which keys their queries see."""

    starts: Tensor
    """int32 [B + 1]: where each row begins among the packed tokens, and where the last one ends."""
    position: Tensor
    """int64 [T]: index of each packed token in the flattened rows."""
    rows: int
    width: int
    prompts: Tensor
    """int32 [B]: prompt lengths; queries before them are dense."""
    evicted_at: Tensor | None = None
    """int32 [layer, B, kv_head, L]"""
    select: Select | None = None
    budget: Tensor | None = None
    """int32 [B, L]: pages that the query at each position may read."""
    layers: dict[int, Any] = field(default_factory=dict)
    """Cache of `tiles.layer_visibility` by layer: a recomputed layer sees the same keys."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], device: torch.device | str) -> "Visibility":
        """For rollouts in packed order, each under its recorded sparsity."""
        lengths = [len(r.prompt_ids) + len(r) for r in rollouts]
        width = max(lengths)
        position = torch.cat([row * width + torch.arange(n) for row, n in enumerate(lengths)])
        starts, prompts = np.cumsum([0, *lengths]), [len(r.prompt_ids) for r in rollouts]
        ends, given = (torch.as_tensor(count, dtype=torch.int32, device=device) for count in (starts, prompts))
        visibility = cls(ends, position.to(device), len(rollouts), width, given)
        policies = [r.sparsity for r in rollouts]
        check_supported(policies)
        if any(policy.evict for policy in policies):
            visibility.evicted_at = _histories(rollouts, width).to(device)
        selects = {policy.select for policy in policies if policy.select}
        if selects:
            visibility.select = next(iter(selects))
            visibility.budget = torch.from_numpy(np.stack([_pages(policy.select, width) for policy in policies])).to(
                device
            )
        return visibility

    def pad(self, packed: Tensor) -> Tensor:
        """[T, H, D] -> [B, L, H, D]; zeros where a row has no token."""
        flat = packed.new_zeros(self.rows * self.width, *packed.shape[1:]).index_copy(0, self.position, packed)
        return flat.view(self.rows, self.width, *packed.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """[B, L, H, D] -> [T, H, D]"""
        return padded.flatten(0, 1).index_select(0, self.position)

    def dense(self, layer: int) -> bool:
        """Whether every query of this layer sees all earlier keys."""
        return self.evicted_at is None and not self.selects(layer)

    def selects(self, layer: int) -> bool:
        return self.select is not None and layer >= self.select.dense_layers

    def summaries(self, layer: int, keys: Tensor) -> Tensor | None:
        """fp32 [B, Hkv, full, V, D] of the full pages of keys [B, Hkv, L, D], rounded as the cache rounds them."""
        if not self.selects(layer):
            return None
        assert self.select is not None
        block = self.select.block
        full = self.width // block
        pages = keys[:, :, : full * block].unflatten(2, (full, block))
        return METHODS[self.select.method].summarise(pages).to(keys.dtype).float()

    def visible(self, layer: int, query: Tensor, first: int, summaries: Tensor | None) -> Tensor:
        """bool [B, Hkv or 1, C, first + C]: keys seen by the queries [B, Hq, C, D] at positions first and on."""
        last = first + query.shape[2]
        at = torch.arange(first, last, device=query.device)
        key = torch.arange(last, device=query.device)
        seen = (key <= at[:, None])[None, None]
        prompt = (at < self.prompts[:, None])[:, None, :, None]
        if self.evicted_at is not None:
            seen = seen & (prompt | (at[:, None] < self.evicted_at[layer][:, :, None, :last]))
        if summaries is not None:
            assert self.select is not None
            pages = -(-last // self.select.block)
            scores = self.score_queries(query, summaries) @ summaries[:, :, :pages].flatten(3).transpose(-1, -2)
            read = self.pages_read(scores, at, pages)
            seen = seen & (prompt | read.repeat_interleave(self.select.block, -1)[..., :last])
        return seen

    def score_queries(self, query: Tensor, summaries: Tensor) -> Tensor:
        """Score queries, fp32 [N, Hkv, ..., vectors · D], of queries [N, Hq, ..., D]: their product with the summaries
        of a page is its score."""
        assert self.select is not None
        parts = METHODS[self.select.method].query_parts(query.unflatten(1, (summaries.shape[1], -1)))
        return torch.cat([part.mean(2, dtype=torch.float32) for part in parts], -1)

    def pages_read(self, scores: Tensor, at: Tensor, pages: int) -> Tensor:
        """bool [B, Hkv, C, pages]: pages that the queries at positions `at` read, chosen as in `ops.select_pages`.

        scores: fp32 [B, Hkv, C, full], of the full pages; the others are among the last two. NaN counts as -inf.
        """
        assert self.select is not None
        assert self.budget is not None
        held = at // self.select.block + 1
        count = torch.minimum(self.budget[:, at], held)[:, None, :, None]
        page = torch.arange(pages, device=scores.device)
        always = (page < FIRST) | (page >= held[:, None] - LAST)
        scores = torch.where(scores.isnan(), -torch.inf, scores)
        scores = F.pad(scores, (0, pages - scores.shape[-1]), value=-torch.inf)
        scores = scores.masked_fill(always, torch.inf).masked_fill(page >= held[:, None], -torch.inf)
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        best = (page < count).expand_as(order)
        return torch.zeros_like(best).scatter(-1, order, best)


def check_supported(policies: Sequence[Sparsity]) -> None:
    """Reject policies that the learner cannot replay."""
    if any(policy.evict and policy.select for policy in policies):
        raise SettingError(
            "distill: an evictor and a selector together cannot be replayed by the learner; "
            "distil one of them, then use both."
        )
    kinds = {(s.method, s.block, s.dense_layers) for s in (policy.select for policy in policies) if s}
    require(
        len(kinds) <= 1,
        f"distill: rollouts of different selectors {sorted(kinds)} in one step; distil them in separate steps.",
    )


def _histories(rollouts: Sequence[Rollout], width: int) -> Tensor:
    histories = [r.history for r in rollouts if r.history is not None]
    missing = any(r.sparsity.evict is not None and r.history is None for r in rollouts)
    require(not missing, "distill: an evictor's rollouts need their history; generate them with record=True.")
    layers, heads, _ = histories[0].shape
    evicted_at = torch.full((layers, len(rollouts), heads, width), NEVER, dtype=torch.int32)
    for row, rollout in enumerate(rollouts):
        if rollout.history is not None:
            evicted_at[:, row, :, : rollout.history.shape[-1]] = rollout.history
    return evicted_at


def _pages(select: Select | None, width: int) -> np.ndarray:
    """Pages that the query at each position may read: the budget in force once that token is held."""
    if select is None:
        return np.full(width, UNLIMITED, np.int32)
    return pages_read(select, np.arange(1, width + 1)).astype(np.int32)
