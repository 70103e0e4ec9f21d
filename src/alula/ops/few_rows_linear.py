"""Products of few rows with a weight, which decode steps read once: its bytes are what they cost.

`gated_linear` ends with the activation of an MLP. `partial_linear` shares the columns of the weight among several
programs, so that a narrow product occupies the device too; `alula.ops.rms_norm.add_norm`, which comes next in a layer,
adds the parts. Both save a launch. Products of many rows, and those of float32, are torch's.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.silu_mul import silu_mul

MOST_ROWS = 64
MOST_PARTS = 8
BLOCK_N, BLOCK_K = 64, 64
"""Rows and columns of the weight in a program's tile; of a gated product, half of the rows are the gate's."""


def gated_linear(x: Tensor, joint: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [B, K], joint [2 I, K], the gate first -> silu(gate) · up [B, I], rounded as the modules do."""
    if not _takes(x, joint, bias) or len(joint) // BLOCK_N > programs(len(x)):  # a second wave would be short
        return silu_mul(linear(x, joint, bias))
    out = torch.empty(len(x), len(joint) // 2, dtype=x.dtype, device=x.device)
    _launch(x, joint, out, parts=1, gated=True)
    return out


def partial_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [B, K], weight [N, K] -> the product [B, N], or fp32 parts of it [parts, B, N]."""
    if not _takes(x, weight, bias):
        return linear(x, weight, bias)
    parts = parts_of(len(x), *weight.shape)
    out = torch.empty(parts, len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, parts)
    return out


def parts_of(rows: int, width: int, columns: int) -> int:
    """Parts of a product, so that there are enough programs; each has a block of columns at least. Parts of many rows
    take time to write and to add: half of the programs are enough then."""
    enough = programs(rows) // (2 if rows > 32 else 1)
    return max(1, min(MOST_PARTS, enough // (width // BLOCK_N), columns // BLOCK_K))


def programs(rows: int) -> int:
    """Programs that run at once on the 132 multiprocessors of an H100 or H200: their tiles take shared memory."""
    return 264 if rows > 32 else 396


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tiles_evenly = weight.shape[0] % BLOCK_N == 0 and weight.shape[1] % BLOCK_K == 0
    plain = x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype != torch.float32
    return use_triton(x) and len(x) <= MOST_ROWS and tiles_evenly and plain and bias is None


def _launch(x: Tensor, weight: Tensor, out: Tensor, parts: int, gated: bool = False) -> None:
    _few_rows[(len(weight) // BLOCK_N, parts)](
        x,
        weight,
        out,
        len(x),
        *weight.shape,
        GATED=gated,
        PARTS=parts,
        BLOCK_M=max(16, triton.next_power_of_2(len(x))),
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=4,
        num_stages=6,
    )


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x,
    weight,
    out,
    rows,
    width,
    columns,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    HALF: tl.constexpr = BLOCK_N // 2
    if GATED:  # rows of the gate, then those of the other factor
        i = tl.arange(0, BLOCK_N)
        n = tl.program_id(0) * HALF + tl.where(i < HALF, i, width // 2 + i - HALF)
    blocks = columns // BLOCK_K
    start, end = part * blocks // PARTS * BLOCK_K, (part + 1) * blocks // PARTS * BLOCK_K
    # Transposed: the rows of the weight fill the tensor cores' tiles, however few rows x has.
    weight += n[:, None].to(tl.int64) * columns + k[None, :]
    values = x + m[None, :] * columns + k[:, None]
    inside = (m < rows)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(start, end, BLOCK_K):
        acc = tl.dot(tl.load(weight + first), tl.load(values + first, mask=inside, other=0.0), acc)
    if GATED:
        both = acc.to(x.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(both, [2, HALF, BLOCK_M]), [1, 2, 0]))
        active = (gate / (1 + tl.exp(-gate))).to(x.dtype.element_ty).to(tl.float32)
        line = tl.program_id(0) * HALF + tl.arange(0, HALF)
        tl.store(out + m[None, :] * (width // 2) + line[:, None], (active * up).to(x.dtype.element_ty), mask=inside)
    else:
        tl.store(out + (part * rows + m[None, :]) * width + n[:, None], acc, mask=inside)
