"""Killable grading processes: an answer that hangs, raises or crashes its worker affects no other answer."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from alula.errors import SettingError

START_LIMIT = 120.0
"""Seconds for a worker to import its graders."""
POLL = 0.2
"""Seconds after which a batch in another thread notices that the pool is closed."""

Job = tuple[int, str, Mapping[str, Any]]
"""Number of the grader, completion, example."""
Outcome = tuple[float, str | None]
"""Value and, if grading failed, the reason."""


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
    channel: Connection
    deadline: float
    job: int | None = None
    ready: bool = False

    def end(self) -> str:
        """Kill it with all its children; returns how it ended. Kill before reaping, while its id is still valid."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.channel.close()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


class WorkerPool:
    """Grades jobs in `size` processes that start at the first job, persist, and end with this process.

    Plain subprocesses instead of `multiprocessing`, whose children import the caller's main script again, which may
    load torch or start training.
    """

    def __init__(
        self, graders: Sequence[tuple[str, Mapping[str, Any]]], timeout: float, size: int, memory: int
    ) -> None:
        self.graders, self.timeout, self.size, self.memory = list(graders), timeout, size, memory
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        self._closing = False
        weakref.finalize(self, end_all, self._workers)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcome of every job, in order."""
        with self._exclusively():
            return self._run(jobs)

    def submit(self, jobs: Sequence[Job]) -> "Future[list[Outcome]]":
        """The same in a thread of its own. `close` cancels it."""
        future: Future[list[Outcome]] = Future()

        def work() -> None:
            try:
                future.set_result(self.run(jobs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="grading", daemon=True).start()
        return future

    def start(self) -> None:
        """Start the workers and wait until they are ready, so that a broken grader is reported now."""
        with self._exclusively():
            self._fill(self.size)
            while not all(worker.ready for worker in self._workers):
                self._collect([])

    def close(self) -> None:
        self._closing = True
        with self._lock:
            end_all(self._workers)
            self._closing = False

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except BaseException:
                end_all(self._workers)  # otherwise late replies would be read as those of the next batch
                raise

    def _run(self, jobs: Sequence[Job]) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(jobs)
        waiting = deque(range(len(jobs)))
        while waiting or any(worker.job is not None for worker in self._workers):
            if self._closing:
                raise CancelledError
            busy = sum(worker.job is not None for worker in self._workers)
            self._fill(min(self.size, busy + len(waiting)))
            for worker in [w for w in self._workers if w.ready and w.job is None]:
                if waiting:
                    self._send(worker, waiting, jobs)
            self._collect(outcomes)
        return [outcome for outcome in outcomes if outcome is not None]

    def _fill(self, size: int) -> None:
        while len(self._workers) < size:
            self._workers.append(start_worker(self.graders, self.timeout, self.memory))

    def _send(self, worker: Worker, waiting: deque[int], jobs: Sequence[Job]) -> None:
        try:
            worker.channel.send(jobs[waiting[0]])
        except OSError:  # it died while idle; no answer is to blame
            self._remove(worker)
            return
        worker.job = waiting.popleft()
        worker.deadline = time.monotonic() + self.timeout

    def _collect(self, outcomes: list[Outcome | None]) -> None:
        """Wait for the next replies or deadline and record their outcomes."""
        active = [w for w in self._workers if w.job is not None or not w.ready]
        if not active:
            return
        timeout = max(0.0, min(w.deadline for w in active) - time.monotonic())
        readable = set(wait([w.channel for w in active], min(timeout, POLL)))
        for worker in active:
            if worker.channel in readable:
                self._receive(worker, outcomes)
            elif time.monotonic() >= worker.deadline:
                self._remove(worker)
                self._fail(worker, f"no result within {self.timeout if worker.ready else START_LIMIT:g} s", outcomes)

    def _receive(self, worker: Worker, outcomes: list[Outcome | None]) -> None:
        try:
            kind, value = worker.channel.recv()
        except (EOFError, OSError):
            self._fail(worker, f"its worker died ({self._remove(worker)})", outcomes)
            return
        if kind == "broken":
            self._remove(worker)
            raise SettingError(f"a reward cannot be loaded: {value}.")
        if kind == "ready":
            worker.ready = True
            return
        assert worker.job is not None
        outcomes[worker.job] = (value, None) if kind == "value" else (0.0, value)
        worker.job = None

    def _fail(self, worker: Worker, reason: str, outcomes: list[Outcome | None]) -> None:
        if worker.job is None:
            raise SettingError(f"a grading worker did not start: {reason}; check what the reward imports.")
        outcomes[worker.job] = (0.0, reason)

    def _remove(self, worker: Worker) -> str:
        self._workers.remove(worker)
        return worker.end()


def start_worker(graders: list[tuple[str, Mapping[str, Any]]], timeout: float, memory: int) -> Worker:
    ours, theirs = socket.socketpair()
    # The same import path as this process, so that user modules are found; one thread, as there are several workers.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "alula.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # prints of user functions must not mix with our output
            start_new_session=True,
            env=environment,
        )
    channel = Connection(ours.detach())
    channel.send((graders, timeout, memory))
    return Worker(process, channel, time.monotonic() + START_LIMIT)


def end_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().end()
