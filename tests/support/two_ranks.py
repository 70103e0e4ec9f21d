"""A script as two processes on the CPU with gloo: as torchrun starts them, or forked, which saves their imports."""

import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
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


def fork_two_ranks(script: Path | str, out: Path, timeout: float = 240) -> None:
    """The same, in two copies of this process with the variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = {_fork(script, out, rank, port) for rank in range(2)}
    codes, deadline = [], time.monotonic() + timeout
    while running and not any(codes) and time.monotonic() < deadline:
        for child in list(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                running.remove(child)
                codes.append(os.waitstatus_to_exitcode(status))
        time.sleep(0.01)
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert codes == [0, 0], (codes, "printed above is why")


def _fork(script: Path | str, out: Path, rank: int, port: int) -> int:
    """The id of a child that runs the script and never returns."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        sys.argv = [str(script), str(out)]
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
