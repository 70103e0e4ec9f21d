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
from choice import TAU
from judge import Row
from lines import read_lines
from long_tables import (
    budgets_table,
    calibration_table,
    costs_table,
    finals_table,
    foretold_orders_table,
    foretold_table,
    gates_table,
    orders_table,
    policies_table,
    seeds_table,
    sparrow_table,
)
from lost_tokens import lost_table
from markdown import markdown

from alula.mismatch.leaderboard.table import tables

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
BENCHMARKS = ROOT / "benchmarks" / "results"


def raw(question: str, bed: str) -> list[Row]:
    return read_lines(RESULTS / question / f"{bed}.jsonl")


def by_arm(runs: Sequence[Row]) -> dict[str, list[Row]]:
    arms: dict[str, list[Row]] = {}
    for run in runs:
        arms.setdefault(run["arm"], []).append(run)
    return arms


def before_training(bed: str) -> Callable[[Row], Row]:
    """The probe's row for the policy that a run starts with. A bed with one warm-up has one probe for all seeds."""
    rows = {(row["sparsity"], row["seed"]): row for row in raw("probe", bed)}
    return lambda run: rows.get((run["sparsity"], run["seed"])) or rows[run["sparsity"], 0]


def percent(share: float) -> str:
    return f"{100 * share:.0f}"


def half_width(half: float) -> str:
    return percent(half) if isfinite(half) else "–"


def outcome_table(bed: str, question: str) -> str:
    """One row per arm: the dense policy's held-out accuracy, then statistics of the rollouts."""
    arms = by_arm(raw(question, bed))
    if not arms:
        return "Not measured yet."
    elsewhere = (by_arm(raw(other, bed)).get("dense") for other in ("collapse", "control"))
    dense = arms.get("dense") or next(filter(None, elsewhere))
    starts = {run["seed"]: judge.start(run) for runs in arms.values() for run in runs}
    seeds, most = sorted(starts), longest(arms)
    head = [
        "arm",
        "final, %",
        "± (95 %)",
        *(f"seed {seed}" for seed in seeds),
        "collapsed",
        "vs dense, points",
        "± (90 %)",
        "equivalent",
        "vetoed, %",
        "KV saved, %",
        "length, last",
        "reward, last",
    ]
    before = ["before training", percent(fmean(starts.values())), "", *(percent(starts[seed]) for seed in seeds)]
    rows, early = [before + [""] * (len(head) - len(before))], []
    for name, runs in arms.items():
        mean, half = judge.interval([*map(judge.final, runs)])
        by_seed = {run["seed"]: run for run in runs}
        early += ended_early(name, runs, most)
        rows.append(
            [
                name,
                percent(mean),
                half_width(half),
                *(last_accuracy(by_seed[seed], most) if seed in by_seed else "" for seed in seeds),
                f"{sum(map(judge.collapsed, runs))}/{len(runs)}",
                *(["", "", ""] if name == "dense" else difference_cells(judge.against(runs, dense))),
                percent(fmean(judge.over_run(run, "mismatch/veto_rate") for run in runs)),
                percent(fmean(judge.over_run(run, "kv/saved") for run in runs)),
                f"{fmean(judge.at_end(run, 'response/length_mean') for run in runs):.0f}",
                f"{fmean(judge.at_end(run, 'reward/mean') for run in runs):.2f}",
            ]
        )
    return markdown(head, rows) + early_note(early)


def difference_cells(difference: tuple[float, float]) -> list[str]:
    mean, half = difference
    verdict = ("yes" if judge.equivalent(difference) else "no") if isfinite(half) else "–"
    return [f"{100 * mean:+.0f}", half_width(half), verdict]


def longest(arms: Mapping[str, Sequence[Row]]) -> int:
    """Steps of the longest of these runs."""
    return max(len(run["steps"]["reward/mean"]) for runs in arms.values() for run in runs)


def stopped_before(run: Row, most: int) -> bool:
    return len(run["steps"]["reward/mean"]) < most


def last_accuracy(run: Row, most: int) -> str:
    """The last accuracy in percent; an asterisk where the run has fewer than `most` steps."""
    return percent(judge.final(run)) + ("\\*" if stopped_before(run, most) else "")


def ended_early(name: str, runs: Sequence[Row], most: int) -> list[str]:
    """One note for the runs of an arm that have fewer than `most` steps."""
    steps = [str(len(run["steps"]["reward/mean"])) for run in runs if stopped_before(run, most)]
    return [f"`{name}` {', '.join(steps)}"] if steps else []


def early_note(early: Sequence[str]) -> str:
    return f"\n\n\\* Ended early; the last evaluation counts. Steps taken: {'; '.join(early)}." if early else ""


def warnings_table(bed: str, question: str) -> str:
    """The step of each health warning's first appearance, one row per run."""
    kinds = ("rejection", "answers-shrinking", "dense-falling", "dense-sparse-divergence", "mismatch-rising")
    body, silent = [], []
    for arm, runs in by_arm(raw(question, bed)).items():
        if not any(kind in kinds for run in runs for _, kind in run["warnings"]):
            silent.append(f"`{arm}`")
            continue
        for run in runs:
            first = [next((step for step, kind in run["warnings"] if kind == wanted), None) for wanted in kinds]
            body.append([arm, str(run["seed"]), *("–" if step is None else str(step) for step in first)])
    note = f"\n\nNo warning: {', '.join(silent)}." if silent else ""
    return markdown(["arm", "seed", *kinds], body) + note


def probe_table(bed: str, question: str) -> str:
    """Means over seeds."""
    head = [
        "policy",
        "careful chains right, %",
        "KV not read, %",
        "vetoed rollouts, %",
        "vetoes per 1000 tokens",
        "tail",
    ]
    by_policy: dict[str, list[Row]] = {}
    for row in raw("probe", bed):
        by_policy.setdefault(row["sparsity"], []).append(row)

    def mean(rows: list[Row], name: str) -> float:
        return fmean(row[name] for row in rows if row[name] is not None)

    rows = [
        [
            policy_text(policy),
            *(percent(mean(rows, name)) for name in ("careful", "kv_unread", "vetoed_rollouts")),
            f"{1000 * mean(rows, 'veto_hazard'):.1f}",
            f"{mean(rows, 'tail'):.3f}",
        ]
        for policy, rows in by_policy.items()
    ]
    return markdown(head, rows)


def threshold_table(bed: str, question: str) -> str:
    """One row per run: the policy's tail and vetoes before training, and the outcome."""
    probe, arms = before_training(bed), by_arm(raw(question, bed))
    most, body, early = longest(arms), [], []
    for runs in arms.values():
        early += ended_early(runs[0]["sparsity"].split(",")[0], runs, most)
        for run in runs:
            before = probe(run)
            body.append(
                [
                    run["sparsity"].split(",")[0],
                    str(run["seed"]),
                    f"{before['tail']:.3f}",
                    f"{before['tail_low']:.3f}",
                    percent(before["vetoed_rollouts"]),
                    percent(before["careful"] or 0.0),
                    last_accuracy(run, most),
                    "yes" if judge.collapsed(run) else "no",
                ]
            )
    head = ["policy", "seed", "tail", "lower bound", "vetoed, %", "careful right, %"]
    return markdown([*head, "final, %", "collapsed"], body) + early_note(early)


def transfer_table(bed: str, question: str) -> str:
    """One row per sparse run: what the threshold of another bed predicts, and what happened."""
    runs = raw(question, bed)
    if not runs:
        return "Not measured yet."
    probe, final = before_training(bed), {run["seed"]: judge.final(run) for run in runs if run["arm"] == "dense"}
    most, body, early = longest(by_arm(runs)), [], []
    for arm, of_arm in by_arm(runs).items():
        early += ended_early(arm, of_arm, most)
        for run in of_arm if arm != "dense" else ():
            before, collapsed = probe(run), judge.collapsed(run)
            holds = before["tail"] >= TAU
            body.append(
                [
                    arm,
                    policy_text(run["sparsity"]),
                    str(run["seed"]),
                    f"{before['tail']:.3f}",
                    f"{before['tail_low']:.3f}",
                    percent(before["vetoed_rollouts"]),
                    percent(before["careful"] or 0.0),
                    "holds" if holds else "collapses",
                    "collapsed" if collapsed else "held",
                    "yes" if holds != collapsed else "no",
                    last_accuracy(run, most),
                    f"{100 * (judge.final(run) - final[run['seed']]):+.0f}",
                ]
            )
    head = ["arm", "policy", "seed", "tail", "lower bound", "vetoed, %", "careful right, %"]
    head += ["τ says", "outcome", "τ right", "final, %", "vs dense, points"]
    return markdown(head, body) + early_note(early)


def policy_text(sparsity: str) -> str:
    """`rkv:24+4`; a schedule by the name of its file."""
    return re.sub(r":\S*/(\S+)\.json", r":\1", sparsity.split(",")[0])


def robustness_table(bed: str, question: str, metric: str = "accuracy") -> str:
    """Rows: how a model was trained. Columns: the policy at evaluation. Percent, mean over seeds."""
    rows = raw(question, bed)
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    cells: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row[metric] is not None:
            cells.setdefault(row["arm"], {}).setdefault(row["policy"], []).append(row[metric])
    body = [
        [arm, *(percent(fmean(by_policy[policy])) if policy in by_policy else "" for policy in policies)]
        for arm, by_policy in cells.items()
    ]
    return markdown(["trained", *policies], body)


def chains_table(bed: str, question: str) -> str:
    """The same for careful chains: the share of those written that are right."""
    return robustness_table(bed, question, "careful")


def breakeven_table(bed: str, question: str) -> str:
    """Time per generated token, and the speed-up of a step's rollouts without and with scoring."""
    head = [
        "response tokens",
        "dense, µs/token",
        "rkv 512+128, µs/token",
        "dense scoring, µs/token",
        "speed-up of rollouts",
        "with scoring",
    ]
    rows = [
        [
            f"{row['length']:,.0f}",
            *(f"{row[n]:.0f}" for n in ("dense_us", "sparse_us", "score_us")),
            f"{row['rollout_ratio']:.2f}",
            f"{row['with_scoring']:.2f}",
        ]
        for row in read_lines(RESULTS / question / "breakeven.jsonl")
    ]
    return markdown(head, rows)


def steps_table(bed: str, question: str) -> str:
    """The first evaluation at which the dense policy reaches an accuracy, per seed, and the peak KV."""
    goals, arms = (0.9, 0.95), by_arm(raw(question, bed))
    seeds = sorted({run["seed"] for runs in arms.values() for run in runs})
    body = []
    for arm, runs in arms.items():
        by_seed = {run["seed"]: run for run in runs}
        reached = [judge.reached(by_seed[seed], goal) for goal in goals for seed in seeds]
        peaks = [max(run["steps"]["kv/bytes_peak"]) / 1e6 for run in runs]
        peak = f"{fmean(peaks):,.1f}" if max(peaks) < 100 else f"{fmean(peaks):,.0f}"
        body.append([arm, *("–" if step is None else str(step) for step in reached), peak])
    return markdown(["arm", *(f"{goal:.0%}, seed {seed}" for goal in goals for seed in seeds), "peak KV, MB"], body)


def alone_table(bed: str, question: str) -> str:
    """Runs that had the GPU to themselves: median seconds per phase, steps and seconds to an accuracy."""
    goals, phases, body = (0.9, 0.99), ("rollout", "score", "update", "step"), []
    for run in raw(question, bed):
        times = {phase: [*map(float, run["steps"][f"time/{phase}"])] for phase in phases}
        usual = {phase: median(values[1:]) for phase, values in times.items()}  # the first step compiles
        steps = [judge.reached(run, goal) for goal in goals]
        body.append(
            [
                run["arm"],
                *(f"{usual[phase]:.2f}" for phase in phases),
                *("–" if step is None else str(step) for step in steps),
                *("–" if step is None else f"{step * usual['step']:.1f}" for step in steps),
                f"{max(run['steps']['kv/bytes_peak']) / 1e6:,.0f}",
                percent(judge.over_run(run, "kv/saved")),
            ]
        )
    goal_heads = [f"{unit} to {goal:.0%}" for unit in ("steps", "seconds") for goal in goals]
    return markdown(["arm", *(f"{phase}, s" for phase in phases), *goal_heads, "peak KV, MB", "KV saved, %"], body)


def distilled_table(bed: str, question: str) -> str:
    """Tails before and after distillation at one budget: there (mean over seeds) and at other budgets (one seed)."""
    measured = json.loads((BENCHMARKS / "distill-h200.json").read_text())
    budgets: list[int] = []
    body = []
    for section in ("select", "evict"):
        by_policy: dict[str, list[Row]] = {}
        for row in measured[section]["rows"]:
            by_policy.setdefault(row["sparsity"], []).append(row)
        for policy, rows in by_policy.items():
            [ladder] = [row["ladder"] for row in rows if "ladder" in row]
            budgets = [rung["budget"] for rung in ladder["before"]]
            for when in ("before", "after"):
                mean = fmean(row[when]["tail"] for row in rows)
                tails = [mean, *(rung["tail"] for rung in ladder[when])]
                body.append([policy, when, *(f"{tail:.3f}" for tail in tails)])
    return markdown(["distilled at", "", "there, mean of 3 seeds", *(f"at {size}" for size in budgets)], body)


def own_mask_table(bed: str, question: str) -> str:
    """One row per arm with a number per seed: accuracy of both policies in %, and the mean of the last five rewards."""
    body = []
    for arm, runs in by_arm(raw(question, bed)).items():
        cells = [arm]
        for policy in ("dense", "sparse"):
            found = [[e["accuracy"] for e in run["evals"] if e["policy"] == policy] for run in runs]
            cells += [", ".join(f"{100 * each[at]:.0f}" for each in found if each) or "–" for at in (0, -1)]
        body.append([*cells, ", ".join(f"{fmean(run['steps']['reward/mean'][-5:]):.2f}" for run in runs)])
    return markdown(["arm", "dense, start", "dense, end", "sparse, start", "sparse, end", "reward, end"], body)


def finals_of(question: str, bed: str) -> list[Row]:
    """Last answers of a question's own models, or of those of the bed."""
    return raw(f"{question}/finals", bed) or raw("finals", bed)


TABLES: dict[str, Callable[[str, str], str]] = {
    "outcome": outcome_table,
    "probe": probe_table,
    "threshold": threshold_table,
    "transfer": transfer_table,
    "robustness": robustness_table,
    "chains": chains_table,
    "breakeven": breakeven_table,
    "steps": steps_table,
    "alone": alone_table,
    "warnings": warnings_table,
    "distilled": distilled_table,
    "own-mask": own_mask_table,
    "gates": lambda bed, question: gates_table(raw(question, bed)),
    "budgets": lambda bed, question: budgets_table(raw(question, bed)),
    "policies": lambda bed, question: policies_table(raw(question, bed)),
    "finals": lambda bed, question: finals_table(raw(question, bed)),
    "seeds": lambda bed, question: seeds_table(raw(question, bed), finals_of(question, bed)),
    "costs": lambda bed, question: costs_table(raw(question, bed)),
    "calibration": lambda bed, question: calibration_table(raw(question, bed)),
    "sparrow": lambda bed, question: sparrow_table(raw(question, bed)),
    "bytes": lambda bed, question: tables(json.loads((RESULTS / question / f"{bed}.json").read_text())),
    "lost": lambda bed, question: lost_table(RESULTS / question / f"{bed}.json"),
    "foretold": lambda bed, question: foretold_table(raw(question, bed)),
    "foretold-orders": lambda bed, question: foretold_orders_table(raw(question, bed)),
    "orders": lambda bed, question: orders_table(raw(question, bed)),
}
MARK = re.compile(r"(<!-- table (\S+) (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""`<!-- table KIND BED QUESTION -->`"""


def filled(text: str) -> str:
    return MARK.sub(lambda m: f"{m[1]}{TABLES[m[2]](m[3], m[4])}\n{m[5]}", text)


def fill(page: Path) -> None:
    page.write_text(filled(page.read_text()))


def main() -> None:
    pages = [RESULTS / f"{name}.md" for name in sys.argv[1:]] or sorted(RESULTS.glob("*.md"))
    for page in pages:
        fill(page)


if __name__ == "__main__":
    main()
