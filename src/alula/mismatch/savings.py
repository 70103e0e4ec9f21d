"""KV that a policy saved compared with the dense policy, and whether it was sparse at all.

If no sequence exceeds the budget, the dense policy is compared with itself: the tail is 1 and nothing is vetoed, so
the budget was not tested.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from alula.engine.rollout import KVUse, Rollout, saved_share
from alula.sparsity.footprint import selecting_layers
from alula.sparsity.policy import Sparsity, budget_at


@dataclass(frozen=True)
class Savings:
    saved: float
    """Share of the dense policy's KV tokens that was not held, weighted by rollout length."""
    not_read: float
    """Share of the dense policy's KV tokens that attention did not read (evicted or not selected), mean over layers."""
    evictions: int
    sparse: int
    """Rollouts with some KV evicted or not read."""
    rollouts: int
    longest: int
    """Length of the longest sequence in tokens, prompt included."""
    sparse_layers: int
    """Layers that may be sparse: a selector's `dense_layers` never are."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], kv: Sequence[KVUse], policy: Sparsity, layers: int) -> "Savings":
        """`kv`: KV use of each rollout under `policy`. Differs from `rollout.kv` if the tokens were decoded again."""
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
        """Message for a policy that was never sparse: why nothing was tested, and a hint."""
        if self.sparse_layers == 0:
            return (
                f"{name} was never sparse: dense_layers covers all layers of the model, so nothing was tested; "
                "lower dense_layers."
            )
        limit, smaller = sparse_limit(policy, self.longest)
        return (
            f"{name} was never sparse: no sequence exceeded {limit} (the longest has {self.longest} tokens), so "
            f"nothing was tested; use a smaller {smaller}, or longer sequences (--length)."
        )


def sparse_limit(policy: Sparsity, longest: int) -> tuple[str, str]:
    """What a sequence must exceed before the policy is sparse, and what to lower if the `longest` does not."""
    evict = None if policy.select else policy.evict
    if evict is None or budget_at(evict.budget, longest) >= longest:
        return "the budget", "budget"
    prompt = " plus the prompt" if evict.protect_prompt else ""
    return f"the budget plus buffer={evict.buffer}{prompt}", "budget or buffer"  # a smaller buffer is enough
