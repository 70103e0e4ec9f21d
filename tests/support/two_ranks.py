"""A script as two processes that torchrun starts, on the CPU with gloo."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_on_two_ranks(script: Path | str, out: Path, timeout: float = 240, options: Sequence[str] = ()) -> None:
    """`script` receives `out` as its argument and can import the same modules as the tests; torchrun gets `options`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *options]
    done = subprocess.run(
        [*torchrun, script, out],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
