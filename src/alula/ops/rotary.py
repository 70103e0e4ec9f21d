"""Rotary position embedding (rotate-half) of queries and keys, after a norm per head if the model has one.

It rounds after the norm, its weight, each product and the sum, as transformers' modules do.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.rms_norm import inverse_rms, rms_norm, scaled


class Rotary(NamedTuple):
    """How the new queries and keys of a layer are rotated."""

    cos: Tensor
    sin: Tensor
    """[positions, D] each; for packed tokens, those of each token"""
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    """[D]: weights of the norms per head (Qwen3); both or none"""
    epsilon: float = 0.0


def rotate(x: Tensor, norm: Tensor | None, rotary: Rotary) -> Tensor:
    """[T, H, D] -> [T, H, D], with the cos and sin [T, D] of the tokens' positions."""
    return rotate_triton(x, norm, rotary) if use_triton(x) else rotate_torch(x, norm, rotary)


def rotate_torch(x: Tensor, norm: Tensor | None, rotary: Rotary) -> Tensor:
    if norm is not None:
        x = rms_norm(x, norm, rotary.epsilon)
    first, second = x.chunk(2, -1)
    return x * rotary.cos[:, None] + torch.cat((-second, first), -1) * rotary.sin[:, None]


def rotate_triton(x: Tensor, norm: Tensor | None, rotary: Rotary) -> Tensor:
    """The last dimension of x is contiguous."""
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = 16
    _rotate[(triton.cdiv(tokens, block), heads)](
        x,
        x if norm is None else norm,
        rotary.cos,
        rotary.sin,
        out,
        tokens,
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        DIM=dim,
        DIM_POW2=triton.next_power_of_2(dim),
        NORM=norm is not None,
        EPSILON=rotary.epsilon,
        BLOCK=block,
        num_warps=4,
    )
    return out


# No specialisation on the number of tokens: the kernel must not be compiled again for another prompt.
@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    x,
    norm,
    cos,
    sin,
    out,
    tokens,
    x_row,
    x_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    NORM: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of BLOCK tokens."""
    head = tl.program_id(1)
    t = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    d = tl.arange(0, DIM_POW2)
    inside = (t < tokens)[:, None] & (d < DIM)[None, :]
    angle = t[:, None] * DIM + d[None, :]
    row_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    row_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    line = x + t[:, None] * x_row + head * x_head
    turned = rotated_tile(line, inside, norm, row_cos, row_sin, DIM, DIM_POW2, NORM, EPSILON)
    tl.store(out + (t[:, None] * HEADS + head) * DIM + d[None, :], turned, mask=inside)


@triton.jit
def rotated_tile(
    line, inside, norm, cos, sin, DIM: tl.constexpr, DIM_POW2: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr
):
    """The vectors at the pointers line [N, 1], 0 where the mask inside [N, D] is; cos and sin [N, D] or [1, D]."""
    d = tl.arange(0, DIM_POW2)
    partner = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    own = tl.load(line + d[None, :], mask=inside, other=0.0)
    other = tl.load(line + partner[None, :], mask=inside, other=0.0)
    if NORM:
        inverse = inverse_rms(own, DIM, EPSILON, AXIS=1)[:, None]
        own = scaled(own, inverse, tl.load(norm + d, mask=d < DIM, other=0.0)[None, :]).to(own.dtype)
        other = scaled(other, inverse, tl.load(norm + partner, mask=d < DIM, other=0.0)[None, :]).to(own.dtype)
    return turn(own, other, cos, sin, (d < DIM // 2)[None, :])


@triton.jit
def turn(own, other, cos, sin, first):
    """The rotated values; `other` are their partners, `first` whether they are in the first half."""
    turned = other.to(tl.float32) * tl.where(first, -1.0, 1.0)
    straight = (own.to(tl.float32) * cos).to(own.dtype).to(tl.float32)
    return (straight + (turned * sin).to(own.dtype).to(tl.float32)).to(own.dtype)


@triton.jit
def rotated_vector(
    x, norm, cos, sin, DIM: tl.constexpr, DIM_POW2: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr
):
    """The vector at x, padded with zeros; cos and sin are its row's values, padded too."""
    d = tl.arange(0, DIM_POW2)
    partner = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    own = tl.load(x + d, mask=d < DIM, other=0.0)
    other = tl.load(x + partner, mask=d < DIM, other=0.0)
    if NORM:
        inverse = inverse_rms(own, DIM, EPSILON)
        own = scaled(own, inverse, tl.load(norm + d, mask=d < DIM, other=0.0)).to(own.dtype)
        other = scaled(other, inverse, tl.load(norm + partner, mask=d < DIM, other=0.0)).to(other.dtype)
    return turn(own, other, cos, sin, d < DIM // 2)
