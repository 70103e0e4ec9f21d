"""Top-k of every row as ascending indices: the same rule for eviction and selection.

Ties go to the lower index and -0.0 equals 0.0, so that the choice depends only on the scores.
"""

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton

LARGEST_ROW = 32768
"""Longest row that one program holds in registers; longer ones are sorted."""


def top_indices(scores: Tensor, count: int, first: int = 0, window: int = 0) -> Tensor:
    """fp32 [R, n] -> int32 [R, count], ascending. The first `first` and the last `window` are always among them."""
    if use_triton(scores) and scores.shape[1] <= LARGEST_ROW:
        return top_indices_triton(scores, count, first, window)
    return top_indices_torch(scores, count, first, window)


def top_indices_torch(scores: Tensor, count: int, first: int = 0, window: int = 0) -> Tensor:
    rows, n = scores.shape
    order = best_first(scores[:, first : n - window])[:, : count - first - window]
    slots = torch.arange(n, device=scores.device).expand(rows, n)
    return torch.cat([slots[:, :first], order.sort(-1).values + first, slots[:, n - window :]], 1).int()


def best_first(scores: Tensor) -> Tensor:
    """Indices along the last dimension by descending score."""
    clean = torch.nan_to_num(scores, nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")) + 0.0
    return torch.sort(clean, dim=-1, descending=True, stable=True).indices


def top_indices_triton(scores: Tensor, count: int, first: int = 0, window: int = 0) -> Tensor:
    rows, n = scores.shape
    out = torch.empty(rows, count, dtype=torch.int32, device=scores.device)
    block = triton.next_power_of_2(n)
    _top_indices[(rows,)](
        scores, out, scores.stride(0), n, count, first, window, BLOCK=block, num_warps=warps_for(block)
    )
    return out


def warps_for(block: int) -> int:
    return min(16, max(4, block // 512))


@triton.jit
def ordered_bits(scores):
    """fp32 -> int32 with the same order; NaN counts as -inf, -0.0 as 0.0."""
    scores = tl.where(scores == scores, scores, float("-inf"))
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def choose_largest(order, valid, count):
    """Mask of the `count` largest valid entries, by bisection on their bits; ties go to the lower index."""
    # Bit by bit from the sign down, in two's complement: is the count-th largest at least the candidate? A candidate
    # with exactly `count` entries above it needs no further bits.
    enough = tl.sum(((order >= 0) & valid).to(tl.int32), 0)
    threshold = tl.where(enough >= count, 0, -2147483648)
    bit = 30
    while (bit >= 0) & (enough != count):
        candidate = threshold | (1 << bit)
        enough = tl.sum(((order >= candidate) & valid).to(tl.int32), 0)
        threshold = tl.where(enough >= count, candidate, threshold)
        bit -= 1
    above = (order > threshold) & valid
    ties = (order == threshold) & valid
    room = count - tl.sum(above.to(tl.int32), 0)
    return above | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= room))


# No specialisation on lengths: the kernel must not be compiled again for another prompt or budget.
@triton.jit(do_not_specialize=["n", "count", "first", "window"])
def _top_indices(scores, out, row_stride, n, count, first, window, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    valid = i < n
    free = (i >= first) & (i < n - window)
    order = ordered_bits(tl.load(scores + row * row_stride + i, mask=valid, other=float("-inf")))
    chosen = choose_largest(order, free, count - first - window) | (valid & ~free)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(out + row * count + place, i, mask=chosen)
