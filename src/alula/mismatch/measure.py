"""Measures tails of acceptance with the engine.

`measure_tails` compares many policies on the same text: the tokens are decoded again under every policy, all in one
batch. `rollouts_with_acceptance` samples rollouts from one policy, for the final check of a schedule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from alula.engine.engine import Engine
from alula.engine.rollout import KVUse, Rollout, Sampling, Scores
from alula.engine.scoring import score_kept, stream_acceptance
from alula.errors import require
from alula.mismatch.savings import Savings
from alula.mismatch.tail import Array, Tail, tail
from alula.sparsity.policy import Sparsity
from alula.terminal import progress_bar


@dataclass(frozen=True)
class Bins:
    """Length bins and settings of the tail: `count` bins of `width` positions each, the last one open-ended."""

    width: int
    count: int
    quantile: float = 0.05
    confidence: float = 0.95
    resamples: int = 1000

    def tail(self, rollouts: Sequence[Rollout], alphas: Sequence[Tensor]) -> Tail:
        alpha, positions, prompts = flat(rollouts, alphas)
        return tail(
            alpha,
            positions,
            prompts,
            width=self.width,
            bins=self.count,
            quantile=self.quantile,
            confidence=self.confidence,
            resamples=self.resamples,
        )


def flat(rollouts: Sequence[Rollout], alphas: Sequence[Tensor]) -> tuple[Array, Array, Array]:
    """α, position (tokens before it) and prompt index of every sampled token, as flat arrays."""
    sampled = [r.sampled.numpy() for r in rollouts]
    alpha = np.concatenate([a.numpy()[mask] for a, mask in zip(alphas, sampled)])
    positions = np.concatenate([len(r.prompt_ids) + np.flatnonzero(mask) for r, mask in zip(rollouts, sampled)])
    prompts = np.repeat([r.prompt_index for r in rollouts], [r.sampled_tokens for r in rollouts])
    return alpha, positions, prompts


def measure_tails(
    engine: Engine,
    text: Sequence[Rollout],
    policies: Sequence[Sparsity],
    bins: Bins,
    *,
    done: Callable[[int, Tail, Savings], None] = lambda index, tail, kv: None,
    progress: bool = False,
) -> list[Tail]:
    """The tail of every policy on `text`, all in one batch; calls `done` for each policy as soon as it is finished."""
    size = len(text)
    alphas: list[list[Tensor | None]] = [[None] * size for _ in policies]
    uses: list[list[KVUse]] = [[KVUse()] * size for _ in policies]
    left, tails = [size] * len(policies), [None] * len(policies)
    rows = [policy for policy in policies for _ in text]
    with progress_bar(len(rows), progress) as advance:
        for index, alpha, use in stream_acceptance(engine, [*text] * len(policies), rows):
            which, rollout = divmod(index, size)
            alphas[which][rollout], uses[which][rollout] = alpha, use
            left[which] -= 1
            advance(len(alpha))
            if not left[which]:
                tails[which] = result = bins.tail(text, alphas[which])  # type: ignore[call-overload,arg-type]
                alphas[which] = []
                done(which, result, Savings.of(text, uses[which], policies[which], engine.geometry.layers))
    return tails  # type: ignore[return-value]


def rollouts_with_acceptance(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    policy: Sparsity,
    *,
    progress: bool = False,
) -> tuple[list[Rollout], list[Tensor], list[Scores]]:
    """Rollouts of a policy, ordered by prompt and sample. α of each, from the hidden states used in sampling, and its
    dense log-probs come from one dense pass."""
    requests = engine.requests(list(prompts), sampling, policy)
    for request in requests:
        request.keep_hidden = sampling.n
    results = []
    with progress_bar(len(requests) * sampling.n, progress) as advance:
        for rollout in engine.stream(requests):
            require(rollout.finish != "error", "model: its output is not finite; check its weights and dtype.")
            [(alpha, scores)] = score_kept(engine, [rollout])  # now, since hidden states are too large to collect
            results.append((replace(rollout, hidden=None), alpha, scores))
            advance(len(rollout))
    results.sort(key=lambda result: (result[0].prompt_index, result[0].sample_index))
    rollouts, alphas, dense = map(list, zip(*results))
    return rollouts, alphas, dense


def policies_per_batch(engine: Engine, text: Sequence[Rollout], evicts: bool) -> int:
    """Number of policies that can decode `text` in one batch: limited by rows and, unless they evict, by KV memory."""
    rows = engine.max_rows // len(text)
    held = sum(len(r.prompt_ids) + len(r) for r in text)
    fits = rows if evicts else engine.pool.usable * engine.page // held
    return max(1, min(rows, fits))


def cut_to_bin(text: Sequence[Rollout], first: int, last: int) -> list[Rollout]:
    """The rollouts that reach position `first`, truncated at position `last`."""
    reaching = [r for r in text if len(r.prompt_ids) + len(r) > first and len(r.prompt_ids) < last]
    return [replace(r, token_ids=r.token_ids[: last - len(r.prompt_ids)]) for r in reaching]
