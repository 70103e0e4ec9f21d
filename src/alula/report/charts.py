"""The charts of the page and their data."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from alula.objective.veto import TOO_MANY
from alula.report.runs import Curve, Run
from alula.report.series import points, smooth, thin

Format = Literal["number", "percent", "bytes", "seconds"]


@dataclass(frozen=True)
class Chart:
    title: str
    metric: str
    unit: str
    note: str = ""
    format: Format = "number"
    log: bool = False
    floor: float = 0.0
    """On a log axis only values above this are drawn."""
    limit: float | None = None
    """Value of a dashed line to compare the curves with."""


REWARD = Chart("Reward", "reward/mean", "mean per rollout", "of the training rollouts, under the sparse policy")
MAIN = (
    Chart("Response length", "response/length_mean", "tokens"),
    Chart("Turns", "environment/turns", "per episode"),
    Chart("Policy entropy", "policy/entropy", "nats per token"),
    Chart("Mismatch KL", "mismatch/kl_k3", "nats per token", "sparse to dense, before masking", log=True, floor=1e-9),
    Chart(
        "Vetoed rollouts", "mismatch/veto_rate", "% of rollouts", "trouble above the line", "percent", limit=TOO_MANY
    ),
    Chart("KV cache saved", "kv/saved", "% of the dense policy's tokens", format="percent"),
    Chart("Tail acceptance", "mismatch/tail", "5th percentile of overlap", "of the worst length bin"),
    Chart("Gradient norm", "policy/grad_norm", "before clipping", log=True),
    Chart("Effective sample size", "mismatch/ess", "% of tokens", format="percent"),
    Chart("Generation speed", "speed/tokens_per_s", "tokens per second"),
)
MORE = (
    Chart("Training accuracy", "reward/accuracy", "% of rollouts", format="percent"),
    Chart("Truncated answers", "response/truncated", "% of rollouts", format="percent"),
    Chart("Given tokens", "environment/given_tokens", "per episode", "the environment's messages, not trained on"),
    Chart("Environment failures", "environment/failed", "% of episodes", "given up and not trained on", "percent"),
    Chart("Waiting for tools", "time/environment_mean", "seconds per episode", format="seconds"),
    Chart("Groups without signal", "groups/no_signal", "% of groups", format="percent"),
    Chart("Clip fraction", "policy/clip_fraction", "% of tokens", format="percent"),
    Chart("KL to the reference", "policy/kl_ref", "nats per token"),
    Chart("Rejected rollouts", "mismatch/rejected", "% of rollouts", "dropped by the correction", "percent"),
    Chart("Vetoed tokens", "mismatch/veto_rate_token", "share of tokens", log=True),
    Chart("Consistency ξ, 1st percentile", "mismatch/xi_p01", "p dense / p sparse", log=True),
    Chart("Consistency ξ, 99th percentile", "mismatch/xi_p99", "p dense / p sparse", log=True),
    Chart("KV budget", "schedule/budget/0", "tokens", "current budget for short sequences", log=True),
    Chart("Distillation: KL(sparse ‖ dense)", "distill/kl", "nats per token", log=True),
    Chart("Distillation: tail acceptance", "distill/acceptance_tail", "5th percentile of overlap"),
    Chart("Distillation: cost", "speed/distill_cost", "% of the rest of the step", format="percent"),
    Chart("Peak KV cache", "kv/bytes_peak", "bytes", format="bytes"),
    Chart("Learner utilisation", "speed/mfu", "% of peak FLOPs", format="percent"),
    Chart("Time per step", "time/step", "seconds", format="seconds"),
)


def chart_data(runs: list[Run]) -> list[dict[str, Any]]:
    """All charts with data from at least one run, in page order."""
    drawn = [metric_chart(runs, REWARD, "hero")]
    drawn += [eval_chart(runs, name) for name in eval_names(runs)]
    drawn += [metric_chart(runs, chart, "main") for chart in MAIN]
    drawn += [metric_chart(runs, chart, "more") for chart in MORE]
    return [chart for chart in drawn if chart["lines"]]


def metric_chart(runs: list[Run], chart: Chart, section: str) -> dict[str, Any]:
    lines = []
    for index, run in enumerate(runs):
        curve = tail_curve(run) if chart.metric == "mismatch/tail" else run.curves.get(chart.metric)
        if curve is not None:
            lines.append({"run": index, **points(thin(curve)), "smooth": points(smooth(curve))})
    return {
        "title": chart.title,
        "unit": chart.unit,
        "note": chart.note,
        "format": chart.format,
        "log": chart.log,
        "floor": chart.floor,
        "limit": chart.limit,
        "section": section,
        "lines": lines,
    }


def tail_curve(run: Run) -> Curve | None:
    """`mismatch/tail`, or the lowest of its length bins `mismatch/tail/<length>` at every step."""
    bins = [curve for name, curve in run.curves.items() if name.startswith("mismatch/tail/")]
    if "mismatch/tail" in run.curves or not bins:
        return run.curves.get("mismatch/tail")
    lowest: dict[int, float] = {}
    for curve in bins:
        for step, value in zip(curve.steps.tolist(), curve.values.tolist()):
            lowest[step] = min(value, lowest.get(step, math.inf))
    steps = sorted(lowest)
    return Curve(np.array(steps), np.array([lowest[step] for step in steps]))


def eval_names(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(str(row.get("name", "held out")) for run in runs for row in run.evals))


def eval_chart(runs: list[Run], name: str) -> dict[str, Any]:
    lines = []
    for index, run in enumerate(runs):
        for policy in ("dense", "sparse"):
            rows = [
                row
                for row in run.evals
                if row.get("name", "held out") == name
                and row.get("policy", "dense") == policy
                and row.get("accuracy") is not None
            ]
            if rows:
                curve = Curve(
                    np.array([row["step"] for row in rows]), np.array([float(row["accuracy"]) for row in rows])
                )
                stderr = [row.get("stderr") or 0.0 for row in rows] if len(rows) <= 60 else []
                shown = thin(curve)
                lines.append(
                    {
                        "run": index,
                        **points(shown),
                        "marks": len(rows) <= 60,
                        "error": stderr,
                        "dotted": policy == "sparse",
                        "label": policy,
                    }
                )
    return {
        "title": f"Held-out accuracy · {name}",
        "unit": "% correct",
        "note": "solid: dense policy, dotted: sparse policy; bars: one standard error",
        "format": "percent",
        "log": False,
        "floor": 0.0,
        "limit": None,
        "section": "hero",
        "lines": lines,
    }


def clock_data(run: Run) -> dict[str, list[float]] | None:
    """Seconds since the start at each step, for curves over time."""
    steps = run.curves.get("time/step")
    if steps is None:
        return None
    total = Curve(steps.steps, np.cumsum(steps.values))
    return points(thin(total))
