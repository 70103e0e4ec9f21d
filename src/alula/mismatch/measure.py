"""Tails of acceptance measured with the engine: of many policies on the same text, or of a policy on its own rollouts.

Shared text makes policies comparable: all are judged on the same tokens of the same prompts (paired), decoded again
side by side in one batch. A policy's own rollouts are where it will be used: a schedule is confirmed on those.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from alula.engine.engine import Engine
from alula.engine.rollout import KVUse, Rollout, Sampling
from alula.engine.scoring import kept_acceptance, stream_acceptance
from alula.errors import require
from alula.mismatch.savings import Savings
from alula.mismatch.tail import Array, Tail, tail
from alula.sparsity.policy import Sparsity
from alula.terminal import progress_bar


@dataclass(frozen=True)
class Bins:
    """How tokens become tails: `count` bins of `width` positions each, the last one open-ended."""

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
    """α, position (prompt + generated tokens before it) and prompt of every token."""
    alpha = np.concatenate([a.numpy() for a in alphas])
    positions = np.concatenate([len(r.prompt_ids) + np.arange(len(r)) for r in rollouts])
    prompts = np.repeat([r.prompt_index for r in rollouts], [len(r) for r in rollouts])
    return alpha, positions, prompts


def measure(
    engine: Engine,
    text: Sequence[Rollout],
    policies: Sequence[Sparsity],
    bins: Bins,
    *,
    done: Callable[[int, Tail, Savings], None] = lambda index, tail, kv: None,
    progress: bool = False,
) -> list[Tail]:
    """The tail of every policy on `text`, all policies in one batch; `done` is told of each as soon as it is there."""
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
                tails[which] = found = bins.tail(text, alphas[which])  # type: ignore[call-overload,arg-type]
                alphas[which] = []
                done(which, found, Savings.of(text, uses[which], policies[which], engine.geometry.layers))
    return tails  # type: ignore[return-value]


def own_rollouts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    policy: Sparsity,
    *,
    progress: bool = False,
) -> tuple[list[Rollout], list[Tensor]]:
    """Rollouts of a policy in their order, and α of each from the hidden states that it was sampled from."""
    requests = engine.requests(list(prompts), sampling, policy)
    for request in requests:
        request.keep_hidden = sampling.n
    found = []
    with progress_bar(len(requests) * sampling.n, progress) as advance:
        for rollout in engine.stream(requests):
            require(rollout.finish != "error", "the model's output is not finite; check its weights and dtype.")
            [alpha] = kept_acceptance(engine, [rollout])  # at once: hidden states are too large to pile up
            found.append((replace(rollout, hidden=None), alpha))
            advance(len(rollout))
    found.sort(key=lambda pair: (pair[0].prompt_index, pair[0].sample_index))
    return [rollout for rollout, _ in found], [alpha for _, alpha in found]


def side_by_side(engine: Engine, text: Sequence[Rollout], evicts: bool) -> int:
    """How many policies decode `text` together without waiting for rows or, unless they evict, for memory."""
    rows = engine.max_rows // len(text)
    held = sum(len(r.prompt_ids) + len(r) for r in text)
    fits = rows if evicts else engine.pool.usable * engine.page // held
    return max(1, min(rows, fits))


def cut(text: Sequence[Rollout], first: int, last: int) -> list[Rollout]:
    """What there is of the rollouts that reach position `first`, up to position `last`."""
    reaching = [r for r in text if len(r.prompt_ids) + len(r) > first and len(r.prompt_ids) < last]
    return [replace(r, token_ids=r.token_ids[: last - len(r.prompt_ids)]) for r in reaching]
