"""Devices, ranks and sharding: the same learner code on one process or many, with FSDP2 where there are many."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from alula.errors import require
from alula.settings import Shard


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
    nodes: int = 1
    """Machines with equally many ranks each; those of a machine are numbered in a row."""
    timeout: timedelta | None = None
    """How long a rank waits for the others in a collective operation; None is torch's own limit."""

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

    def scatter(self, values: list[Any] | None) -> Any:
        """One of rank 0's `values` (any picklable objects) for each rank."""
        if not self.is_distributed:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values, src=0)
        return mine[0]

    def local_slice(self, items: Any) -> Any:
        """This rank's items of a list, tuple or range: every `size`-th, starting at `rank`."""
        return items[self.rank :: self.size]

    def global_order(self, keys: Sequence[Any]) -> tuple[list[int], int]:
        """The place of each of this rank's distinct keys in the sorted list of all ranks' keys, and its length."""
        ranked = sorted(key for keys in self.all_gather(list(keys)) for key in keys)
        index_of = {key: i for i, key in enumerate(ranked)}
        return [index_of[key] for key in keys], len(ranked)

    def barrier(self) -> None:
        if self.is_distributed:
            dist.barrier()


def init_world(device: str | torch.device | None = None, timeout: float | None = None) -> World:
    """Start the process group that torchrun describes in the environment; without torchrun, a world of size 1.

    `device` is `cpu`, `cuda` or None (`resolve_device`). With several processes, each uses the GPU of its local rank.
    `timeout` is that of collective operations, in seconds.
    """
    resolved = resolve_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(device=resolved)
    _check_restarts()
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size // nodes))
    require(
        local_size * nodes == size,
        f"this node has {local_size} of the {size} ranks on {nodes} nodes; give every node the same --nproc-per-node.",
    )
    local_device = resolved
    if resolved.type == "cuda":
        local_device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local_device)
    wait = None if timeout is None else timedelta(seconds=timeout)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if resolved.type == "cuda" else "gloo", timeout=wait)
    return World(dist.get_rank(), dist.get_world_size(), local_device, nodes, wait)


def _check_restarts() -> None:
    """Raise if torchrun would restart ranks in vain: attempts that share its own store find the addresses of dead ranks
    there (pytorch issue 135712)."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    require(
        restarts == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        f"torchrun --max-restarts={restarts}: restarted ranks would connect to dead ones; set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and start torchrun with --standalone or --rdzv-backend=c10d.",
    )


def shard_mesh(world: World, shard: Shard = "node") -> DeviceMesh:
    """The ranks as rows of replicas: a model is sharded over a row and replicated over the rows (HSDP).

    With `node` a row is a node, so that only gradients cross the network; with `all` there is one row of all ranks.
    """
    rows = torch.arange(world.size).view(world.nodes if shard == "node" else 1, -1)
    if len(rows) == 1:
        return init_device_mesh(world.device.type, (world.size,))
    # Groups that a mesh makes by itself would have torch's timeout.
    replicated, _ = dist.new_subgroups_by_enumeration(rows.T.tolist(), timeout=world.timeout)
    sharded, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=world.timeout)
    return DeviceMesh.from_group(
        [replicated, sharded], world.device.type, mesh=rows, mesh_dim_names=("replicate", "shard")
    )


def shard_model(model: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Shard `model` over the mesh in place, one FSDP2 group per layer and one for the rest.

    The shards are float32 and serve as master weights; those of a frozen model keep its dtype. Layers are gathered and
    computed in the model's original dtype; their inputs are not cast, because a residual stream may be wider. Gradients
    are *summed* in float32, over shards and replicas: the loss already carries its denominators over the global batch,
    so nothing is averaged.
    """
    dtype, trained = next(model.parameters()).dtype, any(p.requires_grad for p in model.parameters())
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*layers, model):
        for parameter in module.parameters():
            if trained and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        # The root is resharded too: its parameters are read as shards between two forward passes.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def sum_over_replicas(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass sums gradients over the replicas; until then they add up within each. One sum per
    optimizer step is enough, and it is the one that crosses the network."""
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(now)


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor. Collective for a DTensor: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def iter_full_params(
    parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Parameters gathered one at a time, for the engine or an export. Every rank must iterate over all of them."""
    for name, parameter in parameters:
        value = parameter.detach()
        yield name, full_tensor(value if dtype is None else value.to(dtype))  # cast first: fewer bytes to gather
