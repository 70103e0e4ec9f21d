"""Freed memory of CPU tensors stays with the process.

By default glibc returns large blocks to the system, which clears every page before its next use. In a decode step of
many rows this takes more time than the arithmetic.
"""

import ctypes
import os
from collections.abc import Mapping

SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables that configure glibc's malloc."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers in its malloc.h."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> None:
    """Let glibc keep up to 2 GiB of freed memory for later tensors, in blocks of up to 64 MiB. Nothing changes without
    glibc, or if one of `SETTINGS` is set."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in environment for name in SETTINGS):
        mallopt(M_MMAP_THRESHOLD, 64 << 20)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
