"""Works on jobs with one engine. Jobs may be added at any time."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from alula.engine.engine import Engine
from alula.engine.rollout import Rollout
from alula.engine.sequence import Request, rollout_key
from alula.environments.episodes import Episodes
from alula.errors import require
from alula.rollouts.job import Job


class JobRunner:
    """`add` jobs, and `step` until none is unfinished. `episodes` plays the jobs that have a start."""

    def __init__(self, engine: Engine, episodes: Episodes | None = None) -> None:
        self.engine, self.episodes = engine, episodes
        self.unfinished: dict[int, int] = {}
        """Rollouts that are missing, by the job's number."""
        self._requests: dict[int, int] = {}
        """The job of each of the engine's requests."""
        self.answers = 0
        """What environments have answered."""

    def add(self, number: int, job: Job) -> None:
        """Start a job; `step` returns its rollouts with this number."""
        if job.start is not None:
            require(self.episodes is not None, "a job has a start, but there is no environment.")
            assert self.episodes is not None
            self.episodes.begin(number, job.start, job.sampling, job.sparsity)
        else:
            self._requests[self.engine.submit(request_of(self.engine, job))] = number
        self.unfinished[number] = job.rollouts

    def step(
        self, idle: Callable[[], AbstractContextManager[Any]] = nullcontext, wait: float = math.inf
    ) -> list[tuple[int, Rollout]]:
        """Advance all jobs by one round of the engine; returns what has finished, with the numbers of the jobs.
        `idle` is entered while only environments work, for at most `wait` seconds."""
        if self.episodes is not None and self.episodes.live:
            sampling = bool(self._requests or self.episodes.serving)
            with nullcontext() if sampling else idle():
                self.answers += self.episodes.answer(0.0 if sampling else wait)
        done: list[tuple[int, Rollout]] = []
        if self._requests or (self.episodes is not None and self.episodes.serving):
            self.engine.step()
            for rollout in self.engine.finished():
                if rollout.request_id in self._requests:
                    done.append((self._requests[rollout.request_id], rollout))
                elif self.episodes is not None:
                    self.episodes.take(rollout)
        if self.episodes is not None:
            done += self.episodes.ended
            self.episodes.ended.clear()
        for number, _ in done:
            self._count(number)
        return done

    def abandon(self) -> None:
        """Give up all jobs."""
        if self.episodes is not None:
            self.episodes.abandon()
        for request in self._requests:
            self.engine.abort(request)
        self._requests.clear()
        self.unfinished.clear()

    @property
    def progress(self) -> int:
        """Tokens so far of the rollouts in progress, and the answers of environments."""
        requests = [*self._requests, *(self.episodes.serving if self.episodes else ())]
        tokens = (len(sequence.tokens) for each in requests for sequence in self.engine.unfinished(each))
        return sum(tokens) + self.answers

    def _count(self, number: int) -> None:
        self.unfinished[number] -= 1
        if not self.unfinished[number]:
            del self.unfinished[number]
            self._requests = {request: job for request, job in self._requests.items() if job != number}


def request_of(engine: Engine, job: Job) -> Request:
    """The engine's request for a job without an environment. An invalid one raises."""
    [request] = engine.requests(
        [job.prompt_ids],
        job.sampling,
        job.sparsity,
        record=job.record,
        keep_hidden=job.keep_hidden,
        indices=[job.prompt_index],
    )
    if job.sample_index is not None:
        request.key = rollout_key(job.sampling.seed, job.prompt_index, job.sample_index)
    if request.stop_strings and job.answered:
        request.stop_strings = replace(request.stop_strings, before=tuple(job.prompt_ids[-job.answered :]))
    return request
