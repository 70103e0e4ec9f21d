"""The largest kernels compile for a GPU, which the interpreter does not show, and keep their values in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "compile_kernels.py"


@pytest.mark.kernels
def test_kernels_compile_for_hopper_without_spilling(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout)
    assert len(kernels) == 9
    for name, taken in kernels.items():
        assert taken["stack"] == 0, f"{name} spills {taken['stack']} bytes"
    for kv_dtype in ("int8", "fp8"):
        assert kernels[f"attention, {kv_dtype}"]["registers"] <= 128, "sixteen programs for each multiprocessor"
        assert kernels[f"attention, {kv_dtype}"]["conversions"] == 0, "slower than several at once"
