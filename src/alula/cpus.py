"""CPU cores that this process may use, and how many threads torch uses of them."""

import os
from typing import TYPE_CHECKING

from alula.cgroups import cpu_quota

if TYPE_CHECKING:
    from torch import nn


def available_cpus() -> int:
    """Cores that this process may use: its affinity, and the quota of its cgroup (as a container sets it)."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, cpu_quota() or cores))


SMALL_MODEL = 2_000_000
"""Parameters below which one thread is used. A second one makes such a model at most 1.3 times as fast on an idle
machine, and twelve times as slow where another process wants the core (benchmarks/threads.py)."""


def threads_for(parameters: int, recorded: int | None = None) -> int:
    """Threads for a model on the CPU: OMP_NUM_THREADS if set, else `recorded` (of the run that is resumed, since the
    number changes the order of float sums), else one for a small model and all available cores for a larger one."""
    explicit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if explicit.isdigit() and int(explicit) > 0:
        return int(explicit)
    return recorded or (1 if parameters < SMALL_MODEL else available_cpus())


def set_threads(model: "nn.Module", recorded: int | None = None) -> None:
    """Set torch's threads for a model on the CPU; those of a model on a GPU stay as they are."""
    import torch

    if next(model.parameters()).device.type == "cpu":
        torch.set_num_threads(threads_for(sum(p.numel() for p in model.parameters()), recorded))
