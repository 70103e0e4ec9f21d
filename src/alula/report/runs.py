"""Reads run folders for the report, including unfinished, damaged and very large ones."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from alula.errors import SettingError, require
from alula.run.run_dir import parse_line

SAMPLED_STEPS = 8
SAMPLES_PER_STEP = 4
LONGEST_TEXT = 6000


@dataclass
class Curve:
    steps: np.ndarray
    values: np.ndarray


@dataclass
class Run:
    name: str
    path: Path
    state: str | None = None
    """running, finished, stopped or failed; None without a status file."""
    total_steps: int | None = None
    last_step: int = 0
    curves: dict[str, Curve] = field(default_factory=dict)
    evals: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """One sentence for each file that could not be read in full, and why the run failed."""

    def last(self, metric: str) -> float | None:
        """Mean of a metric over its last ten steps."""
        curve = self.curves.get(metric)
        return None if curve is None else float(curve.values[-10:].mean())


def load_runs(paths: list[Path]) -> list[Run]:
    if not paths:
        raise SettingError("runs: name at least one run folder.")
    return [load_run(path, name) for path, name in zip(paths, names_of(paths))]


def load_run(path: Path, name: str) -> Run:
    require(path.exists(), f"run folder {path}: does not exist; check the path.")
    if not (path / "metrics.jsonl").is_file():
        raise SettingError(f"run folder {path}: contains no metrics.jsonl; name a folder that `alula train` wrote.")
    notes: list[str] = []
    curves = read_curves(path / "metrics.jsonl", notes)
    if notes and not curves:
        raise SettingError(f"run folder {path}: no line of metrics.jsonl can be read; restore it from a copy.")
    status = read_mapping(path / "status.json", "whether the run finished", notes)
    if status.get("reason"):
        notes.append(f"{path}: the run failed: {status['reason']}")
    return Run(
        name=name,
        path=path,
        state=status.get("state"),
        total_steps=status.get("total_steps"),
        last_step=max((int(curve.steps[-1]) for curve in curves.values()), default=0),
        curves=curves,
        evals=list(read_rows(path / "evals.jsonl", notes)),
        events=list(read_rows(path / "events.jsonl", notes)),
        samples=read_samples(path / "completions.jsonl", notes),
        settings=dict(flatten(read_mapping(path / "config.yaml", "the run's settings", notes))),
        environment=dict(flatten(read_mapping(path / "environment.json", "where the run ran", notes))),
        notes=notes,
    )


def names_of(paths: list[Path]) -> list[str]:
    """Folder names, with as many parent folders as make them distinct."""
    parts = [path.resolve().parts for path in paths]
    names = ["/".join(part[-1:]) for part in parts]
    for depth in range(2, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) if names.count(name) > 1 else name for part, name in zip(parts, names)]
    return names


def read_rows(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The readable lines. Others are counted in `notes`, except a last line that a kill cut off."""
    if not path.exists():
        return
    broken, number = [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            row = parse_line(line)
            if row is not None:
                yield row
            elif line.endswith(b"\n") and line.strip():
                broken.append(number)
    if broken:
        notes.append(
            f"{path}: {len(broken):,} of {number:,} lines could not be read (first: line {broken[0]:,}) and are "
            "left out; repair or delete them and write the report again."
        )


def read_curves(path: Path, notes: list[str]) -> dict[str, Curve]:
    steps: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    for row in read_rows(path, notes):
        step = row.pop("step")
        for name, value in row.items():
            if isinstance(value, int | float):
                steps.setdefault(name, []).append(step)
                values.setdefault(name, []).append(value)
    return {name: Curve(np.array(steps[name]), np.array(values[name], dtype=float)) for name in steps}


def read_mapping(path: Path, what: str, notes: list[str]) -> dict[str, Any]:
    """A mapping from a YAML or JSON file. If it is broken, `notes` says so and the page goes without it."""
    if not path.exists():
        return {}
    try:
        tree = yaml.safe_load(path.read_bytes()) or {}  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        fault = f"line {mark.line + 1} could not be read" if mark else "it could not be read"
    else:
        if isinstance(tree, dict):
            return tree
        fault = "it is not a mapping"
    notes.append(f"{path}: {fault}, so the page does not show {what}; repair the file and write the report again.")
    return {}


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and (tree or not prefix):
        for name, value in tree.items():
            yield from flatten(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False, default=str)


def read_samples(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """A few completions of a few steps, spread over the run, in one pass with little memory."""
    kept: dict[int, list[dict[str, Any]]] = {}
    step, index, every = None, -1, 1
    for row in read_rows(path, notes):
        if row["step"] != step:
            step, index = row["step"], index + 1
            every *= 2 if index // every >= SAMPLED_STEPS else 1
            kept = {earlier: rows for earlier, rows in kept.items() if earlier % every == 0} | {index: []}
        kept[index] = varied([*kept[index], shorten(row)])
    return [row for rows in kept.values() for row in rows]


def varied(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most four rows, of as many kinds (correct, wrong, vetoed, truncated) as possible."""
    kinds: dict[tuple[Any, ...], int] = {}
    ranked = []
    for index, row in enumerate(rows):
        kind = (bool(row.get("vetoed")), row.get("finish"), (row.get("reward") or 0) > 0)
        kinds[kind] = kinds.get(kind, -1) + 1
        ranked.append((kinds[kind], index))
    return [rows[index] for _, index in sorted(sorted(ranked)[:SAMPLES_PER_STEP], key=lambda rank: rank[1])]


def shorten(row: dict[str, Any]) -> dict[str, Any]:
    return row | {name: middle_out(str(row.get(name, ""))) for name in ("prompt", "completion")}


def middle_out(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    left_out = len(text) - LONGEST_TEXT
    return f"{text[: LONGEST_TEXT // 2]}\n[… {left_out:,} characters left out …]\n{text[-LONGEST_TEXT // 2 :]}"
