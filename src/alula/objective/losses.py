"""Policy losses as sums over tokens with explicit divisors, so that micro-batches add up to the whole step.

    ρ_t = π_θ(o_t) / π_old(o_t)    clip(ρ) = ρ within [1 − clip_low, 1 + clip_high]    w_t = correction weight

    loss = Σ_i Σ_t −w_t J_t / policy_i  +  β Σ_i Σ_t k3_t / kl_i

              J_t                            divisor of rollout i                       source
    grpo      min(ρ A, clip(ρ) A)            |o_i| · rollouts                           arXiv 2402.03300
    dr_grpo   as grpo                        max_length · rollouts                      arXiv 2503.20783
    dapo      as grpo, clip_high 0.28        tokens of the step                         arXiv 2503.14476
    gspo      as grpo, ρ = Π_t ρ_t^(1/|o|)   |o_i| · rollouts                           arXiv 2507.18071
    cispo     sg(clip(ρ)) A log π_θ          tokens of the step                         arXiv 2506.13585

    k3_t = e^−d − 1 + d,  d = log π_θ − log π_ref;  dual clip: J_t at least dual_clip · A where A < 0

Rollouts and tokens are those of the whole optimizer step on all ranks. A learner that averages gradients over
ranks multiplies the loss by the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alula.errors import require
from alula.objective import ragged
from alula.objective.correction import Corrected
from alula.objective.mismatch_metrics import Reduce
from alula.objective.settings import Correction, Loss, check

__all__ = ["Divisors", "Loss", "check", "divisors", "merge_metrics", "policy_loss"]


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
    step: Tensor | None = None,
    reduce: Reduce | None = None,
) -> Divisors:
    """Divisors of all rollouts, counted over each optimizer `step` ([N], default: one step) and all ranks.

    Taken from the whole step: rollouts that are later left out of the update (no signal) still count. Without
    `corrected` nothing counts as dropped.
    """
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
        if loss.kind in ("dapo", "cispo"):
            return over_step(tokens * rollouts)
        inner = everyone * loss.max_length if loss.max_length and loss.kind == "dr_grpo" else tokens.clamp(min=1)
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

    `old_logprobs` are the learner's dense ones, the sparse ones under `bypass`, or None in one-update mode:
    `logprobs` themselves are old. A token of weight 0 adds exactly nothing to the policy term, whatever its
    ratio. `kl_mask` is `Corrected.token_keep` where the correction sets `mask_kl`. The metrics are means over
    the batch's tokens before masking; `merge_metrics` joins those of several micro-batches.
    """
    require(
        loss.kl == 0 or reference_logprobs is not None,
        f"kl={loss.kl} needs the reference's log-probs; set kl to 0.",
    )
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    active = weights > 0
    raw_ratio = _ratio(logprobs.detach() - old, sequence, divisors, loss)
    ratio = _ratio(torch.where(active, logprobs - old, 0), sequence, divisors, loss)
    low, high = loss.clip
    clipped = ratio.clamp(1 - low, 1 + high)
    if loss.kind == "cispo":
        objective = clipped.detach() * advantages * torch.where(active, logprobs, 0)
    else:
        objective = torch.minimum(ratio * advantages, clipped * advantages)
        if loss.dual_clip is not None:
            objective = torch.where(advantages < 0, objective.maximum(loss.dual_clip * advantages), objective)
    policy = -(weights * objective / divisors.policy[sequence].to(logprobs.dtype)).sum()

    metrics = _ratio_metrics(raw_ratio, advantages, loss)
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


def _ratio(log_ratio: Tensor, sequence: Tensor, divisors: Divisors, loss: Loss) -> Tensor:
    if loss.kind == "gspo":
        sequences = len(divisors.policy)
        means = ragged.total(log_ratio, sequence, sequences) / ragged.count(sequence, sequences).clamp(min=1)
        log_ratio = means[sequence]
    return log_ratio.exp()


def _k3(distance: Tensor) -> Tensor:
    return torch.exp(-distance) - 1 + distance


def _ratio_metrics(ratio: Tensor, advantages: Tensor, loss: Loss) -> dict[str, Tensor]:
    low, high = loss.clip
    below, above = ratio < 1 - low, ratio > 1 + high
    if loss.kind != "cispo":  # the minimum lets a clip bind on one side only, by the advantage's sign
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
