"""The sparse policy q against the dense policy p, token by token, with logits that never exist whole.

    kl          Σ_v q log(q/p): KL(sparse ‖ dense), exact
    topk-kl     the same over the teacher's K tokens and all others as one: at most `kl`
    sampled-kl  ½ (log q − log p)² of the sampled token (k2): over tokens drawn from q its mean gradient is that of
                `kl`, while k3's would be that of KL(dense ‖ sparse)
    overlap     1 − α = 1 − Σ_v min(p, q)

Each chunk's logits are computed again in the backward pass.


Both policies over a micro-batch: the sparse one with gradient, the dense one as its teacher."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alula.distill.config import DistillConfig
from alula.distill.sparse_policy import SparsePolicy
from alula.engine.rollout import Rollout, Scores
from alula.learner.logprobs import chunked_logprobs, chunks, fused, statistics, topk_logprobs
from alula.learner.packing import Packed
from alula.models.load import lm_logits


class Compared(NamedTuple):
    logprobs: Tensor
    """float32 [N]: of the sampled tokens under the sparse policy, with gradient."""
    divergence: Tensor
    """float32 [N], with gradient."""
    acceptance: Tensor | None = None
    """float32 [N]: α, without gradient; only against a whole distribution."""
    kl: Tensor | None = None


Head = tuple[Tensor, Tensor | None]


# --- against the whole distribution -------------------------------------------------------------------------------


def against_hidden(
    hidden: Tensor, teacher: Tensor, head: Head, targets: Tensor, temperature: float, overlap: bool, chunk: int
) -> Compared:
    """Against the dense policy whose hidden states [N, H] are `teacher`. The head takes no gradient."""
    return Compared(*_AgainstHidden.apply(hidden, teacher, *head, targets, temperature, overlap, chunk))


class _AgainstHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        teacher: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        overlap: bool,
        chunk: int,
    ) -> tuple[Tensor, ...]:
        measured = fused(compare, hidden)
        parts = []
        for rows in chunks(len(targets), chunk):
            q, p = (lm_logits(x[rows], weight, bias) for x in (hidden, teacher))
            parts.append(measured(q, p, targets[rows], temperature))
        logprobs, kl, alpha, *normalisers = (torch.cat(column) for column in zip(*parts))
        ctx.save_for_backward(hidden, teacher, weight, bias, targets, kl, *normalisers)
        ctx.temperature, ctx.overlap, ctx.chunk = temperature, overlap, chunk
        divergence = 1 - alpha if overlap else kl.clone()
        ctx.mark_non_differentiable(alpha, kl)
        return logprobs, divergence, alpha, kl

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_divergence: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, teacher, weight, bias, targets, *known = ctx.saved_tensors
        slope = fused(compare_gradient, hidden)
        gradient = torch.empty_like(hidden)
        for rows in chunks(len(targets), ctx.chunk):
            q, p = (lm_logits(x[rows], weight, bias) for x in (hidden, teacher))
            lines = (x[rows] for x in (targets, *known, by_logprob, by_divergence))
            by_logits = slope(q, p, *lines, ctx.temperature, ctx.overlap, hidden.dtype)
            torch.mm(by_logits, weight, out=gradient[rows])
        return gradient, None, None, None, None, None, None, None


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
    by_divergence: Tensor,
    temperature: float,
    overlap: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient with respect to q's logits [N, V], with 1 the indicator:

    d log q(o) = 1[v = o] − q,   d KL = q (log q − log p − KL),   d (1 − α) = −q (1[q < p] − Σ q 1[q < p])
    """
    lq, lp = q / temperature - q_normaliser[:, None], p / temperature - p_normaliser[:, None]
    q = lq.exp()
    if overlap:
        below = (lq < lp).to(q.dtype)
        slope = -q * (below - (q * below).sum(-1, keepdim=True))
    else:
        slope = q * (lq - lp - kl[:, None])
    chosen = (torch.arange(q.shape[-1], device=q.device) == targets[:, None]).to(q.dtype)
    return ((by_logprob[:, None] * (chosen - q) + by_divergence[:, None] * slope) / temperature).to(dtype)


# --- against scores -----------------------------------------------------------------------------------------------


def against_scores(
    hidden: Tensor, teacher: Scores, head: Head, targets: Tensor, temperature: float, chunk: int
) -> Compared:
    """Against the dense policy's scores [N] of the sampled tokens, or its top-K lists [N, K] where it has them."""
    weight, bias = head
    if teacher.topk_ids is None or teacher.topk_logprobs is None:
        sampled, _ = chunked_logprobs(hidden, weight, targets, temperature, chunk, bias, entropy=False)
        return Compared(sampled, 0.5 * (sampled - teacher.logprobs).square())
    sampled, listed = _Listed.apply(hidden, weight, bias, targets, teacher.topk_ids, temperature, chunk)
    return Compared(sampled, bucketed_kl(listed, teacher.topk_logprobs))


class _Listed(torch.autograd.Function):
    """Log-probs of `targets` [N] and of the tokens listed beside each [N, K]. The head takes no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ids: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, ...]:
        measured = fused(statistics, hidden)
        parts = []
        for rows in chunks(len(targets), chunk):
            logits = lm_logits(hidden[rows], weight, bias)
            sampled, normaliser, _ = measured(logits, targets[rows], temperature, False)
            parts.append((sampled, logits.gather(-1, ids[rows]) / temperature - normaliser[:, None], normaliser))
        sampled, listed, normaliser = (torch.cat(column) for column in zip(*parts))
        ctx.save_for_backward(hidden, weight, bias, targets, ids, normaliser)
        ctx.temperature, ctx.chunk = temperature, chunk
        return sampled, listed

    @staticmethod
    def backward(ctx: Any, by_sampled: Tensor, by_listed: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, ids, normaliser = ctx.saved_tensors
        shared = fused(_shared_slope, hidden)
        total = by_sampled + by_listed.sum(-1)
        gradient = torch.empty_like(hidden)
        for rows in chunks(len(targets), ctx.chunk):
            logits = lm_logits(hidden[rows], weight, bias)
            by_logits = shared(logits, normaliser[rows], total[rows], ctx.temperature, hidden.dtype)
            # One after the other: a sampled token may be listed too, and each addition alone has no conflicts.
            for where, value in ((ids, by_listed), (targets[:, None], by_sampled[:, None])):
                by_logits.scatter_add_(-1, where[rows], (value[rows] / ctx.temperature).to(hidden.dtype))
            torch.mm(by_logits, weight, out=gradient[rows])
        return gradient, None, None, None, None, None, None


def _shared_slope(logits: Tensor, normaliser: Tensor, total: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """−p · total / temperature: what every token's logit gets from the normaliser."""
    return (torch.exp(logits / temperature - normaliser[:, None]) * (-total / temperature)[:, None]).to(dtype)


def bucketed_kl(lq: Tensor, lp: Tensor) -> Tensor:
    """KL over the K listed tokens [N, K] and one bucket of all others, whose mass is known to 1e-6 only."""
    q, p = lq.exp(), lp.exp()
    q_rest, p_rest = ((1 - x.sum(-1)).clamp(min=1e-6) for x in (q, p))
    return (q * (lq - lp)).sum(-1) + q_rest * (q_rest.log() - p_rest.log())


def compared(
    policy: SparsePolicy,
    config: DistillConfig,
    batch: Packed,
    rollouts: Sequence[Rollout],
    dense: Tensor | None,
    before: Sequence[Scores] | None = None,
) -> Compared:
    """Log-probs of the sparse policy and its divergence from the teacher: the dense policy now, by its hidden states
    [N, H], or `before`."""
    temperature = rollouts[0].sampling.scored_temperature
    head, targets = policy.head, batch.target_ids
    if config.loss == "policy":
        logprobs = sparse_logprobs(policy, config, batch, rollouts)
        return Compared(logprobs, torch.zeros_like(logprobs))
    hidden = policy(batch, rollouts)
    if config.whole_vocabulary:
        assert dense is not None
        return against_hidden(hidden, dense, head, targets, temperature, config.divergence == "overlap", config.chunk)
    scores = _given(batch, before) if dense is None else _scores_now(policy, config, batch, dense, temperature)
    if config.divergence == "sampled-kl":
        scores = Scores(scores.logprobs)
    return against_scores(hidden, scores, head, targets, temperature, config.chunk)


def sparse_logprobs(policy: SparsePolicy, config: DistillConfig, batch: Packed, rollouts: Sequence[Rollout]) -> Tensor:
    """Log-probs [N] of the batch's targets under the policy that sampled the rollouts."""
    weight, bias = policy.head
    logprobs, _ = chunked_logprobs(
        policy(batch, rollouts),
        weight,
        batch.target_ids,
        rollouts[0].sampling.scored_temperature,
        config.chunk,
        bias,
        entropy=False,
    )
    return logprobs


def _scores_now(
    policy: SparsePolicy, config: DistillConfig, batch: Packed, dense: Tensor, temperature: float
) -> Scores:
    weight, bias = policy.head
    if config.divergence == "sampled-kl":
        logprobs, _ = chunked_logprobs(dense, weight, batch.target_ids, temperature, config.chunk, bias, entropy=False)
        return Scores(logprobs)
    k = min(config.top_k, len(weight))
    best = topk_logprobs(dense, weight, batch.target_ids, k, temperature, config.chunk, bias)
    return Scores(best.logprobs, best.topk_ids, best.topk_logprobs)


def _given(batch: Packed, before: Sequence[Scores] | None) -> Scores:
    assert before is not None
    found = Scores(batch.flat([score.logprobs for score in before]))
    ids = [score.topk_ids for score in before if score.topk_ids is not None]
    values = [score.topk_logprobs for score in before if score.topk_logprobs is not None]
    if len(ids) == len(before):
        found.topk_ids, found.topk_logprobs = batch.flat(ids), batch.flat(values)
    return found
