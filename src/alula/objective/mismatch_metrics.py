"""Metrics of the mismatch between sparse sampler and dense policy, under the names of docs/metrics.md (`mismatch/`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alula.objective import ragged
from alula.objective.correction import Corrected
from alula.objective.veto import below_veto

Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks, on every rank."""

PERCENTILES = (1, 5, 50, 95, 99)


@torch.no_grad()
def mismatch_metrics(
    log_ratio: Tensor,
    sequence: Tensor,
    sequences: int,
    veto: float | None = None,
    clamp: float = 20.0,
    gather: Gather = lambda value: [value],
) -> dict[str, float]:
    """Metrics of log ξ [T] = log p_dense_old − log p_sparse over all sampled tokens, before any of them is dropped:

        veto_rate         share of rollouts with some ξ < veto (it grows with length)
        veto_rate_token   share of tokens with ξ < veto
        kl_k1             mean of −log ξ: estimates KL(sparse ‖ dense), may be negative
        kl_k3             mean of ξ − 1 − log ξ: the same, never negative
        ess               (Σ ξ)² / (T Σ ξ²), in (0, 1]: effective sample size as a share of the tokens
        xi_p01, xi_p05, xi_p50, xi_p95, xi_p99

    They are those of all ranks together, with one call of `gather`.
    """
    safe = log_ratio.double().clamp(-clamp, clamp)
    xi = safe.exp()
    low = below_veto(log_ratio, veto)
    vetoed = ragged.first(low, sequence, sequences) >= 0
    sums = torch.stack(
        [
            xi.new_tensor(sequences),
            xi.new_tensor(len(xi)),
            vetoed.double().sum(),
            low.double().sum(),
            -log_ratio.double().sum(),
            (xi - 1 - safe).sum(),
            xi.sum(),
            xi.square().sum(),
        ]
    )
    ranks = gather((sums.cpu(), xi.cpu()))
    sums = torch.stack([rank_sums for rank_sums, _ in ranks]).sum(0)
    points = percentiles(torch.cat([rank_xi for _, rank_xi in ranks]))
    rollouts, tokens, vetoes, lows, k1, k3, xi_sum, xi_squares = sums.tolist()
    tokens, rollouts = max(tokens, 1.0), max(rollouts, 1.0)
    return {
        "veto_rate": vetoes / rollouts,
        "veto_rate_token": lows / tokens,
        "kl_k1": k1 / tokens,
        "kl_k3": k3 / tokens,
        "ess": xi_sum**2 / (tokens * xi_squares) if xi_squares else 1.0,
        **{f"xi_p{percent:02}": value for percent, value in zip(PERCENTILES, points.tolist())},
    }


@torch.no_grad()
def correction_metrics(corrected: Corrected, gather: Gather = lambda value: [value]) -> dict[str, float]:
    """Shares over all ranks: `rejected` rollouts (dropped whole), `masked_token` and `capped_token`."""
    flags = (~corrected.keep, ~corrected.token_keep, corrected.capped)
    counts = torch.stack([flag.sum() for flag in flags]).tolist()
    sizes = [corrected.keep.numel(), corrected.token_keep.numel()]
    totals = [sum(column) for column in zip(*gather([*counts, *sizes]))]
    rejected, masked, capped, rollouts, tokens = totals
    return {
        "rejected": rejected / max(rollouts, 1),
        "masked_token": masked / max(tokens, 1),
        "capped_token": capped / max(tokens, 1),
    }


def percentiles(values: Tensor) -> Tensor:
    """`PERCENTILES` of `values` [T], interpolated linearly; 1 without values. (torch.quantile stops at 2^24 values.)"""
    if not len(values):
        return values.new_ones(len(PERCENTILES))
    last = len(values) - 1
    position = torch.tensor(PERCENTILES, dtype=torch.float64, device=values.device) / 100 * last
    below = position.long()
    ordered = values.sort().values
    return torch.lerp(ordered[below], ordered[(below + 1).clamp(max=last)], position - below)
