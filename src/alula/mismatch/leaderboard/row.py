"""One policy of the leaderboard, measured on its own rollouts and on the dense policy's text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from alula.engine.engine import Engine
from alula.engine.rollout import Rollout, Scores
from alula.engine.scoring import forced_request, padded, teachers
from alula.engine.sequence import Teacher
from alula.mismatch.calibrate.calibrate import TextSettings
from alula.mismatch.leaderboard.kv_bytes import KVBytes, kv_bytes
from alula.mismatch.measure import Bins, rollouts_with_acceptance
from alula.objective.veto import Share, below_veto
from alula.sparsity.policy import Sparsity

NEVER = -1
"""The place of a token that does not occur."""


@dataclass(frozen=True)
class Sample:
    """What was measured on rollouts, one number per rollout, ordered by prompt and sample."""

    vetoed: tuple[int, ...]
    """Number of tokens before the first vetoed one, or `NEVER`. On dense text: before the first token that the policy
    gives less than 1e-4 times the dense probability."""
    acceptance: tuple[float, ...]
    """Mean over tokens."""
    length: tuple[int, ...]
    """Generated tokens."""
    tail: tuple[float, float, float]
    """5th percentile of acceptance over all tokens, and its 95 % band."""

    def share(self, samples: int, within: int | None = None) -> Share:
        """The share of rollouts with such a token, among their first `within` tokens."""
        count = sum(at != NEVER and (within is None or at < within) for at in self.vetoed)
        return Share(count, len(self.vetoed), samples)


@dataclass(frozen=True)
class DenseText:
    """Rollouts of the dense policy, with what its packed pass says of them: once for all rows."""

    rollouts: Sequence[Rollout]
    scores: Sequence[Scores]
    states: Sequence[Teacher]
    """Hidden states, to compare each step's distribution with."""

    @classmethod
    def of(cls, engine: Engine, rollouts: Sequence[Rollout]) -> "DenseText":
        return cls(rollouts, engine.score(rollouts), teachers(engine, rollouts))


@dataclass(frozen=True)
class Row:
    """One policy. `target` is the number of KV tokens whose bytes it may hold or read; None for the dense policy."""

    policy: str
    family: str
    target: int | None
    kv_dtype: str | None
    kv: KVBytes
    own: Sample
    text: Sample
    step_ms: float | None
    """Milliseconds of a decode step, evictions included. Not measured on a CPU, whose kernels are only a reference."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Row":
        samples = {
            name: Sample(**{key: tuple(value) for key, value in record[name].items()}) for name in ("own", "text")
        }
        return cls(**record | samples | {"kv": KVBytes(**record["kv"])})


def measure_row(
    engine: Engine,
    policy: Sparsity,
    text: TextSettings,
    dense: DenseText,
    *,
    family: str,
    target: int | None,
    step_ms: float | None,
    progress: bool = False,
) -> Row:
    """Measure a policy on its own rollouts and on the dense policy's."""
    sparse, on_text = decoded_again(engine, dense, policy)
    if engine.is_dense(policy):  # its own rollouts are the text
        rollouts, alphas, scores, sampled = dense.rollouts, on_text, dense.scores, sparse
    else:
        rollouts, alphas, scores = rollouts_with_acceptance(
            engine, text.prompts, text.sampling, policy, progress=progress
        )
        sampled = [r.sampler_logprobs().cpu() for r in rollouts]
    own = [s.logprobs - q for q, s in zip(sampled, scores)]
    lost = [q - s.logprobs for q, s in zip(sparse, dense.scores)]
    lengths = [(len(r.prompt_ids), len(r)) for r in rollouts]
    return Row(
        policy.describe(),
        family,
        target,
        engine.geometry.kv_dtype,
        kv_bytes(engine.geometry, engine.page, policy, lengths),
        sample(rollouts, alphas, own),
        sample(dense.rollouts, on_text, lost),
        step_ms,
    )


def sample(rollouts: Sequence[Rollout], alphas: Sequence[Tensor], log_ratios: Sequence[Tensor]) -> Sample:
    tail = Bins(1 << 30, 1).tail(rollouts, alphas)[0]
    return Sample(
        tuple(first_below(ratio) for ratio in log_ratios),
        tuple(float(alpha.double().mean()) for alpha in alphas),
        tuple(map(len, rollouts)),
        (tail.value, tail.lower, tail.upper),
    )


def first_below(log_ratio: Tensor) -> int:
    """Index of the first token with a ratio below Sparse-RL's threshold, or `NEVER`."""
    positions = below_veto(log_ratio).nonzero()
    return int(positions[0]) if len(positions) else NEVER


def decoded_again(engine: Engine, dense: DenseText, policy: Sparsity) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs of the text's tokens when they are decoded under `policy`, and α against the dense pass."""
    text = dense.rollouts
    requests = [
        forced_request(engine, r, i, policy, teacher=teacher) for i, (r, teacher) in enumerate(zip(text, dense.states))
    ]
    logprobs, alphas = [torch.empty(0)] * len(text), [torch.empty(0)] * len(text)
    for done in engine.stream(requests):
        i = done.prompt_index
        logprobs[i], alphas[i] = padded(done.logprobs, len(text[i])).cpu(), padded(done.acceptance, len(text[i])).cpu()
    return logprobs, alphas
