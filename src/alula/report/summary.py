"""Numbers of the headline table."""

import math
from dataclasses import dataclass
from typing import Any

from alula.files import plus_minus, size_text
from alula.objective.veto import TOO_MANY
from alula.report.runs import Run
from alula.run.console import seconds


@dataclass(frozen=True)
class Cell:
    value: str = "—"
    detail: str = ""
    tone: str = ""
    """good, bad or empty."""


COLUMNS = (
    ("Reward", "mean of the last 10 steps"),
    ("Held-out, dense", "accuracy, first → last evaluation"),
    ("Held-out, sparse", "accuracy, last evaluation"),
    ("Length", "tokens, first → last 10 steps"),
    ("Cut off", "answers at the limit, last 10 steps"),
    ("Vetoed", "rollouts, mean of all steps"),
    ("KV saved", "tokens of a rollout, mean of all steps"),
    ("Peak KV", "pages in use, highest step; dense: rollouts of the same answers"),
    ("Tokens/s", "rollouts, median step"),
    ("Time", "sum of all steps"),
)


def headline(run: Run) -> list[Cell]:
    """One row of the table: a cell for each of `COLUMNS`."""
    reward = run.last("reward/mean")
    lengths = run.curves.get("response/length_mean")
    saved = mean(run, "kv/saved")
    peak = run.curves.get("kv/bytes_peak")
    speed = run.curves.get("speed/tokens_per_s")
    steps = run.curves.get("time/step")
    return [
        Cell() if reward is None else Cell(f"{reward:.3f}"),
        accuracy_cell(held_out(run, "dense")),
        accuracy_cell(held_out(run, "sparse")[-1:]),
        Cell() if lengths is None else Cell(f"{lengths.values[:10].mean():.0f} → {lengths.values[-10:].mean():.0f}"),
        cut_off_cell(run.last("response/truncated")),
        vetoed_cell(mean(run, "mismatch/veto_rate"), mean(run, "mismatch/rejected")),
        Cell() if saved is None else Cell(f"{saved:.0%}"),
        Cell()
        if peak is None
        else Cell(size_text(peak.values.max()), against_dense(mean(run, "kv/bytes_saved"), saved)),
        Cell() if speed is None else Cell(f"{sorted(speed.values)[len(speed.values) // 2]:,.0f}"),
        Cell() if steps is None else Cell(seconds(steps.values.sum()), f"{seconds(steps.values.mean())} per step"),
    ]


def held_out(run: Run, policy: str) -> list[tuple[float, float]]:
    """(accuracy, standard error) of each evaluated step, averaged over its data sets."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in run.evals:
        if row.get("policy", "dense") == policy and row.get("accuracy") is not None:
            by_step.setdefault(row["step"], []).append(row)
    return [
        (
            sum(row["accuracy"] for row in rows) / len(rows),
            math.hypot(*(row.get("stderr") or 0.0 for row in rows)) / len(rows),
        )
        for _, rows in sorted(by_step.items())
    ]


def against_dense(saved_bytes: float | None, saved: float | None) -> str:
    """The peak compared with what the same answers would take densely, for a run that saved any tokens."""
    if saved_bytes is None or not saved:
        return ""
    return f"{size_text(abs(saved_bytes))} {'less' if saved_bytes >= 0 else 'more'} than the same answers densely"


MANY_CUT_OFF = 0.2
"""Share of answers at the length limit above which the limit, not the task, shapes the reward."""


def cut_off_cell(share: float | None) -> Cell:
    if share is None:
        return Cell()
    many = share > MANY_CUT_OFF
    return Cell(f"{share:.1%}", "above 20%" if many else "", "bad" if many else "")


def vetoed_cell(vetoed: float | None, rejected: float | None) -> Cell:
    """The share of vetoed rollouts, and the share that the correction rejected, which may be smaller or larger."""
    if vetoed is None:
        return Cell()
    many = max(vetoed, rejected or 0.0) > TOO_MANY
    details = ["above 15%"] * many + ([] if rejected is None else [f"{rejected:.1%} rejected"])
    return Cell(f"{vetoed:.1%}", ", ".join(details), "bad" if many else "")


def accuracy_cell(evals: list[tuple[float, float]]) -> Cell:
    if not evals:
        return Cell()
    (first, first_error), (last, last_error) = evals[0], evals[-1]
    if len(evals) == 1:
        return Cell(f"{last:.1%}", plus_minus(last_error).strip())
    change, error = last - first, math.hypot(first_error, last_error)
    tone = "good" if change > 2 * error else "bad" if change < -2 * error else ""
    arrow = "▲" if change > 0 else "▼" if change < 0 else "="
    best = max(accuracy for accuracy, _ in evals)
    higher = f", best {best:.1%}" if best > last else ""
    detail = f"{arrow} {abs(100 * change):.1f}{plus_minus(error, unit='')} points{higher}"
    return Cell(f"{first:.1%} → {last:.1%}", detail, tone)


def phases(run: Run) -> dict[str, float]:
    """Mean seconds per step of each phase; `other` is the rest of the step."""
    means = {name: mean(run, f"time/{name}") for name in ("rollout", "environment", "reward", "score", "update")}
    known = {name: value for name, value in means.items() if value is not None}
    step = mean(run, "time/step")
    if known and step is not None and step - sum(known.values()) > 0.005 * step:
        known["other"] = step - sum(known.values())
    return known


def mean(run: Run, metric: str) -> float | None:
    curve = run.curves.get(metric)
    return None if curve is None else float(curve.values.mean())
