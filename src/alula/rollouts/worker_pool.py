"""The pool of rollout workers on a Ray cluster. A thread keeps them busy and replaces those that are lost."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from alula.engine.rollout import Rollout
from alula.errors import RunFailed, first_line
from alula.files import count_text
from alula.rollouts.job import Job
from alula.rollouts.job_queue import JobQueue, Needs
from alula.rollouts.worker import Orders, Report, Shipment

POLL = 0.05
"""Seconds between two looks at calls that were made meanwhile."""
PATIENCE = 10.0
"""Seconds until a message says what the run waits for."""
MOST_FAILED_STARTS = 3
"""Workers that may die one after the other before any has started."""


@dataclass(eq=False)
class Worker:
    """A Ray actor, and what the pool knows about it. It has at most one call at a time."""

    name: str
    actor: Any
    call: Any
    """Reference to the running call's result."""
    since: float
    """When it was called, or made progress, for the last time."""
    ready: bool = False
    jobs: set[int] = field(default_factory=set)
    sent: tuple[int, int] = (-1, -1)
    """Shipments of weights and adapter that it has, or has been sent."""
    has_text: bool = False
    progress: int = -1


class WorkerPool:
    """`spawn` makes an actor of a `RolloutWorker`. `rows` is the number of rollouts that a worker decodes together.

    `submit` and `ship` may be called at any time; a thread of the pool's does the rest. Jobs of a worker that died,
    or that made no progress for `timeout` seconds, are given to others. With fewer than `least` workers that are ready,
    no job is given out.
    """

    def __init__(self, spawn: Callable[[], Any], size: int, least: int, timeout: float, rows: int) -> None:
        self.spawn, self.size, self.least, self.timeout, self.rows = spawn, size, least, timeout, rows
        self.queue, self.workers = JobQueue(), list[Worker]()
        self.weights: Shipment | None = None
        self.adapter: Shipment | None = None
        self.text: list[list[int]] | None = None
        """The text that the model's queries are measured on, if an evictor needs that."""
        self.messages: deque[str] = deque()
        """For the main thread to print."""
        self.lost = self.failed_starts = 0
        self.busy = self.idle = 0.0
        self.peaks: dict[str, int] = {}
        self._names = 0
        self._paused = self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, daemon=True, name="rollout workers")
        self._thread.start()

    # -- the main thread's side ---------------------------------------------------------------------------

    def submit(self, jobs: Iterable[tuple[Job, int | None]]) -> list[int]:
        """Queue jobs, each with the least version that it needs, or None for exactly the present weights."""
        with self._changed:
            present = self._newest()
            numbers = [
                self.queue.put(job, Needs(present) if least is None else Needs(version=least)) for job, least in jobs
            ]
            self._dispatch()
            self._changed.notify_all()
        return numbers

    def finished(self, numbers: Sequence[int], seen: set[tuple[int, int]], wait: float) -> list[tuple[int, Rollout]]:
        """Rollouts of these jobs that are not in `seen` yet, to which they are added; waits for some to come."""
        with self._changed:
            self._raise_error()
            unseen = self._unseen(numbers, seen)
            if not unseen and not self.done(numbers):
                self._changed.wait(wait)
                self._raise_error()
                unseen = self._unseen(numbers, seen)
            return unseen

    def done(self, numbers: Iterable[int]) -> bool:
        with self._changed:
            return all(self.queue.tasks[number].done for number in numbers)

    def pop(self, numbers: Iterable[int]) -> list[Rollout]:
        """The rollouts of finished jobs, in order; the pool forgets them."""
        with self._changed:
            return self.queue.pop(numbers)

    def forget(self, numbers: Iterable[int]) -> None:
        """Give jobs up."""
        with self._changed:
            self.queue.forget(numbers)

    @property
    def ready(self) -> int:
        """Workers that are ready."""
        with self._changed:
            return len(self._ready())

    def ship(self, *, weights: Shipment | None = None, adapter: Shipment | None = None) -> None:
        """Send newer weights, or a newer adapter, to all workers, and to those that come later."""
        with self._changed:
            self.weights, self.adapter = weights or self.weights, adapter or self.adapter
            self._dispatch()
            self._changed.notify_all()

    def wait_until_ready(self, check_stop: Callable[[], None], say: Callable[[str], None]) -> int:
        """Wait for all workers, or for `least` of them after the timeout; returns how many are ready."""
        start, announced = time.monotonic(), False
        while True:
            check_stop()
            with self._changed:
                self._raise_error()
                ready = len(self._ready())
                waited = time.monotonic() - start
                late = waited > self.timeout
                if waited > PATIENCE and not announced:
                    announced = True
                    say(
                        f"waiting for rollout workers: {ready} of {self.size} are ready. The cluster has "
                        f"{resources()}; rollouts.timeout={self.timeout:g} s limits the wait."
                    )
                if ready == self.size or (late and ready >= self.least):
                    return ready
                if late:
                    raise RunFailed(
                        f"rollouts.workers={self.size}: {ready} were ready within rollouts.timeout={self.timeout:g} s. "
                        f"The cluster has {resources()}; ask for fewer workers or fewer GPUs each "
                        "(rollouts.gpus_per_worker), or raise the timeout if the model loads slowly."
                    )
                self._changed.wait(POLL)

    def ask(self, method: str, *arguments: Any) -> Any:
        """The result of a method of any worker that is ready."""
        while True:
            with self._changed:
                self._raise_error()
                ready = self._ready()
                if not ready:
                    self._changed.wait(POLL)
                    continue
            try:
                return ray.get(getattr(ready[0].actor, method).remote(*arguments), timeout=self.timeout)
            except RayTaskError as error:
                raise error.cause from None
            except RayError:
                time.sleep(POLL)  # it has died; the pool's thread will notice

    def tell_all(self, method: str) -> None:
        """Call a method of all workers that are ready, and wait for it. Those that die meanwhile are left out."""
        with self._changed:
            calls = [getattr(worker.actor, method).remote() for worker in self._ready()]
        for call in calls:
            try:
                ray.get(call, timeout=self.timeout)
            except RayTaskError as error:
                raise error.cause from None
            except RayError:
                continue

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for worker in self.workers:
            end(worker)
        self.workers.clear()

    def _unseen(self, numbers: Iterable[int], seen: set[tuple[int, int]]) -> list[tuple[int, Rollout]]:
        tasks = [self.queue.tasks[number] for number in numbers]
        unseen = [(t.number, s, r) for t in tasks for s, r in t.finished.items() if (t.number, s) not in seen]
        seen |= {(number, sample) for number, sample, _ in unseen}
        return [(number, rollout) for number, _, rollout in unseen]

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the pool's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                with self._changed:
                    self._fill_up()
                    self._dispatch()
                    calls = {worker.call: worker for worker in self.workers if worker.call is not None}
                    if not calls:
                        self._changed.wait(POLL)
                        continue
                ready, _ = ray.wait(list(calls), timeout=POLL)
                with self._changed:
                    for call in ready:
                        self._receive(calls[call])
                    self._give_up_hanging()
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _fill_up(self) -> None:
        while len(self.workers) < self.size and not self._closed:
            self._names += 1
            actor = self.spawn()
            self.workers.append(Worker(f"{self._names}", actor, actor.start.remote(), time.monotonic()))

    def _dispatch(self) -> None:
        """Give every worker without a call something to do, if there is."""
        if self.weights is None:
            return
        ready = self._ready()
        if len(ready) < self.least and self.queue.waiting and not self._paused:
            self._paused = True
            self.messages.append(
                f"{len(ready)} of {self.size} rollout workers are left, and rollouts.min_workers is {self.least}: "
                "waiting for others."
            )
        elif len(ready) >= self.least and self._paused:
            self._paused = False
            self.messages.append(f"{len(ready)} rollout workers are ready: going on.")
        for worker in sorted(ready, key=self._load):
            if worker.call is None:
                self._call(worker, len(ready))

    def _call(self, worker: Worker, ready: int) -> None:
        """Send newer weights and a fair share of the waiting jobs. Without either, and without unfinished jobs, the
        worker is left alone."""
        assert self.weights is not None
        newest = self._newest()
        weights = self.weights if worker.sent[0] != newest[0] else None
        adapter = self.adapter if worker.sent[1] != newest[1] else None
        all_rollouts = self.queue.waiting + sum(map(self._load, self.workers))
        share = min(-(-all_rollouts // ready), self.rows + self.rows // 4)
        room = 0 if self._paused else share - self._load(worker)
        tasks = self.queue.take(room, newest, self.weights.version)
        if not (weights or adapter or tasks or worker.jobs):
            return
        if not worker.jobs:
            worker.since = time.monotonic()  # it had nothing to do until now
        worker.sent = newest
        worker.jobs |= {task.number for task in tasks}
        text = None if worker.has_text else self.text
        worker.has_text |= text is not None
        orders = Orders([(task.number, task.job, task.needs) for task in tasks], weights, adapter, text)
        worker.call = worker.actor.work.remote(orders)

    def _receive(self, worker: Worker) -> None:
        call, worker.call = worker.call, None
        try:
            report: Report | None = ray.get(call)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            self._lose(worker, first_line(error))
            return
        if report is None:  # it has started
            worker.ready, worker.since, self.failed_starts = True, time.monotonic(), 0
            return
        if report.progress != worker.progress:
            worker.progress, worker.since = report.progress, time.monotonic()
        for number, rollout in report.finished:
            self.queue.finish(number, rollout)
        self.queue.give_back(report.rejected, lost=False)
        worker.jobs -= set(report.rejected)
        worker.jobs -= {n for n in worker.jobs if n not in self.queue.tasks or self.queue.tasks[n].done}
        worker.sent = report.shipments
        self.busy, self.idle = self.busy + report.busy, self.idle + report.idle
        self.peaks[worker.name] = max(self.peaks.get(worker.name, 0), report.peak_bytes)

    def _give_up_hanging(self) -> None:
        for worker in list(self.workers):
            seconds = time.monotonic() - worker.since
            if (worker.call is not None or worker.jobs) and seconds > self.timeout:
                self._lose(worker, f"no progress for {seconds:.0f} s", started=worker.ready)

    def _lose(self, worker: Worker, why: str, started: bool = True) -> None:
        """Give a worker's jobs to others; another worker takes its place. One that has waited in vain for its node or
        GPU is no loss."""
        self.workers.remove(worker)
        end(worker)
        if started:
            self.lost += worker.ready
            self.failed_starts += not worker.ready
            self.messages.append(f"rollout worker {worker.name} was lost ({why}); its jobs go to others.")
        if self.failed_starts >= MOST_FAILED_STARTS:
            raise RunFailed(f"rollout workers die while they start, the last one with: {why}. Look at Ray's logs.")
        self.queue.give_back(worker.jobs, lost=True)

    def _ready(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.ready]

    def _load(self, worker: Worker) -> int:
        """Rollouts that a worker has not finished."""
        tasks = [self.queue.tasks[number] for number in worker.jobs if number in self.queue.tasks]
        return sum(task.job.rollouts - len(task.finished) for task in tasks)

    def _newest(self) -> tuple[int, int]:
        return (self.weights.number if self.weights else -1, self.adapter.number if self.adapter else -1)


def end(worker: Worker) -> None:
    with suppress(RayError):  # raised for an actor whose node was lost while it started
        ray.kill(worker.actor)


def resources() -> str:
    """The cluster's nodes, CPUs and GPUs, as text."""
    total = ray.cluster_resources()
    nodes = sum(name.startswith("node:") and "internal" not in name for name in total)
    cpus, gpus = (count_text(round(total.get(kind, 0)), kind) for kind in ("CPU", "GPU"))
    return f"{count_text(nodes, 'node')}, {cpus} and {gpus}"
