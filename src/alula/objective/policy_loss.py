"""The policy loss of a micro-batch: token sums with explicit divisors, so that micro-batches add up to the step.

    loss = Σ_i Σ_t −w_t J_t / policy_i  +  β Σ_i Σ_t k3_t / kl_i
    k3_t = e^−d − 1 + d,  d = log π_θ − log π_ref

J_t is one of the functions in `alula.objective.losses`. Rollouts and tokens are counted over the whole optimizer step
on all ranks. A learner that averages gradients over ranks multiplies the loss by the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alula.errors import SettingError, require
from alula.objective import ragged
from alula.objective.correction import Corrected, Reduce
from alula.objective.losses import LOSSES, LossInputs, RatioLevel
from alula.objective.settings import Correction, Loss


@dataclass(frozen=True)
class Divisors:
    """float64 [N]: what each rollout's token sum is divided by."""

    policy: Tensor
    kl: Tensor

    def rows(self, rollouts: Tensor) -> "Divisors":
        """The divisors of some rollouts, in the given order."""
        return Divisors(self.policy[rollouts], self.kl[rollouts])


@torch.no_grad()
def divisors(
    loss: Loss,
    correction: Correction,
    sequence: Tensor,
    sequences: int,
    corrected: Corrected | None = None,
    *,
    max_length: int | None = None,
    step: Tensor | None = None,
    steps: int | None = None,
    reduce: Reduce | None = None,
) -> Divisors:
    """Divisors of all rollouts, counted over each optimizer `step` ([N], default: one step) and all ranks. `steps` is
    the number of optimizer steps on all ranks (default: those of this rank).

    Rollouts that are later left out of the update (no signal) still count. Without `corrected`, no rollout counts as
    dropped. `max_length` is the generation limit, for losses that divide by it (`dr_grpo`).
    """
    kind = LOSSES[loss.loss].divisor
    if kind == "max_length" and (max_length is None or max_length < 1):
        raise SettingError(f"max_length={max_length}: {loss.loss} divides by it; set it to the generation limit.")
    step = torch.zeros(sequences, dtype=torch.int64, device=sequence.device) if step is None else step
    lengths = ragged.count(sequence, sequences).double()
    everyone = torch.ones_like(lengths)
    accepted_lengths, accepted = lengths, everyone
    if corrected is not None:
        accepted_lengths = ragged.total(corrected.token_keep.double(), sequence, sequences)
        accepted = corrected.keep.double()

    def over_step(values: Tensor) -> Tensor:
        sums = ragged.total(values, step, steps or ragged.steps(step))
        return (reduce(sums) if reduce else sums).clamp(min=1)[step]

    def divisor(tokens: Tensor, rollouts: Tensor) -> Tensor:
        if kind == "step":
            return over_step(tokens * rollouts)
        inner = everyone * (max_length or 1) if kind == "max_length" else tokens.clamp(min=1)
        return inner * over_step(rollouts)

    policy = divisor(
        accepted_lengths if correction.inner == "accepted" else lengths,
        accepted if correction.outer == "accepted" else everyone,
    )
    return Divisors(policy, policy if correction.mask_kl else divisor(lengths, everyone))


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sequence: Tensor,
    loss: Loss,
    divisors: Divisors,
    *,
    reference_logprobs: Tensor | None = None,
    kl_mask: Tensor | None = None,
    entropies: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a (micro-)batch of complete rollouts, all tensors [T], and its detached metrics.

    `old_logprobs` are the learner's dense ones; `logprobs.detach()` if scoring is skipped. A token of weight 0 adds
    exactly nothing to the policy term, whatever its ratio. `kl_mask` is `Corrected.token_keep` if the correction sets
    `mask_kl`. The metrics are means over the batch's tokens before masking, named as in docs/metrics.md (`policy/`),
    and `tokens`; `merge_metrics` joins those of several micro-batches.
    """
    require(
        loss.kl == 0 or reference_logprobs is not None,
        f"kl={loss.kl} needs the reference's log-probs; set kl to 0.",
    )
    active = weights > 0
    kind, rollouts = LOSSES[loss.loss], len(divisors.policy)
    objective = kind.objective(
        LossInputs(
            logprobs=torch.where(active, logprobs, 0),
            ratio=_ratio(torch.where(active, logprobs - old_logprobs, 0), sequence, rollouts, kind.ratio),
            advantages=advantages,
            clip=loss.clip,
            dual_clip=loss.dual_clip,
        )
    )
    result = -(weights * objective / divisors.policy[sequence].to(logprobs.dtype)).sum()

    metrics = {"tokens": logprobs.new_tensor(len(logprobs))}
    if entropies is not None:
        metrics["entropy"] = entropies.detach().mean()
    metrics |= _ratio_metrics(logprobs.detach() - old_logprobs, advantages, sequence, rollouts, loss)
    if reference_logprobs is not None:
        distance = logprobs - reference_logprobs
        metrics["kl_ref"] = _k3(distance.detach()).mean()
        if loss.kl > 0:
            kl = _k3(distance if kl_mask is None else torch.where(kl_mask, distance, 0))
            kl = kl if loss.kl_clamp is None else kl.clamp(max=loss.kl_clamp)
            result = result + loss.kl * (kl / divisors.kl[sequence].to(logprobs.dtype)).sum()
    return result, metrics


def merge_metrics(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Metrics of one optimizer step from those of its micro-batches on all ranks: means over `tokens`, their sum."""
    names = list(parts[0])
    table = torch.stack([torch.stack([part[name].double() for name in names]) for part in parts])
    tokens = table[:, names.index("tokens")]
    means = (table * tokens[:, None]).sum(0) / tokens.sum()
    return dict(zip(names, means.tolist())) | {"tokens": tokens.sum().item()}


def _ratio(log_ratio: Tensor, sequence: Tensor, sequences: int, level: RatioLevel) -> Tensor:
    if level == "geometric":
        means = ragged.total(log_ratio, sequence, sequences) / ragged.count(sequence, sequences).clamp(min=1)
        log_ratio = means[sequence]
    return _Exp.apply(log_ratio)


def _k3(distance: Tensor) -> Tensor:
    return _Exp.apply(-distance) - 1 + distance


class _Exp(torch.autograd.Function):
    """e^x. Where a clip has cut the gradient to 0 it stays 0, even if e^x overflows: 0 · inf would be nan."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        return torch.where(gradient == 0, gradient, gradient * result)


def _ratio_metrics(
    log_ratio: Tensor, advantages: Tensor, sequence: Tensor, sequences: int, loss: Loss
) -> dict[str, Tensor]:
    kind, (low, high) = LOSSES[loss.loss], loss.clip
    ratio = _ratio(log_ratio, sequence, sequences, kind.ratio)
    below, above = ratio < 1 - low, ratio > 1 + high
    if kind.pessimistic:  # the minimum lets a clip bind on one side only, by the advantage's sign
        below, above = below & (advantages < 0), above & (advantages > 0)
    return {"clip_fraction": (below | above).float().mean(), "update_kl": (ratio - 1 - ratio.log()).mean()}
