"""R-KV's last step: pool the importance over neighbouring keys and set it against the redundancy.

    score[j] = mix · max of A[j'] over |j' − j| ≤ kernel // 2  −  (1 − mix) · P[j]

One kernel for what torch does in four. It rounds after every product as torch does, so that both give equal bits.
"""

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from alula.ops.dispatch import tl, triton, use_triton


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
