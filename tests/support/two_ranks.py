"""A script as two processes that torchrun starts, on the CPU with gloo."""

import os
import subprocess
import sys
from pathlib import Path


def run_on_two_ranks(script: Path | str, out: Path, timeout: float = 240) -> None:
    """`script` receives `out` as its argument; it can import the same modules as the tests."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script, out],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
