"""Devices, ranks and sharding: the same learner code on one process or many, with FSDP2 where there are many."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from alula.errors import require


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """The torch device for a setting. None and `auto` mean CUDA if available, else the CPU; absent devices raise."""
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = torch.device("meta")
    require(resolved.type in ("cpu", "cuda"), f"device={device}: must be cpu or cuda.")
    count = torch.cuda.device_count()
    require(
        resolved.type == "cpu" or (resolved.index or 0) < count,
        f"device={device}: torch sees {count} CUDA devices on this machine; use cpu or one of those.",
    )
    return resolved


@dataclass(frozen=True)
class World:
    """This process's rank, the number of ranks and its device. A world of size 1 needs no process group."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_distributed(self) -> bool:
        return self.size > 1

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.is_distributed:
            dist.all_reduce(tensor)
        return tensor

    def all_max(self, value: int) -> int:
        """Maximum over ranks."""
        if not self.is_distributed:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (any picklable object), on every rank."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def local_slice(self, items: Any) -> Any:
        """This rank's items of a list, tuple or range: every `size`-th, starting at `rank`."""
        return items[self.rank :: self.size]

    def global_order(self, keys: Sequence[Any]) -> tuple[list[int], int]:
        """The place of each of this rank's distinct keys in the sorted list of all ranks' keys, and its length."""
        ranked = sorted(key for keys in self.all_gather(list(keys)) for key in keys)
        place = {key: i for i, key in enumerate(ranked)}
        return [place[key] for key in keys], len(ranked)

    def barrier(self) -> None:
        if self.is_distributed:
            dist.barrier()


def init_world(device: str | torch.device | None = None) -> World:
    """Start the process group that torchrun describes in the environment; without torchrun, a world of size 1.

    `device` is `cpu`, `cuda` or None (`resolve_device`). With several processes, each uses the GPU of its local rank.
    """
    resolved = resolve_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World(device=resolved)
    local_device = resolved
    if resolved.type == "cuda":
        local_device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local_device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if resolved.type == "cuda" else "gloo")
    return World(dist.get_rank(), dist.get_world_size(), local_device)


def shard_model(model: nn.Module, layers: Iterable[nn.Module], world: World) -> None:
    """Shard `model` over all ranks in place, one FSDP2 group per layer and one for the rest.

    The shards are float32 and serve as master weights. Layers are gathered and computed in the model's original dtype;
    their inputs are not cast, because a residual stream may be wider. Gradients are *summed* in float32: the loss
    already carries its denominators over the global batch, so nothing is averaged.
    """
    dtype = next(model.parameters()).dtype
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in (*layers, model):
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        # The root is resharded too: its parameters are read as shards between two forward passes.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor. Collective for a DTensor: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def iter_full_params(
    parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Parameters gathered one at a time, for the engine or an export. Every rank must iterate over all of them."""
    for name, parameter in parameters:
        value = full_tensor(parameter.detach())
        yield name, value if dtype is None else value.to(dtype)
