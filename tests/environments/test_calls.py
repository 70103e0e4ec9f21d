"""Calls of environments: in threads of their own, given up after a timeout, never in each other's way."""

import asyncio
import math
import threading
import time

from alula.environments import calls
from alula.environments.calls import Calls


def finish(pool: Calls, count: int) -> dict:
    outcomes = {}
    while len(outcomes) < count:
        outcomes |= {outcome.key: outcome for outcome in pool.poll(math.inf)}
    return outcomes


def test_values_and_exceptions_come_back_under_their_keys():
    pool = Calls(timeout=10)
    pool.start("a", lambda x: x + 1, 1)
    pool.start("b", lambda: 1 // 0)
    pool.start("c", exit)
    outcomes = finish(pool, 3)
    assert (outcomes["a"].value, outcomes["a"].failure) == (2, None)
    assert "ZeroDivisionError" in outcomes["b"].failure
    assert "SystemExit" in outcomes["c"].failure


def test_awaitables_share_one_loop_and_run_together():
    pool, loops = Calls(timeout=10), set()

    async def slow(value):
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0.2)
        return value

    began = time.monotonic()
    for value in range(10):
        pool.start(value, slow, value)
    assert {key: outcome.value for key, outcome in finish(pool, 10).items()} == {v: v for v in range(10)}
    assert len(loops) == 1
    assert time.monotonic() - began < 1.5, "one after the other would take 2 s"


def test_a_call_that_hangs_is_given_up_and_leaves_its_place_to_others(monkeypatch):
    monkeypatch.setattr(calls, "MOST_THREADS", 1)
    pool, release = Calls(timeout=0.2), threading.Event()
    pool.start("hangs", release.wait)
    pool.start("next", lambda: 5)
    assert pool.poll() == []
    outcomes = finish(pool, 2)
    assert outcomes["hangs"].failure == "no answer within 0.2 s"
    assert outcomes["next"].value == 5
    release.set()
    time.sleep(0.05)
    assert pool.poll() == [], "an answer that comes too late is dropped"


def test_an_awaitable_is_cancelled_at_the_timeout():
    pool, ended = Calls(timeout=0.2), threading.Event()

    async def hangs():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    pool.start("hangs", hangs)
    assert finish(pool, 1)["hangs"].failure == "no answer within 0.2 s"
    assert ended.wait(2)


def test_polling_does_not_wait():
    pool = Calls(timeout=10)
    pool.start("slow", time.sleep, 0.3)
    began = time.monotonic()
    assert pool.poll() == []
    assert time.monotonic() - began < 0.2
    assert 0.25 < finish(pool, 1)["slow"].seconds < 5


def test_a_task_that_exits_does_not_end_the_event_loop():
    pool = Calls(timeout=2)

    async def exits():
        asyncio.get_running_loop().create_task(leave())
        await asyncio.sleep(0.05)
        return 1

    async def leave():
        raise SystemExit("no key")

    async def works():
        await asyncio.sleep(0.01)
        return 2

    pool.start("exits", exits)
    finish(pool, 1)
    pool.start("works", works)
    assert finish(pool, 1)["works"].value == 2
