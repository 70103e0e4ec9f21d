"""Markdown tables from the raw files, written into the pages between `<!-- table NAME -->` and `<!-- end -->`.

python experiments/tables.py            # every page
python experiments/tables.py collapse   # one
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean, median

import judge
from judge import Row
from lines import read_lines

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
BENCHMARKS = ROOT / "benchmarks" / "results"


def raw(question: str, bed: str) -> list[Row]:
    return read_lines(RESULTS / question / f"{bed}.jsonl")


def by_arm(runs: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for run in runs:
        found.setdefault(run["arm"], []).append(run)
    return found


def before_training(bed: str) -> Callable[[Row], Row]:
    """What the probe measured of the policy that a run began with; a bed with one warm-up has one probe."""
    rows = {(row["sparsity"], row["seed"]): row for row in raw("probe", bed)}
    return lambda run: rows.get((run["sparsity"], run["seed"])) or rows[run["sparsity"], 0]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def percent(mean: float, half: float = float("inf")) -> str:
    return f"{100 * mean:.0f} %" if not isfinite(half) else f"{100 * mean:.0f} ± {100 * half:.0f} %"


def percents(rows: Sequence[Row], name: str) -> str:
    return " ".join(f"{100 * (row[name] or 0.0):.0f}" for row in rows)


def points(mean: float, half: float) -> str:
    shown = f"{100 * mean:+.0f}"
    return shown if not isfinite(half) else f"{shown} ± {100 * half:.0f}"


def outcome_table(bed: str, question: str) -> str:
    """A row an arm: what became of the dense policy, and what the rollouts were like."""
    arms = by_arm(raw(question, bed))
    if not arms:
        return "Not measured yet."
    elsewhere = (by_arm(raw(other, bed)).get("dense") for other in ("collapse", "control"))
    dense = arms.get("dense") or next(filter(None, elsewhere))
    head = [
        "arm",
        "start",
        "final",
        "every seed",
        "collapsed",
        "points against dense (90 %)",
        "vetoed",
        "length, last",
        "KV saved",
        "reward, last",
    ]
    rows, most = [], longest(arms)
    for name, runs in arms.items():
        difference = judge.against(runs, dense)
        same = " =" if judge.equivalent(difference) else ""
        rows.append(
            [
                name,
                percent(fmean(map(judge.start, runs))),
                percent(*judge.interval([*map(judge.final, runs)])),
                " ".join(last_accuracy(run, most) for run in runs),
                f"{sum(map(judge.collapsed, runs))}/{len(runs)}",
                "" if name == "dense" else points(*difference) + same,
                percent(fmean(judge.over_run(run, "mismatch/veto_rate") for run in runs)),
                f"{fmean(judge.at_end(run, 'response/length_mean') for run in runs):.0f}",
                percent(fmean(judge.over_run(run, "kv/saved") for run in runs)),
                f"{fmean(judge.at_end(run, 'reward/mean') for run in runs):.2f}",
            ]
        )
    return markdown(head, rows)


def longest(arms: Mapping[str, Sequence[Row]]) -> int:
    """Steps of the longest of these runs."""
    return max(len(run["steps"]["reward/mean"]) for runs in arms.values() for run in runs)


def last_accuracy(run: Row, most: int) -> str:
    """With its step where the run has fewer than `most`."""
    step, accuracy = judge.dense_accuracy(run)[-1]
    return f"{100 * accuracy:.0f}" + ("" if len(run["steps"]["reward/mean"]) == most else f" (step {step})")


def warnings_table(bed: str, question: str) -> str:
    """The step of each health warning's first appearance, a number a seed."""
    kinds = ("rejection", "answers-shrinking", "dense-falling", "dense-sparse-divergence", "mismatch-rising")
    body = []
    for arm, runs in by_arm(raw(question, bed)).items():
        cells = []
        for kind in kinds:
            first = [next((step for step, found in run["warnings"] if found == kind), None) for run in runs]
            cells.append(" ".join("–" if step is None else str(step) for step in first))
        body.append([arm, *cells])
    return markdown(["arm", *kinds], body)


def probe_table(bed: str, question: str) -> str:
    """Means over seeds."""
    head = [
        "policy",
        "careful chains right",
        "all right",
        "KV saved",
        "KV not read",
        "vetoed rollouts",
        "vetoes per 1000 tokens",
        "tail",
    ]
    found: dict[str, list[Row]] = {}
    for row in raw("probe", bed):
        found.setdefault(row["sparsity"], []).append(row)

    def mean(rows: list[Row], name: str) -> float:
        return fmean(row[name] for row in rows if row[name] is not None)

    rows = [
        [
            policy.split(",")[0],
            *(percent(mean(rows, n)) for n in ("careful", "accuracy", "kv_saved", "kv_unread", "vetoed_rollouts")),
            f"{1000 * mean(rows, 'veto_hazard'):.1f}",
            f"{mean(rows, 'tail'):.3f}",
        ]
        for policy, rows in found.items()
    ]
    return markdown(head, rows)


def threshold_table(bed: str, question: str) -> str:
    """A budget's tail and vetoes before training against what became of its runs, a number a seed."""
    probe, arms, body = before_training(bed), by_arm(raw(question, bed)), []
    most = longest(arms)
    for runs in arms.values():
        before = [*map(probe, runs)]
        body.append(
            [
                runs[0]["sparsity"].split(",")[0],
                " ".join(f"{row['tail']:.3f}" for row in before),
                " ".join(f"{row['tail_low']:.3f}" for row in before),
                percents(before, "vetoed_rollouts"),
                percents(before, "careful"),
                " ".join(last_accuracy(run, most) for run in runs),
                f"{sum(map(judge.collapsed, runs))}/{len(runs)}",
                percent(fmean(row["kv_unread"] for row in before)),
            ]
        )
    head = [
        "policy",
        "tail before",
        "its lower bound",
        "vetoed before, %",
        "careful right before, %",
        "final, %",
        "collapsed",
        "KV not read",
    ]
    return markdown(head, body)


def robustness_table(bed: str, question: str, metric: str = "accuracy") -> str:
    """Rows: how a model was trained. Columns: how it is evaluated. Mean over seeds."""
    rows = raw(question, bed)
    columns = list(dict.fromkeys(row["policy"] for row in rows))
    cells: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row[metric] is not None:
            cells.setdefault(row["arm"], {}).setdefault(row["policy"], []).append(row[metric])
    body = [[arm, *(percent(fmean(found[c])) if c in found else "" for c in columns)] for arm, found in cells.items()]
    return markdown(["trained", *columns], body)


def chains_table(bed: str, question: str) -> str:
    """The same of careful chains alone: those that are right, of those that were written."""
    return robustness_table(bed, question, "careful")


def breakeven_table(bed: str, question: str) -> str:
    """Time per generated token, and what the rollouts of a step gain, scoring included."""
    head = [
        "response tokens",
        "dense µs/token",
        "rkv 512+128 µs/token",
        "dense scoring µs/token",
        "rollout alone",
        "with scoring",
    ]
    path = RESULTS / question / "breakeven.jsonl"
    rows = [
        [
            f"{row['length']:,.0f}",
            *(f"{row[n]:.0f}" for n in ("dense_us", "sparse_us", "score_us")),
            f"{row['rollout_ratio']:.2f} ×",
            f"{row['with_scoring']:.2f} ×",
        ]
        for row in map(json.loads, path.read_text().splitlines())
    ]
    return markdown(head, rows)


def steps_table(bed: str, question: str) -> str:
    """The first evaluation at which the dense policy reaches an accuracy, each seed, and the most KV ever held."""
    goals = (0.85, 0.9, 0.95)
    body = []
    for arm, runs in by_arm(raw(question, bed)).items():
        cells = []
        for goal in goals:
            reached = [judge.reached(run, goal) for run in runs]
            cells.append(" ".join("–" if step is None else str(step) for step in reached))
        peaks = [max(run["steps"]["kv/bytes_peak"]) / 1e6 for run in runs]
        body.append([arm, *cells, f"{fmean(peaks):,.1f}" if max(peaks) < 100 else f"{fmean(peaks):,.0f}"])
    return markdown(["arm", *(f"steps to {goal:.0%}" for goal in goals), "peak KV, MB"], body)


def alone_table(bed: str, question: str) -> str:
    """Runs that had the machine to themselves: seconds of a step by phase, medians, and to an accuracy."""
    goals, phases, body = (0.9, 0.99), ("rollout", "score", "update", "step"), []
    for run in raw(question, bed):
        times = {phase: [*map(float, run["steps"][f"time/{phase}"])] for phase in phases}
        usual = {phase: median(values[1:]) for phase, values in times.items()}  # the first step compiles
        steps = [judge.reached(run, goal) for goal in goals]
        body.append(
            [
                run["arm"],
                *(f"{usual[phase]:.2f}" for phase in phases),
                *("–" if step is None else f"{step} steps, {step * usual['step']:.1f} s" for step in steps),
                f"{max(run['steps']['kv/bytes_peak']) / 1e6:,.0f}",
                percent(judge.over_run(run, "kv/saved")),
            ]
        )
    return markdown(
        ["arm", *(f"{phase}, s" for phase in phases), *(f"to {goal:.0%}" for goal in goals), "peak KV, MB", "KV saved"],
        body,
    )


def distilled_table(bed: str, question: str) -> str:
    """Tails before and after a few steps of distillation at a budget: there, a mean over seeds, and at others."""
    measured = json.loads((BENCHMARKS / "distill-h200.json").read_text())
    budgets: list[int] = []
    body = []
    for section in ("select", "evict"):
        by_policy: dict[str, list[Row]] = {}
        for row in measured[section]["rows"]:
            by_policy.setdefault(row["sparsity"], []).append(row)
        for policy, rows in by_policy.items():
            own, [ladder] = arrow(rows, "tail"), [row["ladder"] for row in rows if "ladder" in row]
            budgets = [rung["budget"] for rung in ladder["before"]]
            elsewhere = [arrow([{"before": a, "after": b}], "tail") for a, b in zip(ladder["before"], ladder["after"])]
            body.append([policy, str(len(rows)), own, *elsewhere])
    return markdown(["distilled at", "seeds", "tail there", *(f"at {size}, one seed" for size in budgets)], body)


def arrow(rows: Sequence[Row], name: str) -> str:
    return " → ".join(f"{fmean(row[when][name] for row in rows):.3f}" for when in ("before", "after"))


TABLES: dict[str, Callable[[str, str], str]] = {
    "outcome": outcome_table,
    "probe": probe_table,
    "threshold": threshold_table,
    "robustness": robustness_table,
    "chains": chains_table,
    "breakeven": breakeven_table,
    "steps": steps_table,
    "alone": alone_table,
    "warnings": warnings_table,
    "distilled": distilled_table,
}
MARK = re.compile(r"(<!-- table (\S+) (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""`<!-- table KIND BED QUESTION -->`"""


def fill(page: Path) -> None:
    text = page.read_text()
    page.write_text(MARK.sub(lambda m: f"{m[1]}{TABLES[m[2]](m[3], m[4])}\n{m[5]}", text))


def main() -> None:
    pages = [RESULTS / f"{name}.md" for name in sys.argv[1:]] or sorted(RESULTS.glob("*.md"))
    for page in pages:
        fill(page)


if __name__ == "__main__":
    main()
