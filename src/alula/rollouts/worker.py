"""A rollout worker: an engine in a process of its own, which works on jobs in short slices.

    orders: new weights, new jobs  →  work for a fraction of a second  →  report: finished rollouts, progress

A call returns after a slice whatever happens, so a report that does not come, or reports without progress, mean that
the worker hangs. The class is plain Python; the pool makes a Ray actor of it.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alula.config.run import RunConfig
from alula.distributed import resolve_device
from alula.engine.rollout import Rollout
from alula.engine.schedule_plan import KVNeed
from alula.heap import frozen_heap
from alula.models.lora import Adapter, merged_weight
from alula.rollouts.build import build_engine, build_episodes, load_policy
from alula.rollouts.job import Job
from alula.rollouts.job_queue import Needs
from alula.rollouts.job_runner import JobRunner, request_of
from alula.rollouts.local_rollouts import taken_peak
from alula.rollouts.weights import Bytes, Piece, unpack
from alula.sparsity.policy import Sparsity

SLICE = 0.2
"""Seconds of work per call."""


@dataclass(frozen=True)
class Shipment:
    """Weights, or an adapter: all parameters, or those of a LoRA."""

    number: int
    version: int
    """The policy version that they are."""
    buckets: list[tuple[list[Piece], Any]]
    """Pieces, and a reference to the bytes."""
    rank: int = 0
    alpha: float = 0.0
    """Rank and alpha of the LoRA; rank 0 means all parameters."""


@dataclass(frozen=True)
class Orders:
    jobs: list[tuple[int, Job, Needs]] = field(default_factory=list)
    weights: Shipment | None = None
    adapter: Shipment | None = None
    text: list[list[int]] | None = None
    """The text that the model's queries are measured on, if the worker does not have it."""


@dataclass(frozen=True)
class Report:
    finished: list[tuple[int, Rollout]]
    rejected: list[int]
    """Jobs that need other weights than the worker has."""
    shipments: tuple[int, int]
    progress: int
    """Grows with every token, and with every answer of an environment."""
    busy: float
    idle: float
    """Seconds in this call, and between the last one and it."""
    peak_bytes: int


class RolloutWorker:
    """`fetch` turns references into bytes (`ray.get`). `paths` are added to Python's search path."""

    def __init__(
        self,
        config: RunConfig,
        longest: int,
        threads: int,
        fetch: Callable[[list[Any]], list[Bytes]],
        paths: list[str] | None = None,
    ) -> None:
        self.config, self.longest, self.threads, self.fetch = config, longest, threads, fetch
        self.paths = paths or []

    def start(self) -> None:
        """Load the model. Its weights are not used before the first shipment has come."""
        sys.path += [path for path in self.paths if path not in sys.path and os.path.isdir(path)]
        torch.set_num_threads(self.threads)
        config = self.config
        loaded = load_policy(config, resolve_device(config.model.device))
        empty = Adapter(1, 1.0) if config.distill else None
        self.engine = build_engine(config, loaded, self.longest, empty)
        self.runner = JobRunner(self.engine, build_episodes(config, self.engine))
        self.base: dict[str, Tensor] = {}
        """The weights that training started from, kept if LoRA updates are shipped."""
        self.shipments = (-1, -1)
        self.progress = 0
        self.last = time.monotonic()

    def check(self, sparsity: Sparsity) -> None:
        self.engine.check(sparsity)

    def need(self, job: Job) -> KVNeed:
        return self.engine.need(request_of(self.engine, job))

    def sleep(self) -> None:
        """Release the KV memory until there is work."""
        self.engine.sleep()

    def work(self, orders: Orders) -> Report:
        """Take the orders, and work on all jobs for a slice."""
        began = time.monotonic()
        if orders.weights is not None:
            self._take_weights(orders.weights)
        if orders.adapter is not None:
            self._take_adapter(orders.adapter)
        if orders.text is not None:
            self.engine.measure_queries(orders.text)
        rejected = [number for number, job, needs in orders.jobs if not self._add(number, job, needs)]
        finished: list[tuple[int, Rollout]] = []
        with frozen_heap():
            while self.runner.unfinished and time.monotonic() < began + SLICE:
                if not self.engine.cache.resident:
                    self.engine.wake()
                finished += self.runner.step(wait=SLICE)
        for _, rollout in finished:
            self.progress += 1 + len(rollout)
            if rollout.hidden is not None:
                [rollout.acceptance] = self.engine.acceptance([rollout])
                rollout.hidden = None
        now = time.monotonic()
        idle, self.last = began - self.last, now
        return Report(
            finished,
            rejected,
            self.shipments,
            self.progress + self.runner.progress,
            now - began,
            idle,
            taken_peak(self.engine),
        )

    def _add(self, number: int, job: Job, needs: Needs) -> bool:
        met = needs.met_by(self.shipments, self.engine.policy_version) and self.shipments[0] >= 0
        if met:
            self.runner.add(number, job)
        return met

    def _take_weights(self, shipment: Shipment) -> None:
        named = self._tensors(shipment)
        if shipment.rank:
            named = self._merged(Adapter(shipment.rank, shipment.alpha, pairs(named)))
        self.engine.update_weights(named, lazily=True, version=shipment.version)
        self.shipments = (shipment.number, self.shipments[1])

    def _take_adapter(self, shipment: Shipment) -> None:
        self.engine.update_sparse_adapter(Adapter(shipment.rank, shipment.alpha, pairs(self._tensors(shipment))))
        self.shipments = (self.shipments[0], shipment.number)

    def _merged(self, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
        parameters = dict(self.engine.model.named_parameters())
        for module, (a, b) in adapter.weights.items():
            name = f"{module}.weight"
            if name not in self.base:
                self.base[name] = parameters[name].detach().clone()
            yield name, merged_weight(self.base[name], a, b, adapter.scale).to(self.engine.dtype)

    def _tensors(self, shipment: Shipment) -> Iterator[tuple[str, Tensor]]:
        return unpack((pieces, self.fetch([data])[0]) for pieces, data in shipment.buckets)


def lora_tensors(adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    """An adapter's tensors one after the other, for `weights.pack`."""
    for name, (a, b) in adapter.weights.items():
        yield f"{name} A", a
        yield f"{name} B", b


def pairs(named: Iterator[tuple[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """The opposite of `lora_tensors`."""
    return {name.removesuffix(" A"): (a.clone(), b.clone()) for (name, a), (_, b) in zip(named, named)}
