"""A run folder as one JSON line, small enough to keep beside the page that shows it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arms import Arm
from beds import Bed
from lines import merge_lines, read_lines, write_lines

METRICS = (
    "reward/mean",
    "reward/accuracy",
    "response/length_mean",
    "response/truncated",
    "mismatch/veto_rate",
    "mismatch/kl_k3",
    "mismatch/rejected",
    "mismatch/rerolled",
    "mismatch/alpha_p05",
    "schedule/budget/0",
    "kv/saved",
    "kv/bytes_peak",
    "policy/entropy",
    "policy/grad_norm",
    "policy/taught",
    "time/rollout",
    "time/score",
    "time/update",
    "time/distill",
    "time/step",
    "speed/tokens_per_s",
)


def write_raw(
    question: str,
    bed: Bed,
    runs: Sequence[tuple[Arm, int]],
    work: Path,
    out: Path,
    settings: Sequence[str] = (),
    *,
    keep: bool = False,
) -> None:
    """`<out>/<question>/<bed>.jsonl`: a line for every run of the question that has begun. With `keep`, lines of other
    arms and seeds stay."""
    found = [raw_run(bed, arm, seed, work, settings) for arm, seed in runs]
    write = merge_lines if keep else write_lines
    write(out / question / f"{bed.name}.jsonl", [row for row in found if row is not None])


def write_probe(bed: Bed, work: Path, out: Path) -> None:
    """`<out>/probe/<bed>.jsonl`: what is known of every budget before training."""
    rows = [row | {"sparsity": inside(work, row["sparsity"])} for row in read_lines(work / "probe.jsonl")]
    found = ({name: short(value) for name, value in row.items()} for row in rows)
    write_lines(out / "probe" / f"{bed.name}.jsonl", found)


def inside(work: Path, text: str) -> str:
    """Paths of the work folder, relative to it."""
    return text.replace(f"{work}/", "")


def raw_run(bed: Bed, arm: Arm, seed: int, work: Path, settings: Sequence[str]) -> dict[str, Any] | None:
    folder = work / "runs" / f"{arm.name}-s{seed}"
    if not (folder / "status.json").exists():
        return None
    steps, evals = read_lines(folder / "metrics.jsonl"), read_lines(folder / "evals.jsonl")
    return {
        "bed": bed.name,
        "arm": arm.label,
        "sparsity": inside(work, arm.sparsity),
        "correction": arm.correction,
        "seed": seed,
        "state": json.loads((folder / "status.json").read_text())["state"],
        "shared": (work / "logs" / f"{folder.name}.shared").exists(),
        "settings": [inside(work, setting) for setting in (*arm.settings, *settings)],
        "evals": [
            {name: short(row[name]) for name in ("step", "policy", "accuracy", "stderr", "length")} for row in evals
        ],
        "warnings": [[row["step"], row["kind"]] for row in read_lines(folder / "events.jsonl")],
        "steps": {name: [short(row.get(name)) for row in steps] for name in METRICS if any(name in r for r in steps)},
    }


def short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
