"""KV in 8 bits: e4m3 values with one scale per token and KV head, which moves with the token.

    scale = the smallest power of two with max over d of |x_d| ≤ 448 · scale
    x_d   ≈ scale · e4m3(x_d / scale)

e4m3 has three bits after the leading one at any scale, so a power of two costs no precision. It takes one byte, its
exponent (E8M0 of the MX formats). And scale · e4m3 is exact in bfloat16 and float32: prompts, decode steps, evictors
and selectors read the same numbers, whatever kernel they run in.
"""

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton

DTYPE = torch.float8_e4m3fn


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> e4m3 [..., D] and the scales' exponents, uint8 [...]. What is not finite becomes NaN."""
    x = x.float()
    top = x.abs().amax(-1)
    # 448 = 1.75 · 2^8: a significand above 1.75 needs the next exponent
    exponent = (((top.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    scaled = x * power_of_two(254 - exponent)[..., None]
    return scaled.where(x.isfinite(), float("nan")).to(DTYPE), exponent.to(torch.uint8)


def dequantise(stored: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of e4m3 [..., D] with exponents uint8 [...]."""
    return (stored.float() * power_of_two(exponent)[..., None]).to(dtype)


def power_of_two(exponent: Tensor) -> Tensor:
    """fp32 2^(exponent − 127), for exponents 1 .. 254."""
    return (exponent.int() << 23).view(torch.float32)


@triton.jit
def power_of_two_triton(exponent):
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantise_vector(x):
    """The same for one vector [D], padded with zeros."""
    x = x.to(tl.float32)
    top = tl.max(tl.abs(x), 0)
    exponent = tl.maximum(((top.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
    scaled = x * power_of_two_triton(254 - exponent)
    # Rounded to three bits, or to a multiple of 2^-9, before the cast: casts of Triton's interpreter round otherwise.
    binade = tl.maximum(tl.abs(scaled).to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000)
    magic = binade.to(tl.float32, bitcast=True) * 1572864.0  # 1.5 · 2^20
    scaled = (scaled + magic) - magic
    scaled = tl.where(tl.abs(x) < float("inf"), scaled, float("nan"))
    return scaled.to(tl.float8e4nv), exponent.to(tl.uint8)
