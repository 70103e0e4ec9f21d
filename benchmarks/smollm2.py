"""Sparrow on SmolLM2-135M: how long a calibration takes, and whether what it plans holds on fresh prompts."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from alula import Engine
from alula.bench.ceilings import Ceilings
from alula.mismatch.calibrate.calibrate import Grid, TextSettings, calibrate
from alula.mismatch.calibrate.file import Calibration
from alula.mismatch.calibrate.verify import policy_of, verify
from alula.mismatch.measure import Bins
from alula.mismatch.plan.cost import AnalyticCost, Hardware
from alula.mismatch.plan.plan import Infeasible, Workload, default_tau, plan
from alula.sparsity.family import PolicyFamily, parse_families

DEVICE, PAGE, LENGTH, BINS = "cuda", 16, 2048, Bins(256, 8)
BUDGETS = (128, 256, 384, 512, 768, 1024, 1536, 2048)
BESIDE = (512, 1024, 1536)
FAMILIES = ",".join(["block-topk,snapkv", *(f"snapkv:budget={held}&block-topk" for held in BESIDE)])
"""A selector, an evictor, and the selector beside an evictor that keeps a quarter, a half or three quarters."""
Row = dict[str, Any]


def calibration(ceilings: Ceilings) -> Iterator[Row]:
    """SmolLM2-135M's shape: 8 budgets, 2k tokens, 64 prompts; text, floor and all budgets."""
    prompts = tuple(tuple(row) for row in np.random.default_rng(0).integers(0, 49000, (64, 64)).tolist())
    one = Engine.load(
        "shape:smollm2-135m", device=DEVICE, page=PAGE, kv_memory="60GiB", max_rows=512, max_length=LENGTH + 64
    )
    for run in ("first", "second"):  # the first compiles and captures
        start = time.perf_counter()
        measured = calibrated(one, prompts, "block-topk", sweep=True)
        yield {
            "kind": "calibration",
            "run": run,
            "seconds": time.perf_counter() - start,
            "budgets": len(measured.measured),
            "tokens": measured.notes["tokens"],
        }


def calibrated(one: Engine, prompts: tuple[tuple[int, ...], ...], methods: str, sweep: bool = False) -> Calibration:
    with tempfile.TemporaryDirectory() as folder:
        grid = Grid(tuple(parse_families(methods, (PAGE,))), BUDGETS, sweep=sweep)
        return calibrate(
            lambda page: one, TextSettings(prompts, LENGTH), grid, BINS, Path(folder) / "work.json", log=print
        )


FORMS = (
    "Write a long and detailed story about {}.",
    "Explain step by step how {} works.",
    "List the advantages and disadvantages of {}.",
    "Teach a child everything about {}.",
    "Write a dialogue between two experts on {}.",
    "Describe the history of {} in detail.",
    "Write an essay on the future of {}.",
    "Compare {} with its alternatives at length.",
)
TOPICS = (
    "sailing",
    "bread",
    "the telegraph",
    "bees",
    "glass",
    "mountains",
    "clocks",
    "trains",
    "printing",
    "tea",
    "bridges",
    "whales",
    "volcanoes",
    "paper",
    "music",
    "gardens",
    "maps",
    "coins",
    "lenses",
    "wool",
    "windmills",
    "chess",
    "salt",
    "rivers",
)


def real(ceilings: Ceilings) -> Iterator[Row]:
    """SmolLM2-135M-Instruct: calibrate, plan every family for the same tail, measure each plan on rollouts of its own.

    The plans are checked on other prompts than those they were made on.
    """
    path = os.environ.get("ALULA_SMOLLM2")
    if not path:
        print("real: set ALULA_SMOLLM2 to SmolLM2-135M-Instruct's GGUF file", file=sys.stderr)
        return
    one = Engine.load(path, device=DEVICE, page=PAGE, kv_memory="40GiB", max_rows=768, max_length=LENGTH + 64)
    texts = [[{"role": "user", "content": form.format(topic)}] for topic in TOPICS for form in FORMS]
    ids = [tuple(one.tokenize(text)) for text in texts]
    order = np.random.default_rng(0).permutation(len(ids))
    known, fresh = (tuple(ids[i] for i in part) for part in np.array_split(order, 2))
    start = time.perf_counter()
    found = calibrated(one, known, FAMILIES)
    yield {
        "kind": "calibration",
        "model": one.name,
        "seconds": time.perf_counter() - start,
        "calibration": found.to_dict(),
    }
    for family in parse_families(FAMILIES, (PAGE,)):
        yield {"kind": "plan", "model": one.name, "policy": family.describe()} | checked(one, found, family, fresh)


def checked(one: Engine, found: Calibration, family: PolicyFamily, fresh: tuple[tuple[int, ...], ...]) -> Row:
    """One family's plan, in the memory of 64 dense rows, and its tail on rollouts of its own."""
    geometry, tau = one.geometry, default_tau(found)
    cost, work = (
        AnalyticCost(geometry, Hardware.named("h200")),
        Workload(LENGTH, kv_bytes=64 * LENGTH * geometry.kv_token_bytes),
    )
    only = replace(
        found,
        measured=tuple(m for m in found.measured if m.family == family),
        growing=tuple(f for f in found.growing if f.family == family),
    )
    try:
        made = plan(only, cost, work)
    except Infeasible as error:
        return {"tau": tau, "out_of_reach": str(error), "reachable": error.reachable}
    text = TextSettings(fresh, LENGTH, seed=1)
    verified = verify(one, made.schedule, policy_of(made.schedule), text, tau)
    print(verified.table(), flush=True)
    return {
        "tau": tau,
        "floor": made.floor,
        "schedule": made.schedule.to_dict(),
        "predicted_speedup": made.speedup,
        "predicted_rows": made.sparse.batch,
        "dense_rows": made.dense.batch,
        "tail": verified.tail.overall,
        "violated": verified.violated,
        "table": verified.table(),
        "verification": verified.to_dict(),
    }
