"""Between host and device, without waiting: planned arrays go up, results come down behind what made them."""

import numpy as np
import torch
from torch import Tensor


def put(target: Tensor, array: np.ndarray) -> None:
    """Copy to the device without waiting; a fresh pinned buffer each time, so that the host may go on writing."""
    source = torch.from_numpy(np.ascontiguousarray(array))
    if target.is_cuda:
        source = source.pin_memory()
    elif source.data_ptr() == array.ctypes.data:
        source = source.clone()
    target.copy_(source, non_blocking=True)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    out = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, device=device)
    put(out, array)
    return out


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, made in the stream's order; on CUDA it is there once the stream has passed."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


class Results:
    """Tensors on their way to the host: `arrays` waits for them, and for nothing launched later."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._hosted = {name: to_host(tensor) for name, tensor in tensors.items()}
        self._done = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._done = torch.cuda.Event()
            self._done.record()

    def arrays(self) -> dict[str, np.ndarray]:
        if self._done is not None:
            self._done.synchronize()
        return {name: tensor.numpy() for name, tensor in self._hosted.items()}
