"""Calls of environments beside the engine: each in a thread of its own, given up after a timeout."""

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from alula.errors import with_place

MOST_THREADS = 256
"""Calls that run at the same time; the others wait for their turn, and their timeout does not run yet."""


@dataclass
class Call:
    key: Any
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    queued: float
    began: float = 0.0
    future: "Future[Any] | None" = None
    """The result of an awaitable, on the event loop."""


@dataclass
class Outcome:
    """What became of a call: a value, or why there is none."""

    key: Any
    seconds: float
    """Since `start` was called."""
    value: Any = None
    failure: str | None = None


@dataclass
class Calls:
    """Runs functions in daemon threads. A thread that hangs is left behind: it holds up neither others nor the exit.

    An awaitable result is awaited on one event loop that all calls share, and cancelled at the timeout.
    """

    timeout: float
    _running: dict[int, Call] = field(default_factory=dict)
    _waiting: deque[Call] = field(default_factory=deque)
    _done: "SimpleQueue[tuple[int, Any, str | None]]" = field(default_factory=SimpleQueue)
    _ids: count = field(default_factory=count)
    _loop: asyncio.AbstractEventLoop | None = None
    _lock: Any = field(default_factory=threading.Lock)
    _thread: threading.local = field(default_factory=threading.local)

    def start(self, key: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Call the function as soon as a thread is free; `poll` returns the outcome with `key`."""
        self._waiting.append(Call(key, function, arguments, time.monotonic()))
        self._launch()

    def poll(self, wait: float = 0.0, grace: float = 0.0) -> list[Outcome]:
        """Outcomes so far, and those that come within `grace` seconds. Waits at most `wait` seconds for the first one,
        or for the first timeout."""
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + grace
        while True:
            waits = wait > 0 and not outcomes
            left = min(wait, self._patience()) if waits else deadline - time.monotonic()
            timeout = max(0.0, left) if self._running or waits else 0.0
            try:
                call_id, value, failure = self._done.get(timeout=timeout)
            except Empty:
                break
            call = self._running.pop(call_id, None)
            if call is not None:  # else it was given up
                outcomes.append(Outcome(call.key, time.monotonic() - call.queued, value, failure))
                self._launch()
            if waits:
                deadline = time.monotonic() + grace
        for call_id, call in list(self._running.items()):
            if time.monotonic() - call.began > self.timeout:
                del self._running[call_id]
                if call.future is not None:
                    call.future.cancel()
                seconds = time.monotonic() - call.queued
                outcomes.append(Outcome(call.key, seconds, failure=f"no answer within {self.timeout:g} s"))
        self._launch()
        return outcomes

    def forget(self) -> None:
        """Give up all calls but those without a key, whose outcome is not needed."""
        for call_id, call in list(self._running.items()):
            if call.key is not None:
                del self._running[call_id]
                if call.future is not None:
                    call.future.cancel()
        self._waiting = deque(call for call in self._waiting if call.key is None)

    def finish(self, seconds: float) -> None:
        """Wait at most so long for the calls that are left, and drop their outcomes."""
        deadline = time.monotonic() + seconds
        while (self._running or self._waiting) and (left := deadline - time.monotonic()) > 0:
            self.poll(left)

    def _patience(self) -> float:
        """Seconds until the first of the running calls is given up."""
        now = time.monotonic()
        return max(0.0, min((call.began + self.timeout - now for call in self._running.values()), default=0.0)) + 1e-3

    def _launch(self) -> None:
        while self._waiting and len(self._running) < MOST_THREADS:
            call, call_id = self._waiting.popleft(), next(self._ids)
            call.began = time.monotonic()
            self._running[call_id] = call
            threading.Thread(target=self._run, args=(call_id, call), daemon=True, name="environment").start()

    def _run(self, call_id: int, call: Call) -> None:
        value, failure = None, None
        self._thread.call = call
        try:
            value = self.resolve(call.function(*call.arguments))
        except BaseException as error:  # also an environment that calls exit()
            failure = with_place(error)
        self._done.put((call_id, value, failure))

    def resolve(self, value: Any) -> Any:
        """The value, awaited if necessary. For the thread of a call."""
        if not inspect.isawaitable(value):
            return value
        future = asyncio.run_coroutine_threadsafe(awaited(value), self._event_loop())
        self._thread.call.future = future
        return future.result()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=run_always, args=(self._loop,), daemon=True, name="environments").start()
        return self._loop


def run_always(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop, also after a task that called exit()."""
    while True:
        with suppress(BaseException):
            loop.run_forever()


async def awaited(value: Any) -> Any:
    return await value
