"""How far the sparse sampler was from the dense policy, measured on every token before anything is masked."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from alula.rl import ragged

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks."""

PERCENTILES = (1, 5, 50, 95, 99)
REFERENCE_VETO = 1e-4
"""Sparse-RL's threshold: what the veto rates count under a correction that has no veto of its own."""


def percentiles(values: Tensor, at: tuple[int, ...] = PERCENTILES) -> Tensor:
    """Percentiles of `values` [T], T ≥ 1, linear between neighbours (torch.quantile stops at 2^24 values)."""
    ordered = values.sort().values
    rank = torch.tensor(at, dtype=torch.float64, device=values.device) / 100 * (len(values) - 1)
    below = rank.long()
    above = (below + 1).clamp(max=len(values) - 1)
    return torch.lerp(ordered[below].double(), ordered[above].double(), rank - below)


def mismatch_metrics(
    log_ratio: Tensor,
    sequence: Tensor,
    sequences: int,
    veto: float | None = None,
    clamp: float = 20.0,
    reduce: Reduce | None = None,
) -> dict[str, float]:
    """From log ξ [T] = log p_dense_old − log p_sparse of the sampled tokens:

        veto_rate         share of rollouts with some ξ < veto (it grows with length)
        veto_token_rate   share of tokens with ξ < veto
        mismatch_kl_k1    mean of −log ξ: estimates KL(sparse ‖ dense), may be negative
        mismatch_kl_k3    mean of ξ − 1 − log ξ: the same, never negative
        ess               (Σ ξ)² / (T Σ ξ²), in (0, 1]: share of the tokens that the weights leave in effect
        xi_mean, xi_min, xi_max, xi_p1, xi_p5, xi_p50, xi_p95, xi_p99

    With `reduce` they are over all ranks, except the extremes and the percentiles, which are this rank's.
    """
    safe = log_ratio.double().clamp(-clamp, clamp)
    xi = safe.exp()
    low = log_ratio < math.log(REFERENCE_VETO if veto is None else veto)
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
    extremes = torch.cat([torch.stack([xi.min(), xi.max()]), percentiles(xi)]) if len(xi) else xi.new_ones(7)
    rollouts, tokens, vetoes, lows, k1, k3, xi_sum, xi_squares, *rest = torch.cat(
        [reduce(sums) if reduce else sums, extremes]
    ).tolist()
    tokens, rollouts = max(tokens, 1.0), max(rollouts, 1.0)
    return {
        "veto_rate": vetoes / rollouts,
        "veto_token_rate": lows / tokens,
        "mismatch_kl_k1": k1 / tokens,
        "mismatch_kl_k3": k3 / tokens,
        "ess": xi_sum**2 / (tokens * xi_squares) if xi_squares else 1.0,
        "xi_mean": xi_sum / tokens,
        **dict(zip(["xi_min", "xi_max", *(f"xi_p{p}" for p in PERCENTILES)], rest)),
    }
