"""Sparrow's numbers on one GPU: `python benchmarks/sparrow.py --out benchmarks/results/sparrow-h200.json`.

Random weights of real shapes, bf16. Each section runs alone with `--only decode,share,...`; results are merged into
the output file; `python benchmarks/table.py` makes the Markdown tables of docs/benchmarks.md from it.
ALULA_SMOLLM2 names SmolLM2-135M-Instruct's GGUF file for the section on a real model.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from churn import churn
from sections import release, run
from smollm2 import calibration, real

from alula import Engine, Evict, Schedule, Select, Sparsity
from alula.bench.ceilings import Ceilings
from alula.bench.decode import StepBench
from alula.engine import attention as engine_attention
from alula.engine.block_manager import pages_for
from alula.engine.cuda_graphs import CUDAGraphs
from alula.mismatch.plan.cost import AnalyticCost, Hardware, Timing, fit, median_error, timing_record
from alula.models.geometry import Geometry
from alula.models.load import load_model
from alula.sparsity.policy import DENSE

DEVICE = torch.device("cuda")
BIN, BINS, PAGE, LOOKAHEAD = 2000, 16, 16, 8
MODELS = {"qwen3-1.7b": 35, "qwen3-4b": 26, "qwen3-8b": 26}
"""Shapes, and the largest batch whose dense KV fits at 32k."""
CENTRES = [BIN * j + BIN // 2 for j in range(BINS)]
Row = dict[str, Any]


def published(model: str, tau: str = "0.86") -> Sparsity:
    return Sparsity(select=Select("block-topk", Schedule.load(f"{model}-{tau}")))


def engine(model: str, batch: int, longest: int, buckets: tuple[int, ...] = ()) -> Engine:
    """An engine whose pool holds `batch` rows of `longest` tokens, with decode steps of exactly that many rows."""
    loaded = load_model(f"shape:{model}", device=str(DEVICE))
    pages = batch * pages_for(longest + 2 * LOOKAHEAD, PAGE) + 2
    return Engine(
        loaded,
        page=PAGE,
        kv_memory=pages * PAGE * Geometry.of(loaded.model).kv_token_bytes,
        max_rows=batch,
        max_length=longest + 2 * LOOKAHEAD,
        buckets=(*buckets, batch),
        lookahead=LOOKAHEAD,
    )


def step(one: Engine, batch: int, context: int, sparsity: Sparsity, ceilings: Ceilings) -> Row:
    bench = StepBench(one, batch, context, sparsity)
    seconds, floor = bench.seconds(chunks=4), bench.floor_bytes() / ceilings.bandwidth
    record = timing_record(one.geometry, bench.size.rows, context, sparsity, seconds * 1e3)
    return {"ms": seconds * 1e3, "floor_ms": floor * 1e3, "timing": record}


def decode(ceilings: Ceilings) -> Iterator[Row]:
    """Decoding to 32k under the published schedules: Σ over 16 bins of the step at the bin's centre."""
    for model, batch in MODELS.items():
        one = engine(model, batch, CENTRES[-1])
        sparse = published(model)
        row: Row = {"kind": "decode to 32k", "model": model, "batch": batch, "bins": []}
        for context in CENTRES:
            dense, chosen = (step(one, batch, context, s, ceilings) for s in (DENSE, sparse))
            row["bins"].append({"context": context, "dense": dense, "sparse": chosen})
        for name in ("ms", "floor_ms"):
            row[f"dense_{name}"], row[f"sparse_{name}"] = (
                sum(b[kind][name] for b in row["bins"]) for kind in ("dense", "sparse")
            )
        row["ratio"] = row["dense_ms"] / row["sparse_ms"]
        row["floor_ratio"] = row["dense_floor_ms"] / row["sparse_floor_ms"]
        yield row
        del one
        release()


def both(ceilings: Ceilings) -> Iterator[Row]:
    """Steady decoding up to 32k in one pool: evicting to a large budget and reading a small one gives more rows.

    Page summaries come out of the same memory. Random weights have no tail worth the name: whether evicting to a
    quarter or a half of the longest sequence keeps the tail of the selection is what `real` measures.
    """
    model, longest, memory = "qwen3-1.7b", 32000, 80 << 30
    evictors = {held: Evict("snapkv", held, buffer=128) for held in (8192, 16384)}
    select, loaded = published(model), load_model(f"shape:{model}", device=str(DEVICE))
    policies = {
        "dense": DENSE,
        "select 0.86": select,
        **{f"snapkv {held} & select 0.86": replace(select, evict=evict) for held, evict in evictors.items()},
    }
    dense = 0.0
    for name, sparsity in policies.items():
        pool = memory * 2 * PAGE // (2 * PAGE + 1) if sparsity.select else memory  # a summary is half a token's KV
        held = sparsity.evict.budget + sparsity.evict.buffer + PAGE if sparsity.evict else longest // 2
        rows = pool // (PAGE * Geometry.of(loaded.model).kv_token_bytes) // pages_for(held, PAGE) - 2
        one = Engine(loaded, page=PAGE, kv_memory=pool, max_rows=rows, max_length=longest + 64)
        row = churn(one, sparsity, longest=longest, rows=rows, steps=256)
        dense = dense or row["tokens_per_s"]
        yield {**row, "kind": "steady to 32k", "policy": name, "against_dense": row["tokens_per_s"] / dense}
        del one
        release()


def share(ceilings: Ceilings) -> Iterator[Row]:
    """What scoring and choosing pages take of the sparse step at 32k: the same step with the choice already made."""
    model, context = "qwen3-1.7b", 32000
    batch = MODELS[model]
    one = engine(model, batch, context)
    sparsity = published(model)
    whole = StepBench(one, batch, context, sparsity)
    with_choice = min(whole.seconds(chunks=4) for _ in range(3))
    real, made, captured = engine_attention.select_pages, [], one.runner.graphs

    def kept(*arguments: Any) -> Any:
        made.append(real(*arguments))
        return made[-1]

    try:
        engine_attention.select_pages = kept  # type: ignore[assignment]
        whole.reset()
        with torch.inference_mode():
            one.runner.step(whole.state, whole.size)
        ready = iter(())

        def known(*arguments: Any) -> Any:
            nonlocal ready
            found = next(ready, None)
            if found is None:
                ready = iter(made)
                found = next(ready)
            return found

        engine_attention.select_pages = known  # type: ignore[assignment]
        one.runner.graphs = CUDAGraphs(one.device, enabled=True)
        without = min(whole.seconds(chunks=4) for _ in range(3))
    finally:
        engine_attention.select_pages = real
        one.runner.graphs = captured
    yield {
        "kind": "scoring and top-k",
        "model": model,
        "batch": batch,
        "context": context,
        "step_ms": with_choice * 1e3,
        "without_ms": without * 1e3,
        "share": 1 - without / with_choice,
    }


def cost(ceilings: Ceilings) -> Iterator[Row]:
    """The fitted cost model on steps that it has not seen."""
    model, batches = "qwen3-1.7b", (4, 16, 32)
    one = engine(model, batches[-1], 32000, batches[:-1])
    policies = [DENSE, *(Sparsity(select=Select("block-topk", b)) for b in (512, 1024, 2048, 4096))]
    grid = [(b, c, s) for b in batches for c in (1000, 4000, 8000, 16000, 32000) for s in policies]
    steps = [step(one, b, c, s, ceilings)["timing"] for b, c, s in grid]
    geometry, order = one.geometry, np.random.default_rng(0).permutation(len(steps))
    held_out, seen = order[: len(steps) // 3], order[len(steps) // 3 :]
    fitted = fit([steps[i] for i in seen], geometry)
    unseen = [Timing.from_dict(steps[i]) for i in held_out]
    analytic = AnalyticCost(geometry, Hardware(ceilings.matrix / 1e12, ceilings.bandwidth / 1e12))
    yield {
        "kind": "cost model",
        "model": model,
        "fitted_on": len(seen),
        "held_out": len(unseen),
        "median_error": median_error(fitted, unseen),
        "analytic_error": median_error(analytic, unseen),
        "constants": fitted.constants,
        "steps": steps,
    }


SECTIONS = {
    "calibration": calibration,
    "real": real,
    "share": share,
    "cost": cost,
    "decode": decode,
    "both": both,
}


if __name__ == "__main__":
    run(SECTIONS, __doc__)
