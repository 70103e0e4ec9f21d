"""What all routes share: the engine's thread, limits, metrics, and how a job is served until its client goes away."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request as HTTPRequest

from alula.engine.engine import Engine
from alula.engine.rollout import Rollout
from alula.errors import SettingError, require
from alula.serve.answers import FINISH, Turn, session_state
from alula.serve.bodies import Body, parse_body
from alula.serve.engine_job import EngineJob, Progress
from alula.serve.engine_thread import EngineThread
from alula.serve.metrics import Metrics
from alula.sparsity.policy import DENSE, Sparsity

B = TypeVar("B", bound=Body)


class UnknownModel(SettingError):
    """A model name that is not served."""


class TooLarge(Exception):
    """A body above the limit."""


class Busy(Exception):
    """The queue is full, or the server is about to end."""


@dataclass
class Service:
    """An engine that is served under a model name.

    max_body: most bytes of a request's body.
    max_queue: most rollouts that run or wait at a time.
    weights_folder: `/update_weights` reads only below it; without it the route is off.
    """

    engine: Engine
    model: str
    sparsity: Sparsity = DENSE
    max_body: int = 16 << 20
    max_queue: int = 4096
    weights_folder: Path | None = None
    metrics: Metrics = field(default_factory=Metrics)
    draining: bool = False
    load: int = 0
    """Rollouts that run or wait."""
    weight_dir: str | None = None
    """The folder that the weights were read from last."""

    def __post_init__(self) -> None:
        self.engine.check(self.sparsity)
        self.thread = EngineThread(self.engine)

    async def body(self, request: HTTPRequest, kind: type[B]) -> B:
        """The validated body of a request."""
        return parse_body(kind, await self.read(request))

    async def read(self, request: HTTPRequest) -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self.max_body:
                raise TooLarge(f"the body has more than {self.max_body} bytes; send less, or raise --max-body.")
            chunks.append(chunk)
        return b"".join(chunks)

    def check_model(self, name: str) -> None:
        if name != self.model:
            raise UnknownModel(f"model={name!r}: this server has {self.model!r} only.")

    def check_count(self, rollouts: int) -> None:
        require(
            rollouts <= self.max_queue,
            f"the request asks for {rollouts} rollouts (prompts times n), more than the queue's {self.max_queue}.",
        )

    async def events(self, request: HTTPRequest, job: EngineJob) -> AsyncGenerator[Progress | Rollout]:
        """Serve a job: its events up to the end. A client that goes away ends it, and frees its pages."""
        count = job.rollouts
        self.check_count(count)
        if self.draining:
            raise Busy("the server is about to end; send the request to another one.")
        if self.load + count > self.max_queue:
            raise Busy(f"the queue is full ({self.load} rollouts); try again later.")
        self.load += count
        started, first = time.monotonic(), True
        watcher = asyncio.create_task(self._cancel_when_gone(request, job))
        left = count
        try:
            self.thread.submit(job)
            async with aclosing(job.results()) as results:
                async for event in results:
                    if first and job.stream:
                        self.metrics.first_token_seconds.add(time.monotonic() - started)
                    first = False
                    if isinstance(event, Rollout):
                        left -= 1
                        self._count(event, job)
                    yield event
        finally:
            watcher.cancel()
            self.load -= count
            if left:
                self.thread.cancel(job)
            self.metrics.request_seconds.add(time.monotonic() - started)

    async def _cancel_when_gone(self, request: HTTPRequest, job: EngineJob) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.thread.cancel(job)

    def _count(self, rollout: Rollout, job: EngineJob) -> None:
        turn, metrics = Turn.of(rollout), self.metrics
        metrics.rollouts[FINISH[rollout.finish]] += 1
        metrics.generated_tokens += len(turn.token_ids)
        if rollout.sample_index == 0:
            metrics.prompt_tokens += turn.prompt_tokens
            metrics.cached_tokens += turn.cached_tokens
        if state := session_state(job.session, job.continued):
            metrics.sessions[state] += 1
