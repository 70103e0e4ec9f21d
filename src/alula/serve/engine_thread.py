"""The engine in a thread of its own. Commands reach it through a queue that it empties between two steps."""

import asyncio
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal, TypeVar

from alula.engine.engine import Engine
from alula.engine.rollout import Rollout
from alula.engine.sequence import Request
from alula.errors import RunFailed, SettingError
from alula.heap import frozen_heap
from alula.serve.engine_job import EngineJob
from alula.serve.sessions import Sessions
from alula.sparsity.evict import needs_queries

T = TypeVar("T")
Command = Callable[[Exception | None], None]
"""Is given why the thread has ended, if it has; otherwise None."""
PauseMode = Literal["keep", "wait", "abort"]
IDLE_SECONDS = 5.0
"""How often an idle engine closes expired sessions."""
SEE_LOG = "see the server's log"
MOST_FAILURES = 3
"""Failed steps in a row after which the server reports itself as unhealthy."""


class EngineThread:
    """Runs an engine. All methods but `call`'s functions belong to the event loop's thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sessions = Sessions(engine)
        self.failures = 0
        """Failed steps in a row."""
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._jobs: dict[int, EngineJob] = {}
        """Jobs by the engine's request id."""
        self._held: list[EngineJob] = []
        """Jobs that arrived while the engine slept, or while it drains for a pause (`_must_wait`)."""
        self._when_idle: list[Future[None]] = []
        self._stopped = False
        self._ended: Exception | None = None
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; what still runs is dropped."""

        def stop() -> None:
            self._stopped = True

        with suppress(RunFailed):  # it has ended already
            await self.call(stop)
        await asyncio.to_thread(self._thread.join)

    def end(self, seconds: float) -> bool:
        """End the thread from outside the event loop; whether it ended in time."""
        self._stopped = True
        self._put(lambda ended: None)  # wakes it
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def healthy(self) -> bool:
        return self._alive and self.failures < MOST_FAILURES

    @property
    def _alive(self) -> bool:
        return self._thread.is_alive() and self._ended is None

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps."""
        future: Future[T] = Future()

        def command(ended: Exception | None) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    if ended is not None:
                        raise ended
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error if isinstance(error, Exception) else ended_by(error))
                    if not isinstance(error, Exception):
                        raise

        self._put(command)
        return await asyncio.wrap_future(future)

    def submit(self, job: EngineJob) -> None:
        """Queue a job; its events tell how it went, also if it was rejected."""
        self._put(lambda ended: self._submit(job) if ended is None else self._post([(job, ended)]))

    def cancel(self, job: EngineJob) -> None:
        """End a job: its unfinished rollouts come back as aborted."""
        self._put(lambda ended: self._cancel(job) if ended is None else None)

    def _put(self, command: Command) -> None:
        self._commands.put(command)
        if self._ended is not None:
            self._end_commands(self._ended)

    async def pause(self, mode: PauseMode) -> None:
        """Launch nothing more. `keep` freezes what runs, `abort` ends it, `wait` finishes it first. New requests wait
        for `resume`."""
        if mode == "wait":
            future: Future[None] = Future()
            await self.call(lambda: self._when_idle.append(future))
            return await asyncio.wrap_future(future)

        def pause() -> None:
            if mode == "abort":
                self._cancel_all()
            self.engine.pause()

        await self.call(pause)

    async def resume(self) -> None:
        def resume() -> None:
            self.engine.resume()
            self._end_wait()

        await self.call(resume)

    async def sleep(self) -> None:
        await self.call(self.engine.sleep)

    async def wake(self) -> None:
        await self.call(self.engine.wake)

    async def abort_all(self) -> None:
        """End all jobs; their rollouts come back with the tokens that they have."""
        with suppress(RunFailed):  # its thread has ended, and with it all jobs
            await self.call(self._cancel_all)

    async def abort_all_if_stuck(self) -> None:
        """Before the server ends: a paused or sleeping engine would never finish its jobs, nor start the others."""

        def abort() -> None:
            stuck = self.engine.paused or not self.engine.cache.resident
            self._fail(
                self.jobs() if stuck else list(self._held),
                RunFailed("the server ends while the engine is paused; send the request again later."),
            )

        with suppress(RunFailed):  # its thread has ended, and with it all jobs
            await self.call(abort)

    def jobs(self) -> list[EngineJob]:
        """Jobs in the engine, and those held back."""
        return list(dict.fromkeys([*self._jobs.values(), *self._held]))

    # -- in the engine's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        ended = RunFailed("the engine's thread has ended; restart the server.")
        try:
            with frozen_heap():
                while not self._stopped:
                    self._run_commands()
                    self._step()
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            ended = ended_by(error)
        self._end(ended)

    def _end(self, ended: Exception) -> None:
        """Nobody waits for a thread that has ended."""
        self._ended = ended
        jobs, waiting = self.jobs(), list(self._when_idle)
        self._jobs.clear()
        self._held.clear()
        self._when_idle.clear()
        self._post([(job, ended) for job in jobs])
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(ended)
        self._end_commands(ended)

    def _end_commands(self, ended: Exception) -> None:
        while True:
            try:
                self._commands.get_nowait()(ended)
            except Empty:
                return

    def _run_commands(self) -> None:
        """Run the queued commands; wait for one if there is nothing to compute."""
        engine = self.engine
        wait = not self._jobs or engine.paused or not engine.cache.resident
        while True:
            try:
                command = self._commands.get(block=wait, timeout=IDLE_SECONDS if wait else None)
            except Empty:
                return
            command(None)
            wait = False

    def _step(self) -> None:
        engine = self.engine
        if not engine.cache.resident:
            return
        if not self._when_idle:
            for job in list(self._held):
                self._held.remove(job)
                self._submit(job)
        try:
            engine.step()
            if self._jobs:
                self.failures = 0
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.failures += 1
            self._fail(self.jobs(), RunFailed(f"the engine failed: {type(error).__name__}; {SEE_LOG}."))
        self.sessions.forget_expired()
        self._deliver()
        if self._when_idle and not self._jobs:
            engine.pause()
            self._end_wait()

    def _end_wait(self) -> None:
        for future in self._when_idle:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
        self._when_idle.clear()

    def _submit(self, job: EngineJob) -> None:
        if self._must_wait(job):
            self._held.append(job)
            return
        try:
            for request in job.requests:
                request_id = self._start(job, request)
                self._jobs[request_id] = job
                job.live[request_id] = request.sampling.n
        except SettingError as error:
            self._fail([job], error)
        except Exception as error:  # no memory for it, perhaps: the others go on
            traceback.print_exc(file=sys.stderr)
            self._fail([job], RunFailed(f"the request could not be started: {type(error).__name__}; {SEE_LOG}."))
        except BaseException as error:  # the thread ends, and does not know this job yet
            self._post([(job, ended_by(error))])
            raise

    def _must_wait(self, job: EngineJob) -> bool:
        """Whether a job cannot be submitted now. The text that queries are first measured on is sampled, for which the
        engine must not be paused."""
        engine = self.engine
        unmeasured = engine.paused and engine.query_statistics is None
        return (
            bool(self._when_idle)
            or not engine.cache.resident
            or (unmeasured and any(needs_queries(request.sparsity) for request in job.requests))
        )

    def _start(self, job: EngineJob, request: Request) -> int:
        """Submit a request, or continue the session it belongs to."""
        turn = self.sessions.take(job.session) if job.session is not None else None
        if turn is not None and job.session is not None:
            given = turn.given(request, job.seeded)
            if given is not None:
                try:
                    request_id = self.engine.extend(turn.session, given, request.sampling)
                except Exception:
                    self.sessions.keep(job.session, turn)
                    raise
                job.continued = True
                return request_id
            self.engine.close(turn.session)
        return self.engine.submit(request)

    def _cancel(self, job: EngineJob) -> None:
        if job in self._held:
            self._fail([job], SettingError("the request was aborted before it started."))
        for request_id in job.live:
            self.engine.abort(request_id)

    def _cancel_all(self) -> None:
        for job in self.jobs():
            self._cancel(job)

    def _fail(self, jobs: list[EngineJob], error: Exception) -> None:
        """End jobs with an error."""
        for job in jobs:
            for request_id in job.live:
                self.engine.abort(request_id)
                self._jobs.pop(request_id, None)
            job.live.clear()
        self._held = [job for job in self._held if job not in jobs]
        self._post([(job, error) for job in jobs])

    def _deliver(self) -> None:
        """Hand new tokens and finished rollouts to their jobs."""
        events: list[tuple[EngineJob, Any]] = []
        try:
            for rollout in self.engine.finished():
                self._finish(rollout, events)
            live = {request_id: self.engine.unfinished(request_id) for request_id in self._jobs}
            for request_id, job in self._jobs.items():
                if job.stream:
                    events += [(job, new) for sequence in live[request_id] if (new := job.progress(sequence))]
        finally:
            self._post(events)
        lost = dict.fromkeys(self._jobs[request_id] for request_id, sequences in live.items() if not sequences)
        if lost:  # ended by a failure that was not their own
            self._fail(list(lost), RunFailed(f"the engine failed; {SEE_LOG}."))

    def _finish(self, rollout: Rollout, events: list[tuple[EngineJob, Any]]) -> None:
        job = self._jobs.get(rollout.request_id)
        if job is None:
            if rollout.session is not None:
                self.engine.close(rollout.session)
            return
        events.append((job, rollout))
        job.live[rollout.request_id] -= 1
        if not job.live[rollout.request_id]:
            del job.live[rollout.request_id], self._jobs[rollout.request_id]
        if job.session is not None:
            self.sessions.keep_rollout(job.session, rollout, job.requests[0])

    def _post(self, events: list[tuple[EngineJob, Any]]) -> None:
        def post() -> None:
            for job, event in events:
                job.events.put_nowait(event)

        if events and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(post)


def ended_by(error: BaseException) -> RunFailed:
    return RunFailed(f"the engine's thread has ended ({type(error).__name__}; {SEE_LOG}); restart the server.")
