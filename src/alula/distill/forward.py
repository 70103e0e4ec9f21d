"""Both policies over a micro-batch: the sparse one with gradient, the dense one as its teacher."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alula.distill.compare import Compared, against_hidden, against_scores
from alula.distill.config import DistillConfig
from alula.distill.policy import SparsePolicy
from alula.engine.rollout import Rollout, Scores
from alula.rl.logprobs import chunked_logprobs, topk_logprobs
from alula.rl.packing import Packed


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
        policy(batch, rollouts), weight, batch.target_ids, rollouts[0].sampling.scored_temperature, config.chunk, bias,
        entropy=False,
    )  # fmt: skip
    return logprobs


def _scores_now(
    policy: SparsePolicy, config: DistillConfig, batch: Packed, dense: Tensor, temperature: float
) -> Scores:
    weight, bias = policy.head
    if config.divergence == "sampled-kl":
        logprobs, _ = chunked_logprobs(
            dense, weight, batch.target_ids, temperature, config.chunk, bias, entropy=False
        )  # fmt: skip
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
