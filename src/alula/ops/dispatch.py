"""Selects the implementation: Triton on CUDA tensors, the torch reference elsewhere.

`ALULA_TRITON_INTERPRET=1` (with `TRITON_INTERPRET=1`) runs CPU tensors through the Triton kernels too, so that tests
can check them without a GPU. Alula works without Triton; its kernels are never called then.
"""

import os
from typing import Any

from torch import Tensor


class _Absent:
    """Stub if Triton is not installed: kernels can be defined but not launched."""

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

__all__ = ["interpreted", "tl", "triton", "use_triton"]


def use_triton(tensor: Tensor) -> bool:
    return INSTALLED and (tensor.is_cuda or os.environ.get("ALULA_TRITON_INTERPRET") == "1")


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which knows no assembly."""
    return os.environ.get("TRITON_INTERPRET") == "1"
