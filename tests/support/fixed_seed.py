"""The fixed-seed rule: a change that should not alter numbers must not alter a digit of these runs.

    python tests/support/fixed_seed.py record FOLDER     # before the change, and after it into another folder
    python tests/support/fixed_seed.py compare BEFORE AFTER

Records the toy recipes, the six arms of the demo and a run on two ranks, on the CPU. Compares metrics, evaluations and
completions line by line; clocks are left out.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLOCKS = ("time/", "speed/")
FILES = ("metrics.jsonl", "evals.jsonl", "completions.jsonl")


def record(out: Path) -> None:
    out = out.resolve()
    out.mkdir(parents=True)
    for recipe in ("toy", "sparrow-toy", "distill-toy"):
        _alula("train", f"recipes/{recipe}.yaml", f"out={out / recipe}", "model.device=cpu")
    two_ranks = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "alula"]
    _python(*two_ranks, "train", "recipes/toy.yaml", f"out={out / 'two-ranks'}", "model.device=cpu", "steps=12")
    _alula("demo", "--out", str(out / "demo"))


def compare(before: Path, after: Path) -> list[str]:
    """The first difference of every run, as text."""
    runs = sorted(path.parent.relative_to(before) for path in before.rglob("metrics.jsonl"))
    other_runs = sorted(path.parent.relative_to(after) for path in after.rglob("metrics.jsonl"))
    if runs != other_runs or not runs:
        return [f"runs differ: {[*map(str, runs)]} and {[*map(str, other_runs)]}"]
    differences = []
    for run in runs:
        for name in FILES:
            old, new = ((folder / run / name).read_text().splitlines() for folder in (before, after))
            differences += _first_difference(f"{run}/{name}", old, new)
    return differences


def _first_difference(where: str, old: list[str], new: list[str]) -> list[str]:
    if len(old) != len(new):
        return [f"{where}: {len(old)} lines and {len(new)}"]
    for number, (one, other) in enumerate(zip(old, new), 1):
        left, right = json.loads(one), json.loads(other)
        for key in sorted(left.keys() | right.keys()):
            if not key.startswith(CLOCKS) and left.get(key) != right.get(key):
                return [f"{where}:{number} {key}: {left.get(key)!r} and {right.get(key)!r}"]
    return []


def _alula(*arguments: str) -> None:
    _python("-m", "alula", *arguments)


def _python(*arguments: str) -> None:
    # One thread: the number of threads changes the order of float sums.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    action, *folders = sys.argv[1:]
    if action == "record":
        record(Path(folders[0]))
    else:
        found = compare(*map(Path, folders))
        print("\n".join(found) or "equal, clocks aside")
        sys.exit(bool(found))
