"""Runs the demo: builds a model, trains it six ways, compares the runs on one page."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from alula.config.load import load_config
from alula.cpus import threads_for
from alula.demo.problems import HintedPointer, write_problems
from alula.demo.tiny_model import WarmUp, build_warm_model
from alula.errors import require
from alula.report import write_report
from alula.run.run_dir import check_folder
from alula.trainer.trainer import Trainer

SPARSE = "sparsity.evict={method: rkv, budget: 28, buffer: 8, window: 4, sinks: 1}"
CONTROL = "control={enabled: true, on_violation: adapt, vetoed: 0.05}"
ARMS = {
    "1-dense": [],
    "2-naive-sparse": [SPARSE, "objective.correction=none"],
    "3-sparse-rl": [SPARSE, "objective.correction=sparse-rl"],
    "4-reroll": [SPARSE, "objective.correction=reroll"],
    "5-controlled": [SPARSE, "objective.correction=sparse-rl", CONTROL],
    "6-strict": [SPARSE, "objective.correction=strict"],
}
"""Run name -> settings that override demo.yaml. Model, prompts and seed are the same for all."""


@dataclass(frozen=True)
class Arm:
    """Results of one run. Accuracies are those of the dense policy on held-out problems."""

    name: str
    before: float
    after: float
    lowest: float
    reward: float
    length: float
    kv_saved: float
    kv_bytes_peak: float
    vetoed: float
    seconds: float


def run_demo(
    out: Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    warm: WarmUp | None = None,
    say: Callable[[str], None] = print,
) -> list[Arm]:
    torch.set_num_threads(threads_for(parameters=0))  # for the warm-up; the runs choose the same
    require(steps is None or steps >= 1, f"--steps {steps}: must be at least 1.")
    check_folder(out, new=False)
    require(not (out / "report.html").exists(), f"--out {out}: already contains a demo; choose another folder.")
    task = HintedPointer(symbols=12, min_hops=10, max_hops=12)
    say("A tiny Llama learns to chase pointers: careful chains first, then a mixture with a shortcut that guesses.")
    model = build_warm_model(out / "model", task, warm or WarmUp(), seed, Steps(say))
    write_problems(task.dataset(2048, 1000 + seed), out / "train.jsonl")
    write_problems(task.dataset(256, 2000 + seed), out / "held.jsonl")
    recipe = out / "demo.yaml"
    recipe.write_text((files("alula.demo") / "demo.yaml").read_text())
    common = [
        f"model.source={model}",
        f"data.source={out / 'train.jsonl'}",
        f"eval.data.source={out / 'held.jsonl'}",
        f"seed={seed}",
        *([f"steps={steps}"] if steps else []),
    ]
    arms = []
    for name, settings in ARMS.items():
        say(f"\n{name.partition('-')[2]}: {' '.join(settings) or 'all KV'}")
        start, folder = time.perf_counter(), out / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted demo
        finished = Trainer(load_config(recipe, [*common, *settings, f"out={folder}"])).run()
        if not finished:  # the trainer took the signal, which was meant for the whole demo
            raise KeyboardInterrupt
        arms.append(summary(name, folder, time.perf_counter() - start))
    write_report([out / "runs" / name for name in ARMS], out / "report.html")
    (out / "summary.json").write_text(json.dumps([vars(arm) for arm in arms], indent=1) + "\n")
    return arms


class Steps:
    """Prints the progress of the warm-up every few seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.last = say, 0.0

    def __call__(self, what: str, step: int, most: int, loss: float) -> None:
        if time.perf_counter() - self.last > 3 or step == most:
            self.last = time.perf_counter()
            self.say(f"  {what}: step {step}, loss {loss:.3f}")


def summary(name: str, folder: Path, seconds: float) -> Arm:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evals = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    accuracy = [row["accuracy"] for row in evals if row["policy"] == "dense"]

    def mean(metric: str) -> float:
        values = [row.get(metric, 0.0) for row in steps]
        return sum(values) / len(values)

    last = steps[-max(1, len(steps) // 8) :]
    return Arm(
        name=name,
        before=accuracy[0],
        after=accuracy[-1],
        lowest=min(accuracy),
        reward=sum(row["reward/mean"] for row in last) / len(last),
        length=steps[-1]["response/length_mean"],
        kv_saved=mean("kv/saved"),
        kv_bytes_peak=max(row["kv/bytes_peak"] for row in steps),
        vetoed=mean("mismatch/veto_rate"),
        seconds=seconds,
    )
