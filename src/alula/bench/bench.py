"""Measurements of the engine: decode steps at any size, whole rollouts, and the floor they are compared with.

The floor of a decode step is the bytes that must move (weights, and the KV that the policy reads) over the copy
bandwidth measured in the same process: no implementation runs faster.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from alula.engine.block_manager import pages_for
from alula.engine.engine import Engine
from alula.engine.features import Features
from alula.engine.rollout import Sampling
from alula.engine.sequence import Request, Sequence
from alula.errors import require
from alula.mismatch.plan.cost import Shape
from alula.mismatch.plan.timings import timing_record
from alula.sparsity.policy import DENSE, Sparsity, budget_at


@dataclass
class Ceilings:
    """What this machine can do: bytes per second of a large copy (read + written), bf16 matrix FLOP/s."""

    bandwidth: float
    matrix: float


def timed(function: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Mean seconds of `repeat` calls, back to back."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeat):
            function()
        return (time.perf_counter() - start) / repeat
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeat):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / repeat


def measure_ceilings(device: torch.device) -> Ceilings:
    cuda = device.type == "cuda"
    size, n = (1 << 32, 8192) if cuda else (1 << 27, 1024)
    copy = _copy_seconds(size, device)
    dtype = torch.bfloat16 if cuda else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    a @ b
    matrix = min(timed(lambda: a @ b, device, 5) for _ in range(3))
    return Ceilings(2 * size / copy, 2 * n**3 / matrix)


def _copy_seconds(size: int, device: torch.device) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    target.copy_(source)
    return min(timed(lambda: target.copy_(source), device, 5) for _ in range(3))


def weight_bytes(engine: Engine) -> int:
    """Weights that one decode step reads: all of them, less an embedding table that is only looked up."""
    model: Any = engine.model
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total - (table.numel() * table.element_size() if table is not head else 0)


def kv_bytes(engine: Engine, context: int, held: int, sparsity: Sparsity) -> int:
    """KV, and page summaries, that attention must read for one row of `context` tokens with `held` of them cached."""
    shape = engine.shape
    per_layer = shape.token_bytes // shape.layers
    select = sparsity.select
    if select is None:
        return held * shape.token_bytes
    page = engine.page
    budget = min(held, pages_for(budget_at(select.budget, context), page) * page)
    dense = min(select.dense_layers, shape.layers)
    summaries = pages_for(held, page) * per_layer // 2 * Features(selector=select.method).summary_kinds
    if budget >= held:
        summaries = 0
    return dense * held * per_layer + (shape.layers - dense) * (budget * per_layer + summaries)


class StepBench:
    """Decode steps of `batch` rows of `context` tokens, with random KV: all of it, or the most that an evictor holds
    at that length."""

    def __init__(self, engine: Engine, batch: int, context: int, sparsity: Sparsity = DENSE) -> None:
        engine.check(sparsity)
        evict = sparsity.evict
        self.held = min(context, budget_at(evict.budget, context) + evict.buffer) if evict else context
        count = pages_for(self.held + engine.lookahead, engine.page)
        need, width = batch * count, engine.rows.table.shape[1]
        require(
            need <= engine.pool.usable,
            f"batch {batch} × context {context} needs {need} pages of KV, "
            f"kv_memory holds {engine.pool.usable}; raise it or lower them.",
        )
        require(count <= width, f"context={context}: more than the engine's max_length={width * engine.page} holds.")
        require(batch <= engine.rows.count, f"batch={batch}: the engine has max_rows={engine.rows.count}.")
        self.engine, self.batch, self.context, self.sparsity = engine, batch, context, sparsity
        request = Request(0, [0], Sampling(max_new_tokens=1 << 20), sparsity, frozenset())
        self.features = Features.of([request])
        engine.cache.prepare(
            summary_kinds=self.features.summary_kinds,
            ring=self.features.ring,
            accumulated_tokens=self.held + engine.lookahead if self.features.accumulates else 0,
        )
        engine.rows.prepare(self.features)
        order = np.random.default_rng(0).permutation(np.arange(1, engine.pool.count))[:need]  # as churn leaves it
        self.table = order.reshape(batch, count).astype(np.int32)
        for row in range(batch):
            sequence = Sequence(request, 0, row=row)
            engine.rows.enter(sequence, row, engine.page)
        for filled in (engine.cache.keys, engine.cache.values, engine.cache.summaries):
            if filled is not None and not filled[:, -1].any():  # as a fresh pool holds it
                filled.normal_()
        self.most = engine.runner._context(self.held + engine.lookahead)
        self.bucket = engine.runner._bucket(batch)
        self.reset()

    def reset(self) -> None:
        engine, rows = self.engine, self.engine.rows
        position, held, left = (np.zeros(rows.count, np.int64) for _ in range(3))
        position[: self.batch], held[: self.batch], left[: self.batch] = self.context - 1, self.held - 1, 1 << 20
        engine.rows.table[: self.batch, : self.table.shape[1]] = torch.from_numpy(self.table).to(engine.device)
        rows.upload(position, held, left, np.full((rows.count, engine.lookahead), -1, np.int64))

    def seconds(self, chunks: int = 8) -> float:
        """Mean time of one step, over `chunks` × lookahead steps (the context grows within a chunk only)."""
        engine, runner, steps = self.engine, self.engine.runner, self.engine.lookahead
        with torch.inference_mode():
            graph = runner._graph(self.bucket, self.most, self.features)
            one = graph.replay if graph is not None else lambda: runner._step(self.bucket, self.most, self.features)
            total = 0.0
            for i in range(chunks + 1):
                self.reset()
                spent = timed(one, engine.device, steps)
                total += spent if i else 0.0  # the first is a warm-up
        return total / chunks

    def floor_bytes(self) -> int:
        return weight_bytes(self.engine) + self.batch * kv_bytes(self.engine, self.context, self.held, self.sparsity)


def decode_step(engine: Engine, batch: int, context: int, sparsity: Sparsity, ceilings: Ceilings) -> dict[str, Any]:
    bench = StepBench(engine, batch, context, sparsity)
    seconds = bench.seconds()
    floor = bench.floor_bytes() / ceilings.bandwidth
    return {
        "kind": "decode step",
        "model": engine.name,
        "batch": batch,
        "context": context,
        "sparsity": sparsity.describe(),
        "ms": seconds * 1e3,
        "floor_ms": floor * 1e3,
        "of_floor": floor / seconds,
        "tokens_per_s": batch / seconds,
        "kv_bytes": batch * bench.held * engine.shape.token_bytes,
        "timing": timing_record(Shape.of(engine.model), bench.bucket, bench.held, sparsity, seconds * 1e3),
    }


def rollouts(
    engine: Engine, batch: int, prompt: int, new_tokens: int, sparsity: Sparsity, seed: int = 0
) -> dict[str, Any]:
    """Whole rollouts through the public API: random prompts of equal length, no stop token."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, engine.model.config.vocab_size, (batch, prompt)).tolist()
    sampling = Sampling(max_new_tokens=new_tokens, ignore_eos=True, seed=seed)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    engine.pool.peak = 0
    start = time.perf_counter()
    done = engine.generate(prompts, sampling, sparsity, progress=False)
    seconds = time.perf_counter() - start
    return {
        "kind": "rollouts",
        "model": engine.name,
        "batch": batch,
        "prompt": prompt,
        "new_tokens": new_tokens,
        "sparsity": sparsity.describe(),
        "seconds": seconds,
        "tokens_per_s": batch * new_tokens / seconds,
        "kv_peak_bytes": engine.pool.peak * engine.page * engine.shape.token_bytes,
        "kv_saved": float(np.mean([r.kv.saved for r in done])),
        "peak_pages_per_sequence": max(r.kv.peak_pages for r in done),
    }


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
        requests.append(Request(next(engine._ids), prompt, own, sparsity, frozenset(), i))
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
        "kv_pool_bytes": engine.pool.count * engine.page * engine.shape.token_bytes,
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
        self.decode, self.evict, self.swap = self.runner.decode, self.runner.evict, self.runner.swap_out
        self.runner.decode, self.runner.evict = self.timed_decode, self.timed_evict  # type: ignore[method-assign]
        self.runner.swap_out = self.counted_swap  # type: ignore[method-assign]
        self.started = False
        self.done = self.tokens = self.swaps = self.events = self.running = self.unchanged = 0
        self.live: list[int] = []
        self.evictions: list[tuple[Any, Any]] = []
        self.begin = self.mark()

    def remove(self) -> None:
        self.runner.decode, self.runner.evict, self.runner.swap_out = self.decode, self.evict, self.swap  # type: ignore[method-assign]

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

    def timed_decode(self, chunk: Any, features: Features) -> Any:
        if not self.started and self._settled(chunk):
            self.started, self.begin = True, self.mark()
        out = self.decode(chunk, features)
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
        assert scheduler is not None
        self.unchanged = self.unchanged + 1 if self.running == len(chunk.parts) else 0
        self.running = len(chunk.parts)
        aged = any(len(group.request.prompt_ids) > FRESH for group in scheduler.waiting)
        return not aged or self.unchanged >= 4

    def timed_evict(self, event: Any, table: Any) -> Any:
        before = self.mark()
        out = self.evict(event, table)
        if self.started:
            self.evictions.append((before, self.mark()))
            self.events += len(event.rows)
        return out

    def counted_swap(self, out: Any) -> None:
        self.swaps += self.started
        self.swap(out)

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


def packed_scoring(engine: Engine, sequences: int, length: int, ceilings: Ceilings) -> dict[str, Any]:
    """Dense scoring of whole sequences, packed: share of the measured matrix rate."""
    from alula.engine.rollout import Rollout

    rng = np.random.default_rng(0)
    prompt, config = 32, engine.model.config
    made = []
    for _ in range(sequences):
        ids = rng.integers(0, config.vocab_size, length).tolist()
        made.append(Rollout(ids[:prompt], ids[prompt:], None, "length"))
    engine.score(made[:1])
    engine.score(made)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    engine.score(made)
    scoring = time.perf_counter() - start
    packed = [r.prompt_ids + r.token_ids for r in made]
    per_pass = max(1, engine.prefill_tokens // length)
    batches = [packed[i : i + per_pass] for i in range(0, len(packed), per_pass)]
    prefill = timed(lambda: [engine.runner.forward_packed(b) for b in batches], engine.device, 2)
    model: Any = engine.model
    head = model.get_output_embeddings().weight.numel()
    table = model.get_input_embeddings().weight.numel()
    total = sum(p.numel() for p in model.parameters())
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    body = total - table - (0 if tied else head)
    tokens = sequences * length
    shape = engine.shape
    attention = 2 * 2 * shape.layers * shape.q_heads * shape.head_dim * sequences * length * length / 2
    work = 2 * body * tokens + attention
    return {
        "kind": "packed prefill and score",
        "model": engine.name,
        "sequences": sequences,
        "length": length,
        "prefill_s": prefill,
        "score_s": scoring,
        "prefill_tokens_per_s": tokens / prefill,
        "prefill_of_matrix_rate": work / prefill / ceilings.matrix,
        "score_of_matrix_rate": (work + 2 * head * tokens) / scoring / ceilings.matrix,
    }


def idle_share(engine: Engine, batch: int, context: int, new_tokens: int) -> dict[str, Any]:
    """1 − (back-to-back replays of the same steps) / (wall time of the decode phase of a real generation)."""
    replay = StepBench(engine, batch, context).seconds()
    prompt = context - new_tokens // 2
    times: list[float] = []
    decode = engine.runner.decode

    def watched(chunk: Any, features: Features) -> Any:
        if not times and engine.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        return decode(chunk, features)

    engine.runner.decode = watched  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, engine.model.config.vocab_size, (batch, prompt)).tolist()
    together, engine.prefill_tokens = engine.prefill_tokens, batch * prompt  # all rows start with the first step
    engine.generate(prompts, Sampling(max_new_tokens=2 * engine.lookahead + 1, ignore_eos=True), progress=False)
    times.clear()
    engine.generate(prompts, Sampling(max_new_tokens=new_tokens + 1, ignore_eos=True), progress=False)
    wall = time.perf_counter() - times[0]
    engine.prefill_tokens = together
    engine.runner.decode = decode  # type: ignore[method-assign]
    return {
        "kind": "idle",
        "model": engine.name,
        "batch": batch,
        "context": context,
        "steps": new_tokens,
        "replay_ms": replay * 1e3,
        "wall_ms": wall / new_tokens * 1e3,
        "idle": 1 - replay * new_tokens / wall,
    }
