"""The gated activation of an MLP, silu(gate) · up, rounded after each of the two as transformers' modules do."""

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton


def silu_mul(gate_up: Tensor) -> Tensor:
    """[B, 2 I], the gate first -> [B, I]"""
    if use_triton(gate_up):
        return silu_mul_triton(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, WIDTH=width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * WIDTH + i, mask=i < WIDTH, other=0.0)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    active = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + i, (active * up).to(gate.dtype), mask=i < WIDTH)
