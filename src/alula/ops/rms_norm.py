"""RMSNorm of the residual stream after adding a branch to it, rounded where transformers' layers round."""

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton


def add_norm(stream: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """stream [B, W] + branch [B, W], and the norm of the sum in the weight's dtype. The stream may be float32 while
    weight [W] and branch are 16-bit (`alula.models.residual`). The branch may come in fp32 parts [parts, B, W]
    (`alula.ops.few_rows_linear`), whose sum is rounded to the weight's dtype first."""
    if use_triton(stream):
        return add_norm_triton(stream, branch, weight, epsilon)
    if branch is not None:
        stream = stream + (branch if branch.dim() == 2 else branch.sum(0).to(weight.dtype))
    return stream, rms_norm(stream, weight, epsilon).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def add_norm_triton(stream: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    rows, width = stream.shape
    normed = torch.empty(rows, width, dtype=weight.dtype, device=stream.device)
    total = stream if branch is None else torch.empty_like(stream)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        stream,
        stream if branch is None else branch,
        weight,
        total,
        normed,
        WIDTH=width,
        BLOCK=block,
        PARTS=-1 if branch is None else 0 if branch.dim() == 2 else len(branch),
        EPSILON=epsilon,
        num_warps=min(max(block // 256, 1), 16),
    )
    return total, normed


@triton.jit
def _add_norm(
    stream,
    branch,
    weight,
    total,
    normed,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """PARTS: those of the branch; 0 if it is whole, -1 if there is none."""
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + i
    x = tl.load(stream + at, mask=inside, other=0.0)
    scale = tl.load(weight + i, mask=inside, other=0.0)
    if PARTS >= 0:
        added = tl.load(branch + at, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            start = part * tl.num_programs(0).to(tl.int64) * WIDTH
            added += tl.load(branch + start + at, mask=inside, other=0.0)
        if PARTS > 0:
            added = added.to(scale.dtype)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(total + at, x, mask=inside)
    out = scaled(x, inverse_rms(x, WIDTH, EPSILON), scale)
    tl.store(normed + at, out.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def inverse_rms(x, SIZE: tl.constexpr, EPSILON: tl.constexpr, AXIS: tl.constexpr = 0):
    """Norms of vectors of SIZE values along an axis, padded with zeros."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, AXIS) / SIZE + EPSILON)


@triton.jit
def scaled(x, inverse, weight):
    """fp32: `rms_norm` up to its last rounding."""
    return (x.to(tl.float32) * inverse).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
