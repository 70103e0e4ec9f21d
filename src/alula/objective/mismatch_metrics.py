"""How far the sparse sampler was from the dense policy, measured on every token before anything is masked."""

from collections.abc import Callable

import torch
from torch import Tensor

from alula.objective import ragged
from alula.objective.veto import below_veto

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks."""

PERCENTILES = (1, 5, 50, 95, 99)


def percentiles(values: Tensor, at: tuple[int, ...] = PERCENTILES, reduce: Reduce | None = None) -> Tensor:
    """Percentiles of float64 `values` [T], of all ranks together with `reduce`; linear between neighbours, 1 where
    there is no value at all. (torch.quantile stops at 2^24 values.)"""
    count = torch.tensor([len(values)], device=values.device)
    last = (reduce(count) if reduce else count) - 1
    place = torch.tensor(at, dtype=torch.float64, device=values.device) / 100 * last.clamp(min=0)
    below = place.long()
    neighbours = torch.cat([below, torch.minimum(below + 1, last)])
    lower, upper = order_statistics(values, neighbours, reduce).chunk(2)
    return torch.where(last >= 0, torch.lerp(lower, upper, place - below), 1.0)


def order_statistics(values: Tensor, places: Tensor, reduce: Reduce | None = None) -> Tensor:
    """The values at `places` (from 0, ascending) of all ranks' float64 `values` sorted together.

    On several ranks by bisection over the 2^64 bit patterns, which as integers (those of negative numbers mirrored)
    have the order of the numbers: every round sums over ranks how many values do not exceed the middle. Exact, and
    only counts are sent.
    """
    if reduce is None and len(values):
        return values.sort().values[places]
    mirror = torch.iinfo(torch.int64).max
    bits = values.view(torch.int64)
    keys = torch.where(bits < 0, bits ^ mirror, bits).sort().values
    low, high = torch.full_like(places, ~mirror), torch.full_like(places, mirror)
    for _ in range(64):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean without overflow
        counts = torch.searchsorted(keys, middle, right=True)
        reached = (reduce(counts) if reduce else counts) > places
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    return torch.where(high < 0, high ^ mirror, high).view(torch.float64)


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

    With `reduce` they are over all ranks.
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
    points = percentiles(xi, (0, 100, *PERCENTILES), reduce)
    rollouts, tokens, vetoes, lows, k1, k3, xi_sum, xi_squares, *rest = torch.cat(
        [reduce(sums) if reduce else sums, points]
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
