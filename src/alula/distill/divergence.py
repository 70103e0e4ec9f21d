"""The sparse policy q against the dense policy p, token by token, with chunked logits.

    KL = Σ_v q log(q/p)        exact KL(sparse ‖ dense)
    α  = Σ_v min(p, q)         acceptance

Each chunk's logits are recomputed in the backward pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alula.distill.sparse_policy import SparsePolicy
from alula.engine.rollout import Rollout
from alula.learner.logprobs import chunked_logprobs, chunks, fused
from alula.learner.packing import Packed
from alula.models.load import lm_logits

Head = tuple[Tensor, Tensor | None]


class Compared(NamedTuple):
    logprobs: Tensor
    """float32 [N]: log-probs of the sampled tokens under the sparse policy, with gradient."""
    kl: Tensor
    """float32 [N]: KL(sparse ‖ dense), with gradient."""
    acceptance: Tensor
    """float32 [N]: α, without gradient."""


def compare_policies(
    sparse: Tensor, dense: Tensor, head: Head, targets: Tensor, temperature: float, chunk: int
) -> Compared:
    """From the hidden states [N, H] of both policies. The dense ones and the head take no gradient."""
    return Compared(*_Compare.apply(sparse, dense, *head, targets, temperature, chunk))


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        sparse: Tensor,
        dense: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, ...]:
        compare_chunk = fused(compare, sparse)
        parts = []
        for rows in chunks(len(targets), chunk):
            q, p = (lm_logits(hidden[rows], weight, bias) for hidden in (sparse, dense))
            parts.append(compare_chunk(q, p, targets[rows], temperature))
        logprobs, kl, alpha, *normalisers = (torch.cat(column) for column in zip(*parts))
        ctx.save_for_backward(sparse, dense, weight, bias, targets, kl, *normalisers)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(alpha)
        return logprobs, kl, alpha

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_kl: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        sparse, dense, weight, bias, targets, *saved = ctx.saved_tensors
        chunk_gradient = fused(compare_gradient, sparse)
        gradient = torch.empty_like(sparse)
        for rows in chunks(len(targets), ctx.chunk):
            q, p = (lm_logits(hidden[rows], weight, bias) for hidden in (sparse, dense))
            per_token = (x[rows] for x in (targets, *saved, by_logprob, by_kl))
            by_logits = chunk_gradient(q, p, *per_token, ctx.temperature, sparse.dtype)
            torch.mm(by_logits, weight, out=gradient[rows])
        return gradient, None, None, None, None, None, None


def compare(q: Tensor, p: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Log-prob of `targets` under q, KL, α and the logs of both normalisers, from logits [N, V] of both policies."""
    q, p = q / temperature, p / temperature
    q_normaliser, p_normaliser = q.logsumexp(-1), p.logsumexp(-1)
    lq, lp = q - q_normaliser[:, None], p - p_normaliser[:, None]
    q, p = lq.exp(), lp.exp()
    alpha = torch.minimum(q, p).sum(-1).clamp(max=1.0)
    logprobs = lq.gather(-1, targets[:, None])[:, 0]
    return logprobs, (q * (lq - lp)).sum(-1), alpha, q_normaliser, p_normaliser


def compare_gradient(
    q: Tensor,
    p: Tensor,
    targets: Tensor,
    kl: Tensor,
    q_normaliser: Tensor,
    p_normaliser: Tensor,
    by_logprob: Tensor,
    by_kl: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient with respect to q's logits [N, V], with 1 the indicator:

    d log q(o) = 1[v = o] − q,   d KL = q (log q − log p − KL)
    """
    lq, lp = q / temperature - q_normaliser[:, None], p / temperature - p_normaliser[:, None]
    q = lq.exp()
    slope = q * (lq - lp - kl[:, None])
    chosen = (torch.arange(q.shape[-1], device=q.device) == targets[:, None]).to(q.dtype)
    return ((by_logprob[:, None] * (chosen - q) + by_kl[:, None] * slope) / temperature).to(dtype)


def sparse_logprobs(policy: SparsePolicy, batch: Packed, rollouts: Sequence[Rollout], chunk: int) -> Tensor:
    """Log-probs [N] of the batch's targets under the policy that sampled the rollouts."""
    weight, bias = policy.head
    logprobs, _ = chunked_logprobs(
        policy(batch, rollouts),
        weight,
        batch.target_ids,
        rollouts[0].sampling.scored_temperature,
        chunk,
        bias,
        entropy=False,
    )
    return logprobs
