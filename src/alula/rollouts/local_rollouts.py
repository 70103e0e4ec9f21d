"""Rollouts of this rank's own engine."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count

from torch import Tensor

from alula.engine.engine import Engine
from alula.engine.rollout import Rollout
from alula.engine.schedule_plan import KVNeed
from alula.environments.episodes import Episodes
from alula.learner.learner import Learner
from alula.models.lora import Adapter
from alula.rollouts.job import Job
from alula.rollouts.job_runner import JobRunner, request_of
from alula.rollouts.rollouts import Idle, OnRollout, Rollouts
from alula.sparsity.policy import Sparsity


class LocalRollouts(Rollouts):
    """Every rank has an engine and works on its own jobs, when they are collected."""

    def __init__(
        self, engine: Engine, episodes: Episodes | None = None, check_stop: Callable[[], None] = lambda: None
    ) -> None:
        self.engine, self.runner, self.check_stop = engine, JobRunner(engine, episodes), check_stop
        self._tickets = count()
        self._jobs: dict[int, Sequence[Job]] = {}

    def submit(self, jobs: Sequence[Job], *, least: int | None = None) -> int:
        ticket = next(self._tickets)
        self._jobs[ticket] = jobs
        return ticket

    def collect(
        self, ticket: int, on_rollout: OnRollout = lambda rollout: None, idle: Idle = nullcontext
    ) -> list[Rollout]:
        jobs = self._jobs.pop(ticket)
        finished: dict[int, list[Rollout]] = defaultdict(list)
        try:
            for number, job in enumerate(jobs):
                self.runner.add(number, job)
            while self.runner.unfinished:
                self.check_stop()
                for number, rollout in self.runner.step(idle):
                    finished[number].append(rollout)
                    on_rollout(rollout)
        except BaseException:
            self.runner.abandon()
            raise
        return in_order(jobs, finished)

    def acceptance(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        return self.engine.acceptance(rollouts)

    def publish(self, learner: Learner, version: int) -> None:
        if learner.in_place:
            self.engine.policy_version = version  # the optimizer wrote into the engine's own parameters
        else:
            self.engine.update_weights(learner.full_parameters(), lazily=True, version=version)

    def publish_adapter(self, adapter: Adapter) -> None:
        self.engine.update_sparse_adapter(adapter)

    def measure_queries(self, text: list[list[int]]) -> None:
        self.engine.measure_queries(text)

    def asleep(self) -> AbstractContextManager[None]:
        return self.engine.asleep()

    def check(self, sparsity: Sparsity) -> None:
        self.engine.check(sparsity)

    def need(self, job: Job) -> KVNeed:
        return self.engine.need(request_of(self.engine, job))

    def peak_bytes(self) -> int:
        return taken_peak(self.engine)

    def close(self) -> None:
        self.runner.abandon()


def taken_peak(engine: Engine) -> int:
    """Most KV memory in use at a time since the last call."""
    peak, engine.pool.peak = engine.pool.peak, 0
    return peak * engine.page * engine.geometry.kv_token_bytes


def in_order(jobs: Sequence[Job], finished: dict[int, list[Rollout]]) -> list[Rollout]:
    """The rollouts of jobs 0, 1, …, those of one job by their sample."""
    return [
        rollout
        for number in range(len(jobs))
        for rollout in sorted(finished[number], key=lambda rollout: rollout.sample_index)
    ]
