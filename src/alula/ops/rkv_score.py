"""R-KV's score: redundancy of keys (also used by KeyDiff), and its combination with importance.

With unit keys k̂ = k / (‖k‖ + 1e-8) and n keys:

    alignment_j  = k̂_j · Σ_i k̂_i
    C_ij         = k̂_i · k̂_j, with C_ii = 0
    last(i)      = max {j : C_ij > threshold}, 0 if there is none
    redundancy_j = mean_i C_ij after C[i, last(i)] = 0 in every row i

Source: R-KV (arXiv 2505.24133), `cal_similarity` with `retain_direction="last"`, for each head separately.

The kernels never build C. Its column sums are exactly alignment_j − ‖k̂_j‖²; only last(i) needs pairs, and a scan of the
keys from the end stops as soon as every row of its tile has found one. It looks for the place of a similar key only in
tiles whose largest products show that there is one. No floats are added atomically, so the same keys give the same bits
in any batch.

The last step pools the importance A over neighbouring keys and subtracts the redundancy's softmax P:

    score[j] = mix · max of A[j'] over |j' − j| ≤ kernel // 2  −  (1 − mix) · P[j]

One kernel replaces four of torch. It rounds after every product as torch does, so that both give equal bits.
"""

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from alula.ops.dispatch import tl, triton, use_triton

EPSILON = 1e-8
FIXED_POINT = 2.0**40
TORCH_ROWS = 1024
"""Rows of C that the torch reference computes at a time."""


def redundancy(keys: Tensor, threshold: float) -> Tensor:
    """keys [R, n, D] -> fp32 [R, n]. `threshold` lies in [0, 1)."""
    return redundancy_triton(keys, threshold) if use_triton(keys) else redundancy_torch(keys, threshold)


def alignment(keys: Tensor) -> Tensor:
    """keys [R, n, D] -> fp32 [R, n]."""
    return alignment_triton(keys) if use_triton(keys) else alignment_torch(keys)


# One head at a time: memory stays small, and the result is independent of the batch size.
def redundancy_torch(keys: Tensor, threshold: float) -> Tensor:
    return torch.stack([_mean_similarity(_unit(head), threshold) for head in keys])


def alignment_torch(keys: Tensor) -> Tensor:
    return torch.stack([unit @ unit.sum(0) for unit in map(_unit, keys)])


def _unit(keys: Tensor) -> Tensor:
    keys = keys.float()
    return keys / (keys.norm(dim=-1, keepdim=True) + EPSILON)


def _mean_similarity(unit: Tensor, threshold: float) -> Tensor:
    n = len(unit)
    slots = torch.arange(n, device=unit.device)
    total = unit.new_zeros(n)
    for rows in slots.split(TORCH_ROWS):
        similarity = unit[rows] @ unit.T
        similarity.scatter_(1, rows[:, None], 0)
        last = torch.where(similarity > threshold, slots, 0).amax(1, keepdim=True)
        total += similarity.scatter_(1, last, 0).sum(0)
    return total / n


def alignment_triton(keys: Tensor) -> Tensor:
    keys = keys.contiguous()
    heads, n, dim = keys.shape
    inverse, anchor = _sum_of_units(keys)
    aligned = torch.empty_like(inverse)
    shape = {"DIM": dim, "DIM_POW2": triton.next_power_of_2(dim)}
    _align[(heads * triton.cdiv(n, 64),)](keys, inverse, anchor, aligned, n, BLOCK=64, num_warps=4, **shape)
    return aligned


def _sum_of_units(keys: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [R, n] 1 / (‖k‖ + 1e-8) and [R, D] the sum of all unit keys."""
    heads, n, dim = keys.shape
    inverse = torch.empty(heads, n, dtype=torch.float32, device=keys.device)
    anchor = torch.empty(heads, dim, dtype=torch.float32, device=keys.device)
    shape = {"DIM": dim, "DIM_POW2": triton.next_power_of_2(dim)}
    _sum_units[(heads,)](keys, inverse, anchor, n, EPS=EPSILON, BLOCK=128, num_warps=8, **shape)
    return inverse, anchor


def redundancy_triton(keys: Tensor, threshold: float) -> Tensor:
    keys = keys.contiguous()
    heads, n, dim = keys.shape
    inverse, anchor = _sum_of_units(keys)
    last = torch.empty(heads, n, dtype=torch.int32, device=keys.device)
    removed = torch.empty(heads, n, dtype=torch.int64, device=keys.device)
    aligned, out = torch.empty_like(inverse), torch.empty_like(inverse)
    dim_pow2 = triton.next_power_of_2(dim)
    block_i, block_j, warps = scan_tile(keys)
    _find_last[(heads * triton.cdiv(n, block_i),)](
        keys,
        inverse,
        last,
        removed,
        n,
        threshold,
        DIM=dim,
        DIM_POW2=max(16, dim_pow2),
        BLOCK_I=block_i,
        BLOCK_J=block_j,
        num_warps=warps,
    )
    _align_and_remove_last[(heads * triton.cdiv(n, 64),)](
        keys,
        inverse,
        anchor,
        last,
        aligned,
        removed,
        n,
        FIXED_POINT=FIXED_POINT,
        DIM=dim,
        DIM_POW2=dim_pow2,
        BLOCK=64,
        num_warps=4,
    )
    _combine[(triton.cdiv(heads * n, 1024),)](
        aligned, inverse, removed, out, n, heads * n, EPS=EPSILON, FIXED_POINT=FIXED_POINT, BLOCK=1024, num_warps=4
    )
    return out


def scan_tile(keys: Tensor) -> tuple[int, int, int]:
    """Rows and columns of the scan's tiles, and its warps: traffic falls with the rows, registers grow with both.
    These hold three tiles per multiprocessor at dimension 128, without spilling."""
    if keys.dtype == torch.float32:
        return 32, 32, 8
    return (128, 64, 4) if keys.shape[-1] <= 128 else (64, 32, 8)


# `n` is never specialised on: the kernels must not be compiled again for another length.
@triton.jit(do_not_specialize=["n"])
def _sum_units(
    keys,
    inverse,
    anchor,
    n,
    EPS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    keys += head * n * DIM
    d = tl.arange(0, DIM_POW2)
    total = tl.zeros([DIM_POW2], tl.float32)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = (i < n)[:, None] & (d < DIM)[None, :]
        key = tl.load(keys + i[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / (tl.sqrt(tl.sum(key * key, 1)) + EPS)
        tl.store(inverse + head * n + i, scale, mask=i < n)
        total += tl.sum(key * scale[:, None], 0)
    tl.store(anchor + head * DIM + d, total, mask=d < DIM)


@triton.jit(do_not_specialize=["n"])
def _align(
    keys,
    inverse,
    anchor,
    aligned,
    n,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(n, BLOCK)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    j = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM_POW2)
    inside = (j < n)[:, None] & (d < DIM)[None, :]
    keys += head * n * DIM
    key = tl.load(keys + j[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.load(anchor + head * DIM + d, mask=d < DIM, other=0.0)
    scale = tl.load(inverse + head * n + j, mask=j < n, other=0.0)
    tl.store(aligned + head * n + j, tl.sum(key * total[None, :], 1) * scale, mask=j < n)


@triton.jit(do_not_specialize=["n"])
def _find_last(
    keys,
    inverse,
    out,
    removed,
    n,
    threshold,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """last(i) for one tile of rows. Sets `removed` to zero for the kernel after it."""
    tiles = tl.cdiv(n, BLOCK_I)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    keys += head * n * DIM
    inverse += head * n
    i = (tl.program_id(0) % tiles) * BLOCK_I + tl.arange(0, BLOCK_I)
    d = tl.arange(0, DIM_POW2)
    in_dim = (d < DIM)[None, :]
    key = tl.load(keys + i[:, None] * DIM + d[None, :], mask=(i < n)[:, None] & in_dim, other=0.0)
    scale = tl.load(inverse + i, mask=i < n, other=1.0)
    least = threshold / scale
    last = tl.where(i < n, -1, 0)
    searching = 1
    first = (tl.cdiv(n, BLOCK_J) - 1) * BLOCK_J
    while (first >= 0) & (searching > 0):
        j = first + tl.arange(0, BLOCK_J)
        other = tl.load(keys + j[:, None] * DIM + d[None, :], mask=(j < n)[:, None] & in_dim, other=0.0)
        other_scale = tl.load(inverse + j, mask=j < n, other=0.0)  # 0 is never above a threshold of 0 or more
        product = tl.dot(key, tl.trans(other), input_precision="ieee") * other_scale[None, :]
        found = (last < 0) & (tl.max(product, 1) > least)  # perhaps only the key itself
        if tl.max(found.to(tl.int32), 0) > 0:
            similar = (product > least[:, None]) & (i[:, None] != j[None, :])
            last = tl.maximum(last, tl.max(tl.where(similar, j[None, :], -1), 1))
            searching = tl.max((last < 0).to(tl.int32), 0)
        first -= BLOCK_J
    tl.store(out + head * n + i, tl.maximum(last, 0), mask=i < n)
    tl.store(removed + head * n + i, tl.zeros([BLOCK_I], tl.int64), mask=i < n)


@triton.jit(do_not_specialize=["n"])
def _align_and_remove_last(
    keys,
    inverse,
    anchor,
    last,
    aligned,
    removed,
    n,
    FIXED_POINT: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For one tile of rows, the alignment, and Σ over {i : last(i) = j} of C_ij; a separate kernel, since it would
    double the scan's registers. The sum is in fixed point: integers may be added atomically in any order with equal
    bits."""
    tiles = tl.cdiv(n, BLOCK)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    keys += head * n * DIM
    inverse += head * n
    i = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM_POW2)
    inside = (i < n)[:, None] & (d < DIM)[None, :]
    j = tl.load(last + head * n + i, mask=i < n, other=0)
    key = tl.load(keys + i[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(keys + j[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.load(anchor + head * DIM + d, mask=d < DIM, other=0.0)
    scale = tl.load(inverse + i, mask=i < n, other=0.0)
    tl.store(aligned + head * n + i, tl.sum(key * total[None, :], 1) * scale, mask=i < n)
    similarity = tl.where(i == j, 0.0, tl.sum(key * other, 1) * (scale * tl.load(inverse + j)))
    tl.atomic_add(removed + head * n + j, (similarity * FIXED_POINT).to(tl.int64), mask=i < n)


@triton.jit(do_not_specialize=["n", "size"])
def _combine(
    aligned, inverse, removed, out, n, size, EPS: tl.constexpr, FIXED_POINT: tl.constexpr, BLOCK: tl.constexpr
):
    """(alignment_j − ‖k̂_j‖² − what was removed from column j) / n"""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(aligned + at, mask=at < size, other=0.0)
    norm = 1.0 - EPS * tl.load(inverse + at, mask=at < size, other=0.0)  # ‖k̂_j‖
    less = tl.load(removed + at, mask=at < size, other=0).to(tl.float32) / FIXED_POINT
    tl.store(out + at, (total - norm * norm - less) / n, mask=at < size)


def pool_and_mix(important: Tensor, redundant: Tensor, kernel: int, mix: float) -> Tensor:
    """fp32 [R, n] twice -> fp32 [R, n]. `kernel` is odd; 1 does not pool."""
    if not use_triton(important):
        return pool_and_mix_torch(important, redundant, kernel, mix)
    rows, n = important.shape
    out = torch.empty_like(important)
    _pool_and_mix[(rows, triton.cdiv(n, 1024))](
        important, redundant, out, n, mix, 1 - mix, KERNEL=kernel, BLOCK=1024, num_warps=4, enable_fp_fusion=False
    )
    return out


def pool_and_mix_torch(important: Tensor, redundant: Tensor, kernel: int, mix: float) -> Tensor:
    return mix * max_pool1d(important, kernel, stride=1, padding=kernel // 2) - (1 - mix) * redundant


@triton.jit(do_not_specialize=["n"])
def _pool_and_mix(important, redundant, out, n, mix, rest, KERNEL: tl.constexpr, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64) * n
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for step in tl.static_range(KERNEL):
        near = j + step - KERNEL // 2
        value = tl.load(important + line + near, mask=(near >= 0) & (near < n), other=float("-inf"))
        best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
    score = mix * best - rest * tl.load(redundant + line + j, mask=j < n, other=0.0)
    tl.store(out + line + j, score, mask=j < n)
