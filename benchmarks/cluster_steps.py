"""Estimates of `alula estimate` against steps on a simulated Ray cluster, whose engines and learner only take time.

    python benchmarks/cluster_steps.py --out benchmarks/results/cluster-steps.json

Real: Ray, the pool of workers, the queue, who gets which job, what waits for what. Simulated: a worker sleeps as long
as the cost model says for the rows that it decodes, and the learner as long as its scoring, updates and weight transfer
are estimated; both `--speed` times faster. So this checks how the estimate divides and adds up times, not the times.
Needs no GPU and little CPU.
"""

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import ray
import torch

from alula.config.load import load_config
from alula.engine.rollout import Rollout, Sampling
from alula.mismatch.plan.cost import CostModel
from alula.rollouts.job import Job
from alula.rollouts.worker import SLICE, Orders, Report, Shipment
from alula.rollouts.worker_pool import WorkerPool
from alula.run.environment import environment
from alula.settings import SamplingSettings
from alula.sparsity.footprint import footprint
from alula.sparsity.policy import Sparsity
from alula.trainer.rollout_simulation import CHUNK, answer_lengths
from alula.trainer.step_plan import Cluster, StepPlanner

SIZES = [("dense", 2), ("dense", 3), ("rkv:512+128", 4), ("rkv:512+128", 6)]
"""Policies, and GPUs of one node."""
MEAN, MOST, PROMPT = 1000, 4096, 128
NICENESS = "RAY_worker_niceness"


@dataclass
class Row:
    number: int
    sample: int
    length: int
    done: int = 0


class TimedWorker:
    """A rollout worker without a model. A job's `prompt_ids` are the lengths of its answers."""

    def __init__(self, cost: CostModel, sparsity: Sparsity, max_rows: int, speed: float) -> None:
        self.cost, self.max_rows, self.speed = cost, max_rows, speed
        self.use = footprint(sparsity, PROMPT, MOST, cost.geometry.layers)
        self.rows: list[Row] = []
        self.shipments, self.progress = (-1, -1), 0
        self.until = self.chunk = 0.0
        """When the last chunk ended, and how long it took without `speed`."""

    def start(self) -> None:
        return None

    def work(self, orders: Orders) -> Report:
        began, finished = time.monotonic(), []
        if orders.weights is not None:
            self.shipments = (orders.weights.number, -1)
        for number, job, _ in orders.jobs:
            self.rows += [Row(number, sample, length) for sample, length in enumerate(job.prompt_ids)]
        if began - self.until > self.chunk:  # an engine decodes a chunk while its host is elsewhere
            self.until = began
        while self.rows and time.monotonic() < began + SLICE:
            self.chunk = self._seconds(self.rows[: self.max_rows])
            self.until += self.chunk / self.speed
            time.sleep(max(0.0, self.until - time.monotonic()))
            for row in self.rows[: self.max_rows]:
                row.done += CHUNK
            ended = [row for row in self.rows if row.done >= row.length]
            finished += [(row.number, answer(row.sample)) for row in ended]
            self.rows = [row for row in self.rows if row.done < row.length]
            self.progress += 1
        return Report(finished, [], self.shipments, self.progress, time.monotonic() - began, 0.0, 0)

    def _seconds(self, rows: list[Row]) -> float:
        """Seconds of the next `CHUNK` decode steps, with rows that end in between."""
        steps = np.array([row.done for row in rows])[:, None] + np.arange(CHUNK)
        active = steps < np.array([row.length for row in rows])[:, None]
        batch = active.sum(0)
        read, scored, moved = (
            np.where(active, values[np.minimum(steps, MOST - 1)], 0.0).sum(0) / np.maximum(batch, 1)
            for values in (self.use.read, self.use.scored, self.use.moved)
        )
        return float(self.cost.step_ms(batch, read, scored, moved)[batch > 0].sum()) / 1e3


def answer(sample: int) -> Rollout:
    return Rollout([1], [1], torch.zeros(1), "stop", sample_index=sample)


def planner(sparsity: str, gpus: int) -> StepPlanner:
    settings = [
        "model={source: shape:qwen3-1.7b, dtype: bfloat16}",
        f"sparsity={sparsity}",
        f"sampling={{prompts: 32, n: 8, max_new_tokens: {MOST}}}",
        f"data.max_prompt_tokens={PROMPT}",
        "engine.max_rows=256",
        "objective.kl=0",
        "control.enabled=false",
    ]
    return StepPlanner(load_config("start", settings), Cluster("h200", gpus=gpus), MEAN)


def simulated(
    pool: WorkerPool, sampling: SamplingSettings, stale: int, steps: int, learner: float, version: int
) -> tuple[float, int]:
    """Median seconds of a step on Ray after the first, and the last version. The learner sleeps `learner` seconds."""
    lengths = np.reshape(answer_lengths(sampling.prompts * sampling.n, MEAN, MOST), (-1, sampling.n)).tolist()
    jobs = [Job(each, Sampling(n=sampling.n)) for each in lengths]
    tickets, ends = deque[list[int]](), list[float]()
    for first, last in pairwise(range(version, version + steps + 1)):
        for batch in range(first + len(tickets), min(first + stale, version + steps - 1) + 1):
            tickets.append(pool.submit((job, max(0, batch - stale) if stale else None) for job in jobs))
        numbers, seen = tickets.popleft(), set[tuple[int, int]]()
        while not pool.done(numbers):
            pool.finished(numbers, seen, 1.0)
        pool.pop(numbers)
        time.sleep(learner)
        pool.ship(weights=Shipment(last, last, []))
        ends.append(time.monotonic())
    return median(np.diff(ends)), version + steps


def rows(steps: int, speed: float) -> Iterator[dict[str, object]]:
    for sparsity, gpus in SIZES:
        plans = planner(sparsity, gpus)
        plan, config = plans.apart(), plans.config
        assert plan is not None
        given = (plans.decode_cost(), config.sparsity, config.engine.max_rows, speed)
        actor = ray.remote(TimedWorker).options(num_cpus=0)
        pool = WorkerPool(partial(actor.remote, *given), plan.workers, plan.workers, 600, config.engine.max_rows)
        pool.wait_until_ready(lambda: None)
        pool.ship(weights=Shipment(0, 0, []))
        version = 0
        for stale, estimated in ((0, plan.in_turn), (1, plan.one_step_off)):
            step, version = simulated(pool, config.sampling, stale, steps, plan.learner / speed, version)
            yield {
                "sparsity": sparsity,
                "learners": plan.learners,
                "workers": plan.workers,
                "stale": stale,
                "rollouts_s": plan.rollouts,
                "learner_s": plan.learner,
                "estimated_s": estimated,
                "simulated_s": step * speed,
            }
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--speed", type=float, default=8.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ[NICENESS] = "0"  # workers sleep, and must wake in time on a machine that is shared
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    result: dict[str, object] = {"environment": environment(), "speed": given.speed, "rows": []}
    for row in rows(given.steps, given.speed):
        print(json.dumps(row), flush=True)
        result["rows"].append(row)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
