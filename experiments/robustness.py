"""Models trained dense and sparse, each evaluated dense and under other compressors: does the training transfer?

    python experiments/robustness.py --bed tiny --seeds 3

Takes the models that `run.py --question collapse,correction` left, and the problems of the probe, which no run has
seen: those trained at the tempting budget, and those trained one step of the grid above it, where chains hold. The
policies are the dense one, evictors at the budget that rkv trained with, rkv also at a smaller and a larger budget, and
a selector that reads about as much.
"""

import argparse
import json
import re
from pathlib import Path

import torch
from arms import QUESTIONS
from beds import TASK_BEDS, Bed
from choice import chosen_budgets
from lines import read_lines
from probe import Probe
from raw import short

from alula.sparsity.policy import Sparsity

EVICTORS = ("rkv", "snapkv", "h2o", "streaming", "keydiff")


def policies(bed: Bed, budget: int) -> dict[str, str]:
    """Title -> policy."""
    place = bed.budgets.index(budget)
    smaller, larger = (bed.budgets[max(0, min(place + step, len(bed.budgets) - 1))] for step in (-1, 2))
    read = min(bed.read_budgets, key=lambda size: abs(size - budget))
    found = {"dense": "dense"} | {method: bed.evictor(method, budget) for method in EVICTORS}
    found |= {"rkv, smaller": bed.evictor("rkv", smaller), "rkv, larger": bed.evictor("rkv", larger)}
    return found | {"block-topk": bed.selector(read)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", choices=TASK_BEDS, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="this one alone: several may run side by side")
    parser.add_argument("--arms", default="", help="only models whose label this regular expression finds")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    bed, work = TASK_BEDS[options.bed], options.work / options.bed
    path = options.out / "robustness" / f"{bed.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["arm"], row["seed"], row["policy"]) for row in read_lines(path)}
    for seed in range(options.seeds) if options.seed is None else [options.seed]:
        budgets = chosen_budgets(bed, seed, work)
        models = {"start": work / f"start-{bed.warm_seed(seed)}"}
        arms = [arm for arm in QUESTIONS["collapse"](bed, budgets) if arm.name != "dense-sparse-rl"]  # as good as dense
        arms += [arm for arm in QUESTIONS["correction"](bed, budgets) if arm.label.endswith("milder")]
        models |= {arm.label: work / "runs" / f"{arm.name}-s{seed}" for arm in arms}
        probe: Probe | None = None
        for arm, folder in models.items():
            wanted = policies(bed, budgets["rkv"]).items()
            left = {title: policy for title, policy in wanted if (arm, seed, title) not in done}
            if not left or not re.search(options.arms, arm) or not (folder / "model").exists():
                continue
            probe = probe or Probe(bed, seed, work)
            probe.take(folder / "model")
            for title, policy in left.items():
                answers = probe.answers(policy, probe.generate(Sparsity.parse(policy)))
                found = {name: short(value) for name, value in answers.items()}
                with path.open("a") as file:
                    file.write(json.dumps({"arm": arm, "policy": title} | found) + "\n")
            print(arm, seed, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
