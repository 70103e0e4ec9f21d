"""Rotary position embedding (rotate-half) of queries and keys, after a norm per head if the model has one.

It rounds after the norm, its weight, each product and the sum, as transformers' modules do.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton
from alula.ops.rms_norm import inverse_rms, rms_norm, scaled


class Rotary(NamedTuple):
    """How the new queries and keys of a layer are rotated."""

    cos: Tensor
    sin: Tensor
    """[B, D] each, of the rows' positions"""
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    """[D]: weights of the norms per head (Qwen3); both or none"""
    epsilon: float = 0.0


def rotate(x: Tensor, norm: Tensor | None, rotary: Rotary) -> Tensor:
    """[B, H, D] -> [B, H, D]"""
    if norm is not None:
        x = rms_norm(x, norm, rotary.epsilon)
    first, second = x.chunk(2, -1)
    return x * rotary.cos[:, None] + torch.cat((-second, first), -1) * rotary.sin[:, None]


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
    turned = other.to(tl.float32) * tl.where(d < DIM // 2, -1.0, 1.0)
    straight = (own.to(tl.float32) * cos).to(own.dtype).to(tl.float32)
    return (straight + (turned * sin).to(own.dtype).to(tl.float32)).to(own.dtype)
