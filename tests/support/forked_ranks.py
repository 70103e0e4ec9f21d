"""The `main(out)` of a module on several ranks of several nodes: processes with the environment that torchrun sets.

The module is loaded once and forked, which takes a fraction of torchrun's time.
"""

import importlib
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

Layout = tuple[int, int]
"""Nodes, and ranks on each."""


def run_on_nodes(module: str, outs: dict[Layout, Path], timeout: float = 240) -> None:
    """One layout after the other, each with its own folder. `module` can import the same modules as the tests."""
    layouts = [f"{nodes}x{ranks}={out}" for (nodes, ranks), out in outs.items()]
    done = subprocess.run(
        [sys.executable, __file__, module, *layouts],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def _fork(main, nodes: int, ranks: int, out: Path) -> None:
    """Start all ranks and wait for them; if one fails, end the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=_start, args=(main, nodes, ranks, out, rank, port)) for rank in range(nodes * ranks)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
        time.sleep(0.05)
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    for process in processes if failed else ():
        process.kill()
    if failed:
        sys.exit(f"rank {failed[0]} of {nodes} × {ranks} failed")


def _start(main, nodes: int, ranks: int, out: Path, rank: int, port: int) -> None:
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank % ranks,
        "WORLD_SIZE": nodes * ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    main(out)


if __name__ == "__main__":
    for layout in sys.argv[2:]:
        size, _, folder = layout.partition("=")
        _fork(importlib.import_module(sys.argv[1]).main, *map(int, size.split("x")), Path(folder))
