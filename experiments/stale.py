"""Rollouts ahead of the learner: the demo's task with `rollouts.stale` 0, 1 and 2, on one Ray worker.

    python experiments/stale.py --seeds 3 --work WORK --out docs/results/stale/demo.jsonl
    python experiments/stale.py --table docs/results/stale.md --out docs/results/stale/demo.jsonl

One JSON line a run; a run that has its line is not repeated. --table writes the table of a page.
"""

import argparse
import json
import re
from importlib.resources import files
from pathlib import Path
from statistics import fmean

from alula.config.load import load_config
from alula.demo.problems import HintedPointer, write_problems
from alula.demo.run import SPARSE
from alula.demo.tiny_model import WarmUp, build_warm_model
from alula.trainer.trainer import Trainer

ARMS = {
    "dense": [],
    "sparse-rl": [SPARSE, "objective.correction=sparse-rl"],
    "strict": [SPARSE, "objective.correction=strict"],
}
STALE = (0, 1, 2)


def settings(work: Path, seed: int) -> list[str]:
    """The seed's warmed-up model and its problems, made where they are missing: those of `alula demo --seed SEED`."""
    folder = work / f"seed-{seed}"
    if not (folder / "held.jsonl").exists():
        task = HintedPointer(symbols=12, min_hops=10, max_hops=12)
        build_warm_model(folder / "model", task, WarmUp(), seed, lambda *progress: None)
        write_problems(task.dataset(2048, 1000 + seed), folder / "train.jsonl")
        write_problems(task.dataset(256, 2000 + seed), folder / "held.jsonl")
    return [
        f"model.source={folder / 'model'}",
        "model.device=cpu",
        f"data.source={folder / 'train.jsonl'}",
        f"eval.data.source={folder / 'held.jsonl'}",
        f"seed={seed}",
        "eval.size=256",
        "rollouts.backend=ray",
    ]


def run(work: Path, arm: str, stale: int, seed: int) -> dict[str, object]:
    folder, recipe = work / f"{arm}-{stale}-{seed}", work / "demo.yaml"
    common = settings(work, seed)
    recipe.write_text((files("alula.demo") / "demo.yaml").read_text())
    Trainer(load_config(recipe, [*common, *ARMS[arm], f"rollouts.stale={stale}", f"out={folder}"])).run()
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evals = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]

    def mean(metric: str) -> float:
        return fmean(row.get(metric, 0.0) for row in steps)

    return {
        "arm": arm,
        "stale": stale,
        "seed": seed,
        "accuracy": [row["accuracy"] for row in evals if row["policy"] == "dense"],
        "vetoed": mean("mismatch/veto_rate"),
        "kl": mean("mismatch/kl_k3"),
        "ess": mean("mismatch/ess"),
        "age": mean("workers/age_mean"),
        "current": mean("mismatch/current_tokens") if stale else 1.0,
        "idle": mean("workers/idle"),
        "step_seconds": mean("time/step"),
        "rollout_seconds": mean("time/rollout"),
    }


def table(lines: list[dict[str, object]]) -> str:
    """Markdown: one row per arm and staleness, accuracies of all seeds."""
    rows = [
        "| rollouts | stale | accuracy after 25 steps, by seed | mean | vetoed | effective samples | age | idle |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for arm in ARMS:
        for stale in STALE:
            found = sorted((x for x in lines if (x["arm"], x["stale"]) == (arm, stale)), key=lambda x: x["seed"])
            if not found:
                continue
            last = [x["accuracy"][-1] for x in found]
            vetoed, ess, age, idle = (fmean(x[name] for x in found) for name in ("vetoed", "ess", "age", "idle"))
            each = ", ".join(f"{value:.0%}" for value in last)
            rows.append(
                f"| {arm} | {stale} | {each} | {fmean(last):.0%} | {vetoed:.1%} | {ess:.2f} | {age:.2f} | {idle:.0%} |"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/stale"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    if given.table:
        page = given.table.read_text()
        new = f"<!-- table -->\n{table(lines)}\n<!-- end of table -->"
        given.table.write_text(re.sub(r"<!-- table -->.*<!-- end of table -->", new, page, flags=re.DOTALL))
        return
    given.work.mkdir(parents=True, exist_ok=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    for seed in range(given.seeds):
        for arm in ARMS:
            for stale in STALE:
                if not any((x["arm"], x["stale"], x["seed"]) == (arm, stale, seed) for x in lines):
                    with given.out.open("a") as out:
                        out.write(json.dumps(run(given.work, arm, stale, seed)) + "\n")


if __name__ == "__main__":
    main()
