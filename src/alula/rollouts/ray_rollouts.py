"""Rollouts of workers on a Ray cluster. Rank 0 owns the pool; the other ranks pass their jobs to it."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any

import ray
import torch
from torch import Tensor, nn

from alula.config.run import RunConfig
from alula.distributed import World
from alula.engine.rollout import Rollout
from alula.engine.schedule_plan import KVNeed
from alula.errors import SettingError, require
from alula.files import count_text
from alula.learner.learner import Learner
from alula.models.lora import Adapter
from alula.rollouts.job import Job
from alula.rollouts.rollouts import Idle, OnRollout, Rollouts
from alula.rollouts.weights import pack
from alula.rollouts.worker import RolloutWorker, Shipment, lora_tensors
from alula.rollouts.worker_pool import WorkerPool
from alula.sparsity.policy import Sparsity

WAIT = 0.5
"""Seconds between two looks for a stop signal."""
REACHED = 20.0
"""Seconds within which a cluster must accept a connection."""


class RayRollouts(Rollouts):
    """`adapter` is the first one of sparse rollouts, if they have one. `copied` is a model on this rank that gets all
    published weights as well."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        learner: Learner,
        longest: int,
        adapter: Adapter | None = None,
        copied: nn.Module | None = None,
        *,
        say: Callable[[str], None] = lambda message: None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.world, self.copied, self.say, self.check_stop = world, copied, say, check_stop
        self.colocated = config.rollouts.colocated
        self._tickets: dict[int, list[list[int]]] = {}
        """The numbers of each rank's jobs."""
        self._ids, self._shipments = count(), count()
        self.pool: WorkerPool | None = None
        self.started_ray = False
        self.shipped = [0, 0.0]
        """Bytes and seconds of the last shipment of weights."""
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            if world.rank == 0:
                self._start(config, longest)
            self.publish(learner, 0)
            if adapter is not None:
                self.publish_adapter(adapter)
            on_failure.pop_all()

    def _start(self, config: RunConfig, longest: int) -> None:
        settings, address = config.rollouts, config.rollouts.address or os.environ.get("RAY_ADDRESS")
        if not ray.is_initialized():
            self.started_ray = True
            connect(address)
        gpus = settings.gpus_per_worker
        if gpus is None:
            gpus = float(self.world.device.type == "cuda")
        if self.started_ray and address == "local":  # this cluster does not grow
            there, needed = ray.cluster_resources().get("GPU", 0.0), gpus * settings.min_workers
            require(
                needed <= there,
                f"rollouts.gpus_per_worker={gpus:g}: {count_text(settings.min_workers, 'worker')} would need "
                f"{needed:g} GPUs, but Ray finds {there:g} on this machine; lower it, or name a cluster in "
                "rollouts.address.",
            )
        actor = ray.remote(RolloutWorker).options(num_cpus=0, num_gpus=gpus, scheduling_strategy="SPREAD")
        arguments = (config, longest, torch.get_num_threads(), ray.get, [os.getcwd()])
        timeout = max(settings.timeout, 2 * config.environment.timeout if config.environment else 0.0)
        self.pool = WorkerPool(
            lambda: actor.remote(*arguments), settings.workers, settings.min_workers, timeout, config.engine.max_rows
        )
        ready = self.pool.wait_until_ready(self.check_stop, self.say)
        self.say(f"{ready} of {settings.workers} rollout workers are ready.")

    # -- rollouts -----------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job], *, least: int | None = None) -> int:
        shares, ticket = self.world.all_gather(list(jobs)), next(self._ids)
        if self.pool is not None:
            # The ranks' shares are interleaved, as the prompts were.
            longest = max(map(len, shares))
            order = [(rank, i) for i in range(longest) for rank, share in enumerate(shares) if i < len(share)]
            numbers = self.pool.submit((shares[rank][i], least) for rank, i in order)
            self._tickets[ticket] = [[] for _ in shares]
            for (rank, _), number in zip(order, numbers):
                self._tickets[ticket][rank].append(number)
        return ticket

    def collect(
        self, ticket: int, on_rollout: OnRollout = lambda rollout: None, idle: Idle = nullcontext
    ) -> list[Rollout]:
        outcome: list[Any] | None = None
        if self.pool is not None:
            shares = self._tickets.pop(ticket)
            try:
                self._wait(self.pool, shares, on_rollout)
                outcome = [self.pool.pop(numbers) for numbers in shares]
            except BaseException as error:
                self.pool.forget(number for numbers in shares for number in numbers)
                if not self.world.is_distributed:
                    raise
                outcome = [error] * self.world.size
        share = self.world.scatter(outcome)
        if isinstance(share, BaseException):
            raise share
        return share

    def _wait(self, pool: WorkerPool, shares: list[list[int]], on_rollout: OnRollout) -> None:
        """Wait for all ranks' rollouts; those of this rank are shown."""
        numbers, mine = [number for share in shares for number in share], set(shares[0])
        seen: set[tuple[int, int]] = set()
        while not pool.done(numbers):
            self._print()
            self.check_stop()
            for number, rollout in pool.finished(numbers, seen, WAIT):
                if number in mine:
                    on_rollout(rollout)
        self._print()

    def _print(self) -> None:
        while self.pool is not None and self.pool.messages:
            self.say(self.pool.messages.popleft())

    def acceptance(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Workers have measured it, at the version that sampled."""
        return [rollout.acceptance for rollout in rollouts if rollout.acceptance is not None]

    # -- weights ------------------------------------------------------------------------------------------

    def publish(self, learner: Learner, version: int) -> None:
        settings = learner.settings.lora
        if settings is None:
            self._ship(self._copying(learner.full_parameters()), version)
        else:
            self._ship(lora_tensors(learner.adapter()), version, settings.rank, settings.alpha)
            for _ in self._copying(learner.full_parameters()) if self.copied is not None else ():
                pass

    def _copying(self, parameters: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The parameters, which this rank's copy gets on the way."""
        copies = dict(self.copied.named_parameters(remove_duplicate=False)) if self.copied is not None else {}
        for name, value in parameters:
            if copies:
                copies[name].data.copy_(value)
            yield name, value

    def publish_adapter(self, adapter: Adapter) -> None:
        if self.pool is not None:
            self.pool.ship(adapter=self._shipment(lora_tensors(adapter), 0, adapter.rank, adapter.alpha))

    def _ship(self, parameters: Iterator[tuple[str, Tensor]], version: int, rank: int = 0, alpha: float = 0.0) -> None:
        """Every rank takes part in gathering the parameters; rank 0 puts them into the object store."""
        if self.pool is None:
            for _ in parameters:
                pass
            return
        began = time.monotonic()
        shipment = self._shipment(parameters, version, rank, alpha)
        size = sum(piece.bytes for pieces, _ in shipment.buckets for piece in pieces)
        self.shipped = [size, time.monotonic() - began]
        self.pool.ship(weights=shipment)

    def _shipment(self, parameters: Iterator[tuple[str, Tensor]], version: int, rank: int, alpha: float) -> Shipment:
        buckets = [(pieces, ray.put(data)) for pieces, data in pack(parameters)]
        return Shipment(next(self._shipments), version, buckets, rank, alpha)

    # -- the rest -----------------------------------------------------------------------------------------

    def measure_queries(self, text: list[list[int]]) -> None:
        if self.pool is not None:
            self.pool.text = text

    @contextmanager
    def asleep(self) -> Iterator[None]:
        if self.colocated and self.pool is not None:
            self.pool.tell_all("sleep")
        yield

    def check(self, sparsity: Sparsity) -> None:
        self._ask("check", sparsity)

    def need(self, job: Job) -> KVNeed:
        return self._ask("need", job)

    def _ask(self, method: str, argument: Any) -> Any:
        """A worker's answer, on every rank; or its error."""
        answer: Any = None
        if self.pool is not None:
            try:
                answer = self.pool.ask(method, argument)
            except SettingError as error:
                answer = error
        answer = self.world.all_gather(answer)[0]
        if isinstance(answer, SettingError):
            raise answer
        return answer

    def peak_bytes(self) -> int:
        """Those of all workers together, counted by rank 0."""
        if self.pool is None:
            return 0
        peaks, self.pool.peaks = self.pool.peaks, {}
        return sum(peaks.values())

    def metrics(self) -> dict[str, float]:
        pool = self.pool
        if pool is None:
            return {}
        self._print()
        busy, idle, lost = pool.busy, pool.idle, pool.lost
        pool.busy, pool.idle, pool.lost = 0.0, 0.0, 0
        return {
            "workers/ready": float(pool.ready),
            "workers/lost": float(lost),
            "workers/idle": idle / max(busy + idle, 1e-9),
            "workers/weight_bytes": float(self.shipped[0]),
            "time/ship": self.shipped[1],
        }

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            if self.started_ray:
                ray.shutdown()


def connect(address: str | None) -> None:
    """Join the cluster at `address`; without one that of this machine, or start one."""
    starting: dict[str, Any] = {"include_dashboard": False} if address in (None, "", "local") else {}
    try:
        host, _, port = (address or "").removeprefix("ray://").rpartition(":")
        if port.isdigit():
            socket.create_connection((host, int(port)), REACHED).close()  # Ray itself tries for minutes
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **starting)
    except (OSError, ValueError, RuntimeError) as error:
        raise SettingError(
            f"rollouts.address={address}: no Ray cluster answers there ({error}); start one with `ray start --head`, "
            "or leave the address out to start one on this machine."
        ) from error
