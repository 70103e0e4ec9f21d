"""Which implementation runs: Triton on CUDA tensors, the torch reference everywhere else.

`ALULA_TRITON_INTERPRET=1` (with `TRITON_INTERPRET=1`) sends CPU tensors through the Triton kernels too: that
is how the tests check them without a GPU. A CPU install without Triton works; its kernels are never called.
"""

import os
from types import SimpleNamespace
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only install: the kernels below are defined but never launched
    triton: Any = SimpleNamespace(jit=lambda function: function)  # type: ignore[no-redef]
    tl: Any = SimpleNamespace(constexpr=object)  # type: ignore[no-redef]

__all__ = ["tl", "triton", "use_triton"]


def use_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda or os.environ.get("ALULA_TRITON_INTERPRET") == "1"
