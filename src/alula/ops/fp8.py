"""KV in 8 bits: e4m3 values with one scale per token and KV head, which moves with the token.

    scale = the smallest power of two with max over d of |x_d| ≤ 448 · scale
    x_d   ≈ scale · e4m3(x_d / scale)

e4m3 has three bits after the leading one at any scale, so a power of two costs no precision. It takes one byte, its
exponent (E8M0 of the MX formats). And scale · e4m3 is exact in bfloat16 and float32: prompts, decode steps, evictors
and selectors read the same numbers, whatever kernel they run in.
"""

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton

DTYPE = torch.float8_e4m3fn


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> e4m3 [..., D] and the scales' exponents, uint8 [...]. What is not finite becomes NaN."""
    return quantise_triton(x) if use_triton(x) and x.dim() == 3 else quantise_torch(x)


def quantise_torch(x: Tensor) -> tuple[Tensor, Tensor]:
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


def quantise_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """One launch for [T, H, D]; the last dimension is contiguous."""
    tokens, heads, dim = x.shape
    stored = torch.empty(x.shape, dtype=DTYPE, device=x.device)
    exponent = torch.empty(tokens, heads, dtype=torch.uint8, device=x.device)
    width = triton.next_power_of_2(dim)
    _quantise[(tokens, heads)](x, stored, exponent, x.stride(0), x.stride(1), DIM=dim, DIM_POW2=width, num_warps=1)
    return stored, exponent


@triton.jit
def _quantise(x, stored, exponents, x_row, x_head, DIM: tl.constexpr, DIM_POW2: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, DIM_POW2)
    value, exponent = quantise_vector(tl.load(x + row * x_row + head * x_head + d, mask=d < DIM, other=0.0))
    place = row * tl.num_programs(1) + head
    tl.store(stored + place * DIM + d, value, mask=d < DIM)
    tl.store(exponents + place, exponent)


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
