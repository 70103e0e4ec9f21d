"""Memory that can be released and restored at the same address.

Captured CUDA graphs hold the KV pool's addresses. On CUDA the pool is therefore a reserved range of virtual addresses:
`release` unmaps the physical memory, which the learner can then use, and `restore` maps new memory at the same
addresses (vLLM's sleep mode and torch_memory_saver do the same). On the CPU the storage is resized.
"""

import ctypes
import math
import weakref
from typing import Any

import torch
from torch import Tensor


class ReleasableBuffer:
    """`tensor` is uint8 [size]. After `release` it must not be used until `restore`."""

    def __init__(self, name: str, size: int, device: torch.device) -> None:
        self.size = size
        self._virtual = _VirtualRange(name, size, device) if device.type == "cuda" else None
        self.tensor: Tensor = self._virtual.tensor() if self._virtual else torch.zeros(size, dtype=torch.uint8)
        self.resident = True

    def release(self) -> None:
        if self.resident:
            if self._virtual:
                torch.cuda.synchronize()
                self._virtual.unmap()
            else:
                self.tensor.untyped_storage().resize_(0)
            self.resident = False

    def restore(self) -> None:
        if not self.resident:
            if self._virtual:
                self._virtual.map()
            else:
                self.tensor.untyped_storage().resize_(self.size)
                self.tensor.zero_()
            self.resident = True


class ReleasableBuffers:
    """Tensors by name that are released and restored together. What is allocated while they are released is so too."""

    def __init__(self, device: torch.device, resident: bool = True) -> None:
        self.device, self.resident = device, resident
        self._buffers: dict[str, ReleasableBuffer] = {}

    def allocate(self, name: str, layout: tuple[int, ...], dtype: torch.dtype, content: Tensor | None = None) -> Tensor:
        """A tensor of zeros that begins with `content` along every axis; replaces the one of that name, which may be
        `content`."""
        buffer = ReleasableBuffer(name, math.prod(layout) * dtype.itemsize, self.device)
        tensor = buffer.tensor.view(dtype).view(layout)
        if not self.resident:
            buffer.release()
        elif content is not None:
            tensor[tuple(map(slice, content.shape))] = content
        self._buffers[name] = buffer  # only now: the one before is unmapped
        return tensor

    def release(self) -> None:
        self.resident = False
        for buffer in self._buffers.values():
            buffer.release()

    def restore(self) -> None:
        for buffer in self._buffers.values():
            buffer.restore()
        self.resident = True


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3
SPARE = 1 << 30
"""Bytes that stay free after mapping."""


class _VirtualRange:
    """CUDA's virtual memory management: cuMemAddressReserve, cuMemCreate, cuMemMap and their inverses."""

    def __init__(self, name: str, size: int, device: torch.device) -> None:
        torch.cuda.init()
        torch.zeros(1, device=device)  # makes the device's CUDA context current
        self.driver = ctypes.CDLL("libcuda.so.1")
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.location = _Location(ON_DEVICE, index)
        self.properties = _AllocationProperties(PINNED, 0, self.location, None, (ctypes.c_ubyte * 8)())
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self.properties), 0)
        self.name, self.requested = name, size
        self.size = ctypes.c_size_t(-(-size // granularity.value) * granularity.value)
        self.address = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(self.address), self.size, ctypes.c_size_t(0), zero, zero)
        self.mapped = [False]  # shared with the finalizer, which must not hold `self`
        self.map()
        weakref.finalize(self, _free, self.driver, self.address, self.size, self.mapped)

    def map(self) -> None:
        handle, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        create = ("cuMemCreate", ctypes.byref(handle), self.size, ctypes.byref(self.properties), zero)
        try:
            self._call(*create)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch may hold freed memory that the driver needs now
            self._call(*create)
        if torch.cuda.mem_get_info(self.device)[0] < SPARE:
            torch.cuda.empty_cache()  # graph capture and the driver need some too
        self._call("cuMemMap", self.address, self.size, ctypes.c_size_t(0), handle, zero)
        access = _Access(self.location, READ_WRITE)
        self._call("cuMemSetAccess", self.address, self.size, ctypes.byref(access), ctypes.c_size_t(1))
        self._call("cuMemRelease", handle)  # the mapping keeps the memory alive
        self.mapped[0] = True
        self.tensor().zero_()

    def unmap(self) -> None:
        self._call("cuMemUnmap", self.address, self.size)
        self.mapped[0] = False

    def tensor(self) -> Tensor:
        view: Any = type("View", (), {})()
        view.__cuda_array_interface__ = {
            "shape": (self.requested,),
            "typestr": "|u1",
            "data": (self.address.value, False),
            "version": 3,
        }
        return torch.as_tensor(view, device=self.device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code == 2:
            requested, free = self.requested / 2**30, torch.cuda.mem_get_info(self.device)[0] / 2**30
            size = f"{requested:.1f}GiB"
            what = f"kv_memory={size}" if self.name == "kv" else f"buffer {self.name!r} of {size}"
            raise torch.cuda.OutOfMemoryError(
                f"{what}: the GPU has {free:.1f} GiB free; lower kv_memory or max_rows (or learner.token_budget, whose "
                "activations share the GPU), or stop other processes there."
            )
        if code != 0:
            raise RuntimeError(f"{name} failed with CUDA driver error {code}")


def _free(driver: Any, address: ctypes.c_uint64, size: ctypes.c_size_t, mapped: list[bool]) -> None:
    torch.cuda.synchronize()
    if mapped[0]:
        driver.cuMemUnmap(address, size)
    driver.cuMemAddressFree(address, size)
