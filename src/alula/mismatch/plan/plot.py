"""SVG charts of a calibration and its plans: tails by length, and speed-up by threshold."""

from collections.abc import Sequence

from alula.charts import Line, chart, look
from alula.mismatch.calibrate.file import Calibration
from alula.mismatch.plan.plan import Plan
from alula.mismatch.plan.tradeoff import Tradeoff


def plot_tails(calibration: Calibration, plan: Plan | None = None) -> str:
    """Tail by length: one curve per policy, the dense floor, and the chosen plan with its confidence band."""
    centres = [(j + 0.5) * calibration.width for j in range(calibration.bins)]
    several = len(calibration.families()) > 1  # with one family, the budget identifies a policy
    lines = []
    for i, one in enumerate(m for family in calibration.families().values() for m in family):
        lines.append(
            Line(
                str(one.budget),
                centres,
                one.tail.value.tolist(),
                **look(i),
                group=one.family.describe() if several else "",
            )
        )
    lines.append(Line("dense floor", centres, calibration.floor.value.tolist(), colour="#111111", dash="5 4"))
    if plan is not None:
        lines.append(
            Line(
                f"tau {plan.tau:.3f}",
                [0, centres[-1] + calibration.width / 2],
                [plan.tau] * 2,
                colour="#999999",
                dash="5 4",
            )
        )
        chosen = [(c, b.tail) for c, b in zip(centres, plan.bins) if b.tail is not None]
        lines.append(
            Line(
                "plan",
                [c for c, _ in chosen],
                [t.value for _, t in chosen],
                [t.lower for _, t in chosen],
                [t.upper for _, t in chosen],
                colour="#111111",
                dots=True,
            )
        )
    return chart(f"Tail of acceptance, {calibration.model}", "length (tokens)", "tail", lines)


def plot_pareto(rows: Sequence[Tradeoff]) -> str:
    """Predicted speed-up of the best plan by threshold."""
    points = [(row.tau, row.plan.speedup) for row in rows if row.plan is not None]
    line = Line("best plan", [tau for tau, _ in points], [speed for _, speed in points], dots=True)
    return chart("Speed-up by threshold", "tau", "predicted speed-up", [line])
