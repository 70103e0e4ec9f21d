"""Freed memory on the CPU."""

import platform
import subprocess
import sys

import pytest

CODE = """
import os, resource, sys
import torch
from alula.malloc import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory({})
elif sys.argv[1] == "set":
    keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "131072"})

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(40 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages()
print(pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is a setting of glibc")
def test_freed_memory_is_used_again():
    """Pages that are new to the process while ten tensors of 40 MiB come and go: 102,400 of 4 KiB if each is
    used once."""
    found = {
        how: int(subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True).stdout)
        for how in ("kept", "set", "default")
    }
    assert 10 * found["kept"] < found["default"]
    assert 10 * found["kept"] < found["set"], "a person's setting stays"
