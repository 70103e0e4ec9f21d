"""Weights and keep mask for a dense learner that trains on a sparse policy's rollouts.

    ξ_t = p_dense_old(o_t) / p_sparse(o_t),  clamped to e^±20, never differentiated

    per rollout   sequence ξ = Π_t ξ_t        geometric ξ = (Π_t ξ_t)^(1/|o|)
    weights       1, or ξ at the level `weight`, at most `cap`, divided by their mean with `batch_normalise`
    mask          drop tokens or rollouts with ξ at the level `mask` outside [mask_low, mask_high]
    veto          drop a rollout if any ξ_t < veto

Numbers and sources of the presets: docs/corrections.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from alula.objective import ragged
from alula.objective.settings import PRESETS, Correction
from alula.objective.veto import below_veto

__all__ = ["PRESETS", "Corrected", "Correction", "Reduce", "correct"]

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks."""


@dataclass(frozen=True)
class Corrected:
    """What the loss does with each of T tokens and N rollouts."""

    weights: Tensor
    """[T]: factor of each token's clipped objective; 0 where dropped. No gradient."""
    keep: Tensor
    """bool [N]: false for rollouts that are dropped whole."""
    token_keep: Tensor
    """bool [T]: false for dropped tokens."""
    capped: Tensor
    """bool [T]: tokens whose weight was cut to `Correction.cap`."""
    first_vetoed: Tensor
    """int64 [N]: index within the rollout of its first token with ξ < veto, -1 if there is none."""

    @classmethod
    def none(cls, sequence: Tensor, sequences: int) -> "Corrected":
        """No correction: weight 1 for every token of `sequences` rollouts."""
        off = torch.zeros_like(sequence, dtype=torch.bool)
        keep = torch.ones(sequences, dtype=torch.bool, device=sequence.device)
        first = torch.full((sequences,), -1, device=sequence.device)
        return cls(torch.ones_like(sequence, dtype=torch.float32), keep, ~off, off, first)


@torch.no_grad()
def correct(
    dense_old_logprobs: Tensor,
    sparse_logprobs: Tensor,
    sequence: Tensor,
    correction: Correction,
    *,
    sequences: int | None = None,
    step: Tensor | None = None,
    steps: int | None = None,
    reduce: Reduce | None = None,
) -> Corrected:
    """Apply `correction` to log-probs [T]; `sequence` [T] is the rollout of each token (`ragged.flatten` if padded).

    `step` [N] numbers the optimizer step of each rollout (default: one step for all) and `steps` is their number on all
    ranks (default: those of this rank). `reduce` sums a tensor over ranks. `batch_normalise` takes its mean over the
    whole step on all ranks, so packing changes nothing. The metrics are in `alula.objective.mismatch_metrics`.
    """
    if sequences is None:
        sequences = int(sequence.max()) + 1 if len(sequence) else 0
    log_ratio = dense_old_logprobs - sparse_logprobs

    weights = torch.ones_like(log_ratio)
    capped = torch.zeros_like(log_ratio, dtype=torch.bool)
    if correction.weight != "none":
        weights = _ratio(log_ratio, sequence, sequences, correction.weight, correction.clamp)
        if correction.cap is not None:
            capped = weights > correction.cap
            weights = weights.clamp(max=correction.cap)
        if correction.batch_normalise:
            weights = weights / _mean_weight(weights, sequence, sequences, correction.weight, step, steps, reduce)

    in_band = spared = torch.ones_like(capped)
    if correction.mask != "none":
        ratio = _ratio(log_ratio, sequence, sequences, correction.mask, correction.clamp)
        low, high = correction.mask_low or 0.0, correction.mask_high or math.inf
        in_band = (ratio >= low) & (ratio <= high)
    first_vetoed = torch.full((sequences,), -1, device=sequence.device)
    if correction.veto is not None:
        first_vetoed = ragged.first(below_veto(log_ratio, correction.veto), sequence, sequences)
        spared = first_vetoed[sequence] < 0
        if correction.prefix_only:
            spared |= ragged.position(sequence, sequences) < first_vetoed[sequence]

    token_keep, keep = in_band & spared, _kept(in_band, first_vetoed, sequence, correction)
    return Corrected(torch.where(token_keep, weights, 0), keep, token_keep, capped, first_vetoed)


def _kept(in_band: Tensor, first_vetoed: Tensor, sequence: Tensor, correction: Correction) -> Tensor:
    """bool [N]. A veto or a mask at rollout level drops a rollout; a mask of single tokens does not."""
    keep = first_vetoed != 0 if correction.prefix_only else first_vetoed < 0
    if correction.mask in ("sequence", "geometric"):
        keep[sequence[~in_band]] = False
    return keep


def _ratio(log_ratio: Tensor, sequence: Tensor, sequences: int, level: str, clamp: float) -> Tensor:
    """[T]: ξ at a level; all tokens of a rollout share its ξ."""
    if level != "token":
        rollout = ragged.total(log_ratio, sequence, sequences)
        if level == "geometric":
            rollout = rollout / ragged.count(sequence, sequences).clamp(min=1)
        log_ratio = rollout[sequence]
    return log_ratio.clamp(-clamp, clamp).exp()


def _mean_weight(
    weights: Tensor,
    sequence: Tensor,
    sequences: int,
    level: str,
    step: Tensor | None,
    steps: int | None,
    reduce: Reduce | None,
) -> Tensor:
    """The mean weight of each token's optimizer step, [T]: over its tokens, or over its rollouts."""
    step = torch.zeros(sequences, dtype=torch.int64, device=sequence.device) if step is None else step
    steps = steps or ragged.steps(step)
    share = torch.ones_like(weights, dtype=torch.float64)
    if level != "token":
        share /= ragged.count(sequence, sequences)[sequence]
    token_step = step[sequence]
    sums = torch.stack([ragged.total(share * weights, token_step, steps), ragged.total(share, token_step, steps)])
    sums = reduce(sums) if reduce else sums
    mean = sums[0] / sums[1].clamp(min=1)
    return torch.where(mean > 1e-8, mean, 1.0).to(weights.dtype)[token_step]
