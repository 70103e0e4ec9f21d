"""Measured limits of this device: matrix FLOP/s and copy bandwidth."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Ceilings:
    bandwidth: float
    """Bytes per second, read plus written, of a large copy."""
    matrix: float
    """FLOP/s of a large matrix product, bf16 on a GPU."""


def measure_ceilings(device: torch.device) -> Ceilings:
    return Ceilings(copy_bandwidth(device), matrix_rate(device))


def matrix_rate(device: torch.device) -> float:
    """FLOP/s of a large square matrix product. Allocates 384 MiB on a GPU."""
    cuda = device.type == "cuda"
    n, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    product = a @ b
    seconds = min(timed(lambda: torch.matmul(a, b, out=product), device, 5) for _ in range(3))
    return 2 * n**3 / seconds


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a copy larger than any cache. Allocates 8 GiB on a GPU."""
    size = 1 << 32 if device.type == "cuda" else 1 << 27
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / min(timed(lambda: target.copy_(source), device, 5) for _ in range(3))


def timed(function: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Mean seconds of `repeat` calls, back to back."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeat):
            function()
        return (time.perf_counter() - start) / repeat
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeat):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / repeat
