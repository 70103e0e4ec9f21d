"""The queue of jobs: which of them wait, what they need, what is finished. None is lost, and none answered twice."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from alula.engine.rollout import Rollout
from alula.errors import RunFailed
from alula.rollouts.job import Job

MOST_LOSSES = 5
"""A job whose worker has died so many times ends the run: it probably is the cause."""


@dataclass(frozen=True)
class Needs:
    """The weights that a job may be answered with."""

    shipments: tuple[int, int] | None = None
    """Numbers of the weights and of the sparse adapter, if no others will do."""
    version: int = 0
    """Otherwise: this version or a later one. The job goes on over updates."""

    def met_by(self, shipments: tuple[int, int], version: int) -> bool:
        return version >= self.version if self.shipments is None else shipments == self.shipments


@dataclass
class Task:
    """A job in the queue."""

    number: int
    job: Job
    needs: Needs
    finished: dict[int, Rollout] = field(default_factory=dict)
    """By sample."""
    lost: int = 0

    @property
    def done(self) -> bool:
        return len(self.finished) == self.job.rollouts

    @property
    def rank(self) -> tuple[bool, int]:
        """Jobs that need exact weights go first: everything else waits for them."""
        return self.needs.shipments is None, self.number


class JobQueue:
    """Jobs are taken in the order in which they were put."""

    def __init__(self) -> None:
        self.tasks: dict[int, Task] = {}
        self._waiting: list[tuple[tuple[bool, int], int]] = []
        self._numbers = count()

    def put(self, job: Job, needs: Needs) -> int:
        number = next(self._numbers)
        self.tasks[number] = task = Task(number, job, needs)
        heapq.heappush(self._waiting, (task.rank, number))
        return number

    def take(self, room: int, shipments: tuple[int, int], version: int) -> list[Task]:
        """The next jobs for a worker with these weights: until `room` rollouts are reached, but at least one."""
        taken: list[Task] = []
        while self._waiting and room > 0:
            task = self.tasks.get(self._waiting[0][1])
            if task is None or task.done:  # given back, and finished after all
                heapq.heappop(self._waiting)
                continue
            if not task.needs.met_by(shipments, version):
                break
            heapq.heappop(self._waiting)
            room -= task.job.rollouts
            taken.append(task)
        return taken

    def finish(self, number: int, rollout: Rollout) -> bool:
        """Keep a rollout; False if it is known already, from a worker that was given up."""
        task = self.tasks.get(number)
        sample = rollout.sample_index if task is not None and task.job.start is None else 0
        if task is None or sample in task.finished:
            return False
        task.finished[sample] = rollout
        return True

    def give_back(self, numbers: Iterable[int], *, lost: bool) -> None:
        """Let unfinished jobs wait again, in their old place. `lost`: their worker has died."""
        for number in numbers:
            task = self.tasks.get(number)
            if task is None or task.done:
                continue
            task.lost += lost
            if task.lost >= MOST_LOSSES:
                raise RunFailed(
                    f"the prompt {task.job.prompt_index} has ended {task.lost} rollout workers, the last one without a "
                    "message; look at Ray's logs (out of memory?), lower engine.kv_memory or engine.max_rows."
                )
            heapq.heappush(self._waiting, (task.rank, number))

    def pop(self, numbers: Iterable[int]) -> list[Rollout]:
        """The rollouts of finished jobs, in order; the queue forgets them."""
        tasks = [self.tasks.pop(number) for number in numbers]
        return [task.finished[sample] for task in tasks for sample in sorted(task.finished)]

    def forget(self, numbers: Iterable[int]) -> None:
        """Give jobs up."""
        for number in numbers:
            self.tasks.pop(number, None)
        self._waiting = [each for each in self._waiting if each[1] in self.tasks]
        heapq.heapify(self._waiting)

    @property
    def waiting(self) -> int:
        """Rollouts of jobs that wait for a worker."""
        tasks = [self.tasks[number] for _, number in self._waiting if number in self.tasks]
        return sum(task.job.rollouts for task in tasks if not task.done)
