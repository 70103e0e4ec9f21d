"""Benchmarks of the engine: decode steps of any size, compared with a memory-bandwidth floor, and complete rollouts.

The floor of a decode step is a lower bound on its time: the bytes that must be read (weights and the policy's KV),
divided by the copy bandwidth measured in the same process.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from alula.bench.ceilings import Ceilings, timed
from alula.engine.batch_state import BatchFeatures
from alula.engine.block_manager import pages_for
from alula.engine.engine import Engine
from alula.engine.rollout import Sampling
from alula.engine.sequence import Request, Sequence, kind_of
from alula.errors import require
from alula.mismatch.leaderboard.kv_bytes import read_bytes
from alula.mismatch.plan.cost import timing_record
from alula.sparsity.footprint import trigger
from alula.sparsity.policy import DENSE, Sparsity


def weight_bytes(engine: Engine) -> int:
    """Bytes of weights that one decode step reads: all weights except an untied input embedding."""
    model: Any = engine.model
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total - (table.numel() * table.element_size() if table is not head else 0)


class StepBench:
    """Times decode steps of `batch` rows of `context` tokens on random KV. With an evictor, each row holds the most
    that the evictor allows at that length. `adapted`: whether the weights with the sparse adapter are used; by default
    if the policy is sparse and the engine has one."""

    def __init__(
        self, engine: Engine, batch: int, context: int, sparsity: Sparsity = DENSE, adapted: bool | None = None
    ) -> None:
        engine.check(sparsity)
        evict = sparsity.evict
        self.held = min(context, trigger(evict, 0, context)) if evict else context
        count = pages_for(self.held + engine.lookahead, engine.page)
        need, width = batch * count, engine.max_length // engine.page
        require(
            need <= engine.pool.usable,
            f"batch={batch}, context={context}: needs {need} pages of KV, but kv_memory holds {engine.pool.usable}; "
            "raise kv_memory, or lower batch or context.",
        )
        require(count <= width, f"context={context}: exceeds the engine's max_length={width * engine.page}.")
        require(batch <= engine.max_rows, f"batch={batch}: exceeds the engine's max_rows={engine.max_rows}.")
        self.engine, self.batch, self.context, self.sparsity = engine, batch, context, sparsity
        request = Request(0, [0], Sampling(max_new_tokens=1 << 20), sparsity, frozenset())
        default = engine.sparse_model is not None and not sparsity.dense
        request.kind = kind_of(sparsity, default if adapted is None else adapted)
        features = BatchFeatures.of([Sequence(request, 0)])
        if features.accumulated:
            features = replace(features, accumulated=self.held + engine.lookahead)
        self.state = engine.runner.batch(request.kind)
        self.state.prepare(features, keep=False)
        # Scattered pages, as in a long-running engine.
        order = np.random.default_rng(0).permutation(np.arange(1, engine.pool.count))[:need]
        self.table = order.reshape(batch, count).astype(np.int32)
        for row in range(batch):
            self.state.enter(Sequence(request, sample=row), row, engine.page)
        for filled in (*engine.cache.parts, *engine.cache.summaries.values()):
            if filled[:, -1].any():  # not the zeros of a fresh pool
                continue
            if filled.dtype != torch.uint8:
                filled.normal_()
            elif filled.dim() == 5:
                filled.random_(0, 64)  # e4m3 below 2
            else:
                filled.fill_(127)  # scales of 1
        self.size = engine.runner.step_size(self.state, range(batch), self.held + engine.lookahead)
        self.reset()

    def reset(self) -> None:
        engine, state = self.engine, self.state
        position, held, left = (np.zeros(state.rows, np.int64) for _ in range(3))
        position[: self.batch], held[: self.batch], left[: self.batch] = self.context - 1, self.held - 1, 1 << 20
        state.table[: self.batch, : self.table.shape[1]] = torch.from_numpy(self.table).to(engine.device)
        state.upload(position, held, left, np.full((state.rows, engine.lookahead), -1, np.int64))

    def seconds(self, chunks: int = 8) -> float:
        """Mean seconds of one step over `chunks` × lookahead steps. The context is reset after every chunk."""
        engine, runner, steps = self.engine, self.engine.runner, self.engine.lookahead
        with torch.inference_mode():
            graph = runner.graph_for(self.state, self.size)
            step = graph.replay if graph is not None else lambda: runner.step(self.state, self.size)
            total = 0.0
            for i in range(chunks + 1):
                self.reset()
                spent = timed(step, engine.device, steps)
                total += spent if i else 0.0  # the first is a warm-up
        return total / chunks

    def floor_bytes(self) -> int:
        engine = self.engine
        row = read_bytes(engine.geometry, engine.page, self.sparsity.select, self.context, self.held)
        return weight_bytes(engine) + self.batch * int(row)


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
        "kv_dtype": engine.geometry.kv_dtype,
        "ms": seconds * 1e3,
        "floor_ms": floor * 1e3,
        "of_floor": floor / seconds,
        "tokens_per_s": batch / seconds,
        "kv_bytes": batch * bench.held * engine.geometry.kv_token_bytes,
        "timing": timing_record(engine.geometry, bench.size.rows, bench.held, sparsity, seconds * 1e3),
    }


def rollouts(
    engine: Engine, batch: int, prompt: int, new_tokens: int, sparsity: Sparsity, seed: int = 0
) -> dict[str, Any]:
    """Times complete rollouts through the public API: random prompts of equal length, no stop token."""
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
        "kv_dtype": engine.geometry.kv_dtype,
        "seconds": seconds,
        "tokens_per_s": batch * new_tokens / seconds,
        "pool_tokens": engine.pool.usable * engine.page,
        "kv_peak_bytes": engine.pool.peak * engine.page * engine.geometry.kv_token_bytes,
        "kv_saved": float(np.mean([r.kv.saved for r in done])),
        "peak_pages_per_sequence": max(r.kv.peak_pages for r in done),
    }
