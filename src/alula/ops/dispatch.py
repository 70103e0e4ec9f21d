"""Where Triton is imported, and the one rule that picks between a Triton kernel and its torch twin.

An operation writes its kernels with `triton` and `tl` from here, so that a machine without Triton can still
import them, and asks `use_triton` before it launches one.
"""

import os
from typing import Any

from torch import Tensor


class _Absent:
    """Stands for Triton where it is not installed: kernels can be defined, never launched."""

    def jit(self, kernel: Any = None, **options: Any) -> Any:
        return kernel if kernel is not None else lambda function: function

    def __getattr__(self, name: str) -> Any:
        return None


triton: Any
tl: Any
try:
    import triton
    import triton.language as tl

    INSTALLED = True
except ImportError:
    triton = tl = _Absent()
    INSTALLED = False

INTERPRET = "ALULA_TRITON_INTERPRET"
"""Set to 1, with TRITON_INTERPRET=1 set before this module is imported, to run the kernels on CPU tensors."""


def use_triton(tensor: Tensor) -> bool:
    """True for CUDA tensors where Triton is installed, and for CPU tensors under Triton's interpreter."""
    return INSTALLED and (tensor.is_cuda or os.environ.get(INTERPRET) == "1")
