"""Models trained dense and sparse, each evaluated dense and under every compressor: does the training transfer?

    python experiments/robustness.py --bed tiny --seeds 3

Takes the models that `run.py --question collapse` left, and the problems of the probe, which no run has seen. The
policies are the dense one, every evictor at the budget chosen for it and, for rkv, at a smaller and a larger budget,
and a selector.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from arms import QUESTIONS
from beds import BEDS, Bed
from choice import chosen_budgets
from probe import Probe
from raw import rows, short


def policies(bed: Bed, budgets: Mapping[str, int]) -> list[str]:
    place = bed.budgets.index(budgets["rkv"])
    around = [bed.budgets[i] for i in (max(place - 2, 0), min(place + 2, len(bed.budgets) - 1))]
    evictors = [(method, budget) for method, budget in budgets.items()] + [("rkv", budget) for budget in around]
    read = bed.read_budgets[len(bed.read_budgets) // 2]
    return ["dense", *(bed.evictor(*pair) for pair in evictors), bed.selector(read)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", choices=BEDS, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    bed, work = BEDS[options.bed], options.work / options.bed
    budgets = chosen_budgets(bed, work)
    path = options.out / "robustness" / f"{bed.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["arm"], row["seed"], row["sparsity"]) for row in rows(path)}
    starts = [("start", seed, work / f"start-{seed if bed.warm_seeds else 0}") for seed in range(options.seeds)]
    trained = [(arm.name, seed, work / "runs" / f"{arm.name}-s{seed}")
               for arm in QUESTIONS["collapse"](bed, budgets) for seed in range(options.seeds)]  # fmt: skip
    for arm, seed, folder in starts + trained:
        left = [policy for policy in policies(bed, budgets) if (arm, seed, policy) not in done]
        if not left or not (folder / "model").exists():
            continue
        probe = Probe(bed, seed, work, model=folder / "model")
        with path.open("a") as file:
            for policy in left:
                found = {name: short(value) for name, value in probe.measure(policy).items()}
                file.write(json.dumps({"arm": arm} | found) + "\n")
        print(arm, seed, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
