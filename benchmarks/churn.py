"""Steady decoding under one KV pool, where rows of every age come and go; used by engine.py and sparrow.py."""

import time
from typing import Any

import numpy as np
import torch

from alula import Engine, Sampling, Sparsity
from alula.engine import engine_core as engine_module
from alula.engine.sequence import Request


def churn(engine: Engine, sparsity: Sparsity, *, longest: int, rows: int, steps: int) -> dict[str, Any]:
    """Steady decoding under one KV pool: rows staggered over 0 .. longest, each replaced by a fresh one as it ends.

    The first `rows` sequences come with prompts of every age (longest first, so that the last ones fit), and are
    followed by short ones. Timing starts when all of them run, or as many as the pool admits. Time spent evicting
    is measured on the device.
    """
    rng = np.random.default_rng(0)
    vocabulary = engine.model.config.vocab_size
    ages = [max(FRESH + 1, longest * (2 * i + 1) // (2 * rows)) for i in reversed(range(rows))] + [FRESH] * rows
    sampling = Sampling(max_new_tokens=longest, ignore_eos=True)
    requests = []
    for i, age in enumerate(ages):
        prompt = rng.integers(0, vocabulary, age).tolist()
        own = Sampling(max_new_tokens=max(1, longest - age), ignore_eos=True) if age > FRESH else sampling
        requests.append(Request(engine.inputs.next_id(), prompt, own, sparsity, frozenset(), i))
    clock = _ChurnClock(engine, steps)
    try:
        for _ in engine.stream(requests):
            pass
    except _Enough:
        pass
    finally:
        clock.remove()
    return {
        "kind": "churn",
        "model": engine.name,
        "sparsity": sparsity.describe(),
        "longest": longest,
        "steps": steps,
        "kv_pool_bytes": engine.pool.count * engine.page * engine.geometry.kv_token_bytes,
        **clock.summary(),
    }


FRESH = 16
"""Prompt tokens of a sequence that starts from nothing."""


class _Enough(Exception):
    pass


class _ChurnClock:
    """Watches the runner from outside: when the fleet is complete, marks chunks and evictions with events."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self.engine, self.steps = engine, steps
        self.runner = engine.runner
        self.decode, self.evict, self.swap = self.runner.decode, self.runner.evict, engine_module.swap_out
        self.runner.decode, self.runner.evict = self.timed_decode, self.timed_evict  # type: ignore[method-assign]
        engine_module.swap_out = self.counted_swap  # type: ignore[assignment]
        self.started = False
        self.done = self.tokens = self.swaps = self.events = self.running = self.unchanged = 0
        self.live: list[int] = []
        self.evictions: list[tuple[Any, Any]] = []
        self.begin = self.mark()

    def remove(self) -> None:
        self.runner.decode, self.runner.evict = self.decode, self.evict  # type: ignore[method-assign]
        engine_module.swap_out = self.swap

    def mark(self) -> Any:
        if self.engine.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        if self.engine.device.type != "cuda":
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def timed_decode(self, chunk: Any, version: int) -> Any:
        if not self.started and self._settled(chunk):
            self.started, self.begin = True, self.mark()
        out = self.decode(chunk, version)
        if self.started:
            self.done += chunk.steps
            self.tokens += sum(part.steps for part in chunk.parts)
            self.live.append(len(chunk.parts))
            if self.done >= self.steps:
                self.end = self.mark()
                raise _Enough
        return out

    def _settled(self, chunk: Any) -> bool:
        """All the aged sequences run, or the pool has admitted no more for a while."""
        scheduler = self.engine._scheduler
        self.unchanged = self.unchanged + 1 if self.running == len(chunk.parts) else 0
        self.running = len(chunk.parts)
        aged = any(len(group.request.prompt_ids) > FRESH for group in scheduler.waiting)
        return not aged or self.unchanged >= 4

    def timed_evict(self, state: Any, event: Any, table: Any) -> Any:
        before = self.mark()
        out = self.evict(state, event, table)
        if self.started:
            self.evictions.append((before, self.mark()))
            self.events += len(event.rows)
        return out

    def counted_swap(self, runner: Any, out: Any) -> None:
        self.swaps += self.started
        self.swap(runner, out)

    def summary(self) -> dict[str, Any]:
        seconds = self.seconds(self.begin, self.end)
        evicting = sum(self.seconds(a, b) for a, b in self.evictions)
        return {
            "seconds": seconds,
            "tokens_per_s": self.tokens / seconds,
            "mean_rows": float(np.mean(self.live)),
            "evictions": self.events,
            "swaps": self.swaps,
            "evicting_share": evicting / seconds,
            "step_ms": seconds / self.done * 1e3,
        }
