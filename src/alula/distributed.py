"""One process or many: the same learner code, with parameters sharded by FSDP2 where there are many."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from alula.models.load import checked_device


@dataclass(frozen=True)
class World:
    """Where this process stands. A world of one needs no process group and communicates nothing."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def many(self) -> bool:
        return self.size > 1

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.many:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, value: int) -> int:
        if not self.many:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, on every rank."""
        if not self.many:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def mine(self, items: Any) -> Any:
        """This rank's part of a list, tuple or range, which is dealt out in turn."""
        return items[self.rank :: self.size]

    def barrier(self) -> None:
        if self.many:
            dist.barrier()


def start(device: str | torch.device | None = None) -> World:
    """The world torchrun describes in the environment, its process group started; a world of one without it.

    `device` is `cpu`, `cuda` or None for CUDA where there is one; with several processes each takes the GPU of
    its local rank.
    """
    kind = checked_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World(device=kind)
    here = kind
    if kind.type == "cuda":
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind.type == "cuda" else "gloo")
    return World(dist.get_rank(), dist.get_world_size(), here)


def shard(module: nn.Module, layers: Iterable[nn.Module], world: World) -> None:
    """Shard `module` over all ranks in place, one group per layer and one for the rest.

    The shards are float32 and serve as master weights; layers are gathered and computed in the dtype the
    module had, and read what they are given in its own (a residual stream may be wider). Gradients are *summed* in
    float32: the loss carries its own denominators over the whole batch, so nothing is averaged.
    """
    dtype = next(module.parameters()).dtype
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = init_device_mesh(world.device.type, (world.size,))
    for part in (*layers, module):
        for parameter in part.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        # The root too: its parameters are read as shards between two forwards.
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. Every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def iter_full_params(
    parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Parameters gathered one by one, for the engine or an export. Every rank must run through all of them."""
    for name, parameter in parameters:
        value = full(parameter.detach())
        yield name, value if dtype is None else value.to(dtype)
