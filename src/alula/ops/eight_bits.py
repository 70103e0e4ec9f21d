"""KV in 8 bits: integers or e4m3 values, with one scale per token and KV head, which moves with the token.

    scale = the smallest power of two with max over d of |x_d| ≤ most · scale      most: 127 for int8, 448 for fp8
    x_d   ≈ scale · round(x_d / scale)

An integer is off by at most half a scale, whatever its size. e4m3 has three bits after the leading one, so that a value
is off by up to a sixteenth of itself: the largest ones, which most of a key's logit comes from, are off by most.

A scale takes one byte, its exponent (E8M0 of the MX formats; 255 is NaN). And scale times value is exact in bfloat16
and float32: prompts, decode steps, evictors and selectors read the same numbers, whatever kernel they run in.
"""

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What an engine calls `kv_dtype` -> how values are stored."""


def quantise(x: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., D] -> stored [..., D] and the scales' exponents, uint8 [...]. What is not finite becomes NaN; with int8 the
    whole vector does."""
    x = x.float()
    top = x.abs().amax(-1)
    if stored == torch.int8:  # 127 = 1.984375 · 2^6: a significand above 1.984375 needs the next exponent
        exponent = (((top.view(torch.int32) + 0x1FFFF) >> 23) - 6).clamp(min=1)
        rounded = (x * power_of_two(254 - exponent)[..., None]).round().where(top.isfinite()[..., None], 0.0)
        return rounded.to(stored), exponent.where(top.isfinite(), 255).to(torch.uint8)
    # 448 = 1.75 · 2^8
    exponent = (((top.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    scaled = x * power_of_two(254 - exponent)[..., None]
    return scaled.where(x.isfinite(), float("nan")).to(stored), exponent.to(torch.uint8)


def dequantise(stored: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of int8 or e4m3 [..., D] with exponents uint8 [...]."""
    return (stored.float() * power_of_two(exponent)[..., None]).to(dtype)


def power_of_two(exponent: Tensor) -> Tensor:
    """fp32 2^(exponent − 127), for exponents 1 .. 254; NaN for 255."""
    exponent = exponent.int()
    return ((exponent << 23) | ((exponent + 1) >> 8)).view(torch.float32)


@triton.jit
def power_of_two_triton(exponent):
    exponent = exponent.to(tl.int32)
    return ((exponent << 23) | ((exponent + 1) >> 8)).to(tl.float32, bitcast=True)


@triton.jit
def quantise_vector(x, INT8: tl.constexpr):
    """The same for one vector [D], padded with zeros."""
    x = x.to(tl.float32)
    finite = tl.abs(x) < float("inf")
    top = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True)
    if INT8:
        exponent = tl.maximum(((top + 0x1FFFF) >> 23) - 6, 1)
        scaled = tl.where(finite, x * power_of_two_triton(254 - exponent), 0.0)
        scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 · 2^23: to the nearest integer
        exponent = tl.where(tl.min(finite.to(tl.int32), 0) == 1, exponent, 255)
        return scaled.to(tl.int8), exponent.to(tl.uint8)
    else:
        exponent = tl.maximum(((top + 0x1FFFFF) >> 23) - 8, 1)
        scaled = x * power_of_two_triton(254 - exponent)
        # Rounded to three bits, or to a multiple of 2^-9, before the cast: casts of Triton's interpreter round
        # otherwise.
        binade = tl.maximum(tl.abs(scaled).to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000)
        magic = binade.to(tl.float32, bitcast=True) * 1572864.0  # 1.5 · 2^20
        scaled = (scaled + magic) - magic
        return tl.where(finite, scaled, float("nan")).to(tl.float8e4nv), exponent.to(tl.uint8)
