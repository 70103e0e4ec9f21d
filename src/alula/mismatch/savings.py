"""What a policy saved of the dense policy's KV, and whether it was sparse at all.

A budget that no sequence outgrows is the dense policy measured against itself: its tail is 1 and nothing is vetoed,
which says nothing about the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from alula.engine.rollout import KVUse, Rollout, saved_share
from alula.sparsity.footprint import selecting_layers
from alula.sparsity.policy import Sparsity, budget_at


@dataclass(frozen=True)
class Savings:
    saved: float
    """Share of the dense policy's KV tokens that was not held; a long rollout counts for more, as in memory."""
    not_read: float
    """Share of them that attention did not read, evicted or not selected, averaged over the layers."""
    evictions: int
    sparse: int
    """Rollouts of which some KV was evicted or left unread."""
    rollouts: int
    longest: int
    """Tokens of the longest sequence, prompt included."""
    sparse_layers: int
    """Layers that may be sparse: a selector's `dense_layers` never are."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], kv: Sequence[KVUse], policy: Sparsity, layers: int) -> "Savings":
        """`kv`: of each rollout, under `policy`; not its own where its tokens were decoded again."""
        selecting = selecting_layers(policy.select, layers)
        held = dense = read = sparse = 0.0
        for rollout, use in zip(rollouts, kv):
            unread = selecting / layers * (use.mean_tokens - use.mean_read_tokens)
            held += len(rollout) * use.mean_tokens
            read += len(rollout) * (use.mean_tokens - unread)
            dense += len(rollout) * use.dense_mean_tokens
            sparse += use.evictions > 0 or unread > 0
        return cls(
            saved_share(held, dense),
            saved_share(read, dense),
            sum(use.evictions for use in kv),
            int(sparse),
            len(rollouts),
            max(len(r.prompt_ids) + len(r) for r in rollouts),
            selecting if policy.select and not policy.evict else layers,
        )

    def describe(self) -> str:
        return (
            f"KV saved {self.saved:.1%}, KV not read {self.not_read:.1%}, evictions {self.evictions}; sparse in "
            f"{self.sparse} of {self.rollouts} rollouts."
        )

    def never_sparse(self, name: str, policy: Sparsity) -> str:
        """For a policy that was not: why its numbers say nothing, and the way out."""
        if self.sparse_layers == 0:
            return (
                f"{name} was never sparse: its dense_layers are all layers of the model, so nothing was tested; "
                "use fewer."
            )
        it, smaller = "it", "budget"
        evict = None if policy.select else policy.evict
        if evict and budget_at(evict.budget, self.longest) < self.longest:  # so a smaller buffer alone would do
            it, smaller = f"it and its buffer of {evict.buffer}", "budget or buffer"
            if evict.protect_prompt:
                it += " beside the prompt"
        return (
            f"{name} was never sparse: no sequence outgrew {it} (the longest has {self.longest} tokens), so "
            f"nothing was tested; use a smaller {smaller}, or longer sequences (--length)."
        )
