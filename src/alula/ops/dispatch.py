"""Which implementation runs: Triton on CUDA tensors, the torch reference everywhere else.

`ALULA_TRITON_INTERPRET=1` (with `TRITON_INTERPRET=1`) sends CPU tensors through the Triton kernels too: that
is how the tests check them without a GPU. An install without Triton works; its kernels are never called.
"""

import os
from typing import Any

from torch import Tensor


class _Absent:
    """Stands for Triton where it is not installed: kernels can be defined but not launched."""

    constexpr = object

    @staticmethod
    def jit(kernel: Any = None, **options: Any) -> Any:
        return kernel if kernel is not None else lambda function: function


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent()

INSTALLED = not isinstance(triton, _Absent)

__all__ = ["tl", "triton", "use_triton"]


def use_triton(tensor: Tensor) -> bool:
    return INSTALLED and (tensor.is_cuda or os.environ.get("ALULA_TRITON_INTERPRET") == "1")
