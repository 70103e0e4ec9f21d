"""The policy loss of a micro-batch: token sums with explicit divisors, so that micro-batches add up to the step.

    loss = Σ_i Σ_t −w_t J_t / policy_i  +  β Σ_i Σ_t k3_t / kl_i
    k3_t = e^−d − 1 + d,  d = log π_θ − log π_ref

J_t is one of the functions in `alula.objective.losses`. Rollouts and tokens are counted over the whole optimizer step
on all ranks. A learner that averages gradients over ranks multiplies the loss by the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alula.errors import SettingError, require
from alula.objective import ragged
from alula.objective.correction import Corrected
from alula.objective.losses import LOSSES, LossInputs, RatioLevel
from alula.objective.mismatch_metrics import Reduce
from alula.objective.settings import Correction, Loss


@dataclass(frozen=True)
class Divisors:
    """What each rollout's token sum is divided by, float64 [N]."""

    policy: Tensor
    kl: Tensor

    def rows(self, rollouts: Tensor) -> "Divisors":
        """Those of a micro-batch's rollouts, in its own order."""
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
    reduce: Reduce | None = None,
) -> Divisors:
    """Divisors of all rollouts, counted over each optimizer `step` ([N], default: one step) and all ranks.

    Rollouts that are later left out of the update (no signal) still count. Without `corrected`, no rollout counts as
    dropped. `max_length` is the generation limit, for losses that divide by it (`dr_grpo`).
    """
    kind = LOSSES[loss.kind].divisor
    if kind == "max_length" and (max_length is None or max_length < 1):
        raise SettingError(f"max_length={max_length}: {loss.kind} divides by it; set it to the generation limit.")
    step = torch.zeros(sequences, dtype=torch.int64, device=sequence.device) if step is None else step
    lengths = ragged.count(sequence, sequences).double()
    everyone = torch.ones_like(lengths)
    accepted_lengths, accepted = lengths, everyone
    if corrected is not None:
        accepted_lengths = ragged.total(corrected.token_keep.double(), sequence, sequences)
        accepted = corrected.keep.double()

    def over_step(values: Tensor) -> Tensor:
        sums = ragged.total(values, step, int(step.max()) + 1 if sequences else 1)
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
    old_logprobs: Tensor | None,
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
    """The loss of a (micro-)batch of whole rollouts, all tensors [T], and its detached metrics.

    `old_logprobs` are the learner's dense ones, or None in one-update mode, where `logprobs` themselves are old. A
    token of weight 0 adds exactly nothing to the policy term, whatever its ratio. `kl_mask` is `Corrected.token_keep`
    where the correction sets `mask_kl`. The metrics are means over the batch's tokens before masking; `merge_metrics`
    joins those of several micro-batches.
    """
    require(
        loss.kl == 0 or reference_logprobs is not None,
        f"kl={loss.kl} needs the reference's log-probs; set kl to 0.",
    )
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    active = weights > 0
    kind, rollouts = LOSSES[loss.kind], len(divisors.policy)
    objective = kind.objective(
        LossInputs(
            logprobs=torch.where(active, logprobs, 0),
            ratio=_ratio(torch.where(active, logprobs - old, 0), sequence, rollouts, kind.ratio),
            advantages=advantages,
            clip=loss.clip,
            dual_clip=loss.dual_clip,
        )
    )
    policy = -(weights * objective / divisors.policy[sequence].to(logprobs.dtype)).sum()

    metrics = _ratio_metrics(_ratio(logprobs.detach() - old, sequence, rollouts, kind.ratio), advantages, loss)
    result = policy
    if reference_logprobs is not None:
        distance = logprobs - reference_logprobs
        metrics["kl"] = _k3(distance.detach()).mean()
        kl = _k3(distance if kl_mask is None else torch.where(kl_mask, distance, 0))
        kl = kl if loss.kl_clamp is None else kl.clamp(max=loss.kl_clamp)
        kl_loss = loss.kl * (kl / divisors.kl[sequence].to(logprobs.dtype)).sum()
        metrics["kl_loss"] = kl_loss.detach()
        if loss.kl > 0:
            result = policy + kl_loss
    if entropies is not None:
        metrics["entropy"] = entropies.detach().mean()
    return result, metrics | {"loss": result.detach(), "policy_loss": policy.detach()}


def merge_metrics(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """One optimizer step's metrics from its micro-batches', of all ranks: losses add up, `_min` and `_max` are
    extremes, the others are means over tokens."""
    names = list(parts[0])
    table = torch.stack([torch.stack([part[name].double() for name in names]) for part in parts])
    tokens = table[:, names.index("tokens")]
    added = [name == "tokens" or name.endswith("loss") for name in names]
    share = torch.where(torch.tensor(added, device=table.device), 1.0, tokens[:, None])
    sums = (table * share).sum(0)
    values = torch.where(torch.tensor(added, device=table.device), sums, sums / sums[names.index("tokens")])
    merged = dict(zip(names, values.tolist()))
    for name, column in zip(names, table.unbind(1)):
        if name.endswith(("_min", "_max")):
            merged[name] = (column.min() if name.endswith("_min") else column.max()).item()
    return merged


def _ratio(log_ratio: Tensor, sequence: Tensor, sequences: int, level: RatioLevel) -> Tensor:
    if level == "geometric":
        means = ragged.total(log_ratio, sequence, sequences) / ragged.count(sequence, sequences).clamp(min=1)
        log_ratio = means[sequence]
    return log_ratio.exp()


def _k3(distance: Tensor) -> Tensor:
    return torch.exp(-distance) - 1 + distance


def _ratio_metrics(ratio: Tensor, advantages: Tensor, loss: Loss) -> dict[str, Tensor]:
    low, high = loss.clip
    below, above = ratio < 1 - low, ratio > 1 + high
    if LOSSES[loss.kind].pessimistic:  # the minimum lets a clip bind on one side only, by the advantage's sign
        below, above = below & (advantages < 0), above & (advantages > 0)
    metrics = {
        "tokens": ratio.new_tensor(len(ratio)),
        "clip_fraction": (below | above).float().mean(),
        "clip_fraction_low": below.float().mean(),
        "clip_fraction_high": above.float().mean(),
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "update_kl": (ratio - 1 - ratio.log()).mean(),
    }
    if loss.dual_clip is not None:
        metrics["dual_clip_fraction"] = ((ratio > loss.dual_clip) & (advantages < 0)).float().mean()
    return metrics
