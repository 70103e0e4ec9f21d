"""Tables of the long beds, from their raw lines."""

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from statistics import correlation, fmean, stdev

import judge
from judge import Row
from markdown import markdown

EMPTY = "Not measured yet."


def gates_table(rows: Sequence[Row]) -> str:
    """One row per gate: limit, the value of every seed, and the seeds that passed."""
    if not rows:
        return EMPTY
    seeds = sorted({row["seed"] for row in rows})
    by_gate: dict[str, list[Row]] = {}
    for row in rows:
        by_gate.setdefault(row["gate"], []).append(row)
    body = []
    for gate, found in by_gate.items():
        values = {row["seed"]: f"{row['value']:.3g}" for row in found}
        cells = [values.get(seed, "") for seed in seeds]
        body.append(
            [gate, found[0]["limit"], *cells, f"{sum(r['passed'] for r in found)}/{len(found)}", found[0]["note"]]
        )
    return markdown(["gate", "limit", *(f"seed {seed}" for seed in seeds), "passed", "note, first seed"], body)


def budgets_table(rows: Sequence[Row]) -> str:
    """One row per policy, of the first seed: what it does to the warmed-up model."""
    first = [row for row in rows if row["seed"] == 0]
    if not first:
        return EMPTY
    vetoes = "vetoed_rollouts" in first[0]
    body = []
    for row in first:
        shares = [kv_share(row), row["accuracy"], *([row["vetoed_rollouts"]] if vetoes else [])]
        body.append(
            [row["sparsity"].split(",")[0], *(f"{100 * share:.0f}" for share in shares), f"{row['length']:.0f}"]
        )
    head = ["policy", "KV share, %", "accuracy, %", *(["vetoed, %"] if vetoes else []), "tokens"]
    return markdown(head, body)


def policies_table(rows: Sequence[Row]) -> str:
    """One row per policy: accuracy and vetoed share of every seed, and the mean share of KV."""
    by_policy: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        by_policy.setdefault(row["sparsity"], []).append(row)
    if not by_policy:
        return EMPTY
    body = []
    for policy, found in by_policy.items():
        accuracy, vetoed = ([row[name] for row in found] for name in ("accuracy", "vetoed_rollouts"))
        shares = [*accuracy, fmean(accuracy), *vetoed, fmean(map(kv_share, found))]
        body.append([policy, *(f"{100 * share:.0f}" for share in shares)])
    seeds = [row["seed"] for row in next(iter(by_policy.values()))]
    right, lost = ([f"{what}, seed {seed}" for seed in seeds] for what in ("right, %", "vetoed, %"))
    return markdown(["policy", *right, "mean", *lost, "KV share, %"], body)


def kv_share(row: Row) -> float:
    """Of the dense policy's KV, mean over decode steps: held by an evictor, read by a selector."""
    return float(1 - max(row["kv_saved"], row["kv_unread"]))


def finals_table(finals: Sequence[Row], seed: int = 0) -> str:
    """One row per model: the dense policy on all held-out problems, and its paired differences to start and dense."""
    found = {row["arm"]: row for row in finals if row["seed"] == seed}
    if not found:
        return EMPTY
    bases = [name for name in ("start", "dense") if name in found]
    head = ["model", "accuracy, %", "tokens", *(f"vs {name}, points (90 %)" for name in bases)]
    body = []
    for arm, row in found.items():
        cells = [difference_cell(row, found[base]) if arm != base else "" for base in bases]
        body.append([arm, f"{100 * row['accuracy']:.1f}", f"{row['length']:.0f}", *cells])
    return markdown(head, body)


def difference_cell(row: Row, base: Row) -> str:
    mean, half = paired(row["right"], base["right"])
    found = f"{100 * mean:+.1f} ({100 * (mean - half):+.1f} to {100 * (mean + half):+.1f})"
    return f"{found}, equivalent" if judge.equivalent((mean, half)) else found


def paired(right: str, base: str) -> tuple[float, float]:
    """Difference of two models over the same problems: mean and half-width at 90 %."""
    differences = [int(a) - int(b) for a, b in zip(right, base, strict=True)]
    return fmean(differences), 1.645 * stdev(differences) / sqrt(len(differences))


def costs_table(rows: Sequence[Row], seed: int = 0) -> str:
    """One row per arm: what its steps produced, held and took; means over the run, seconds without the first step."""
    found = [run for run in rows if run["seed"] == seed]
    if not found:
        return EMPTY
    head = ["arm", "answer tokens, first step", "last step", "million tokens", "cut off, last, %"]
    head += [
        "vetoed, %",
        "kept, %",
        "taught, %",
        "KV saved, %",
        "peak KV, GiB",
        "s per step: rollouts",
        "score",
        "update",
        "all",
    ]
    body = []
    for run in found:
        lengths = run["steps"]["response/length_mean"]
        body.append(
            [
                run["arm"],
                *(f"{lengths[at]:.0f}" for at in (0, -1)),
                f"{sum(generated(run)) / 1e6:.1f}",
                f"{100 * run['steps']['response/truncated'][-1]:.0f}",
                *rollout_cells([run]),
                f"{max(run['steps']['kv/bytes_peak']) / 2**30:.2f}",
                *(seconds(run, part) for part in ("rollout", "score", "update", "step")),
            ]
        )
    return markdown(head, body)


def seeds_table(rows: Sequence[Row], finals: Sequence[Row]) -> str:
    """One row per arm: the last accuracy of every seed, their mean, and what happened to the rollouts."""
    by_arm: dict[str, dict[int, float]] = {}
    for row in finals:
        by_arm.setdefault(row["arm"], {})[row["seed"]] = row["accuracy"]
    if not by_arm:
        return EMPTY
    seeds = sorted({row["seed"] for row in finals})
    body = []
    for arm, last in by_arm.items():
        cells = [f"{100 * last[seed]:.0f}" if seed in last else "" for seed in seeds]
        runs = [run for run in rows if run["arm"] == arm]
        body.append([arm, *cells, f"{100 * fmean(last.values()):.0f}", *(rollout_cells(runs) if runs else [""] * 4)])
    return markdown(["arm", *(f"seed {seed}, %" for seed in seeds), "mean", *ROLLOUTS], body)


ROLLOUTS = ("vetoed, %", "kept, %", "taught, %", "KV saved, %")


def rollout_cells(runs: Sequence[Row]) -> list[str]:
    """What happened to the rollouts, mean over steps and runs."""
    names = ("mismatch/veto_rate", "mismatch/rejected", "policy/taught", "kv/saved")
    vetoed, rejected, taught, saved = (fmean(judge.over_run(run, name) for run in runs) for name in names)
    return [f"{100 * share:.0f}" for share in (vetoed, 1 - rejected, taught, saved)]


def seconds(run: Row, part: str) -> str:
    """Mean after the first step, which compiles; nothing where the run had the device with others."""
    return "" if run["shared"] else f"{fmean(run['steps'][f'time/{part}'][1:]):.1f}"


def generated(run: Row) -> list[float]:
    """Tokens of each step's rollouts."""
    return [rate * time for rate, time in zip(run["steps"]["speed/tokens_per_s"], run["steps"]["time/rollout"])]


def calibration_table(rows: Sequence[Row]) -> str:
    """One row per budget: the tail in every length bin, of the first seed."""
    first = [row for row in rows if row["seed"] == 0]
    if not first:
        return EMPTY
    width, bins = first[0]["width"], len(first[0]["tails"])
    head = ["budget", *(f"{i * width}–{(i + 1) * width}" for i in range(bins))]
    body = [[str(row["budget"]), *(tail_cell(tail) for tail in row["tails"])] for row in first]
    return markdown(head, sorted(body, key=lambda cells: int(cells[0])))


def tail_cell(tail: float | None) -> str:
    return "" if tail is None else f"{tail:.3f}"


def sparrow_table(rows: Sequence[Row]) -> str:
    """One row per arm and seed: budgets, KV read, worst tail and vetoes of its own rollouts, outcome."""
    if not rows:
        return EMPTY
    head = ["arm", "seed", "budgets", "KV read, %", "worst tail, start", "end", "vetoed, %, start", "end"]
    head += ["sparse accuracy, %, start", "dense accuracy, %, start", "end", "outcome"]
    body = []
    for run in rows:
        begin, end = (run["own"][when] for when in ("start", "end"))
        budgets = run["budgets"]
        body.append(
            [
                run["arm"],
                str(run["seed"]),
                " ".join(map(str, budgets)) or "all",
                f"{100 * run['read']:.0f}",
                *(tail_cell(worst(own)) if own and budgets else "" for own in (begin, end)),
                *(f"{100 * own['vetoed_rollouts']:.0f}" if own and budgets else "" for own in (begin, end)),
                f"{100 * begin['accuracy']:.0f}" if begin else "",
                f"{100 * judge.start(run):.0f}" if run["evals"] else "",
                f"{100 * judge.final(run):.0f}" if run["state"] == "finished" else "",
                judge.outcome(run) if run["state"] == "finished" else run["state"],
            ]
        )
    return markdown(head, body)


PREDICTORS: dict[str, Callable[[Row], float]] = {
    "worst tail": lambda run: worst(run["own"]["start"]),
    "share of rollouts not vetoed": lambda run: -run["own"]["start"]["vetoed_rollouts"],
    "KV read": lambda run: run["read"],
}
"""Known before the first step; each should grow with the last accuracy."""


def orders_table(rows: Sequence[Row]) -> str:
    """How well each predictor orders the last accuracies of a seed's sparse runs: Spearman's rank correlation."""
    runs = [run for run in rows if run["budgets"] and run["own"]["start"] and run["state"] == "finished"]
    seeds = sorted({run["seed"] for run in runs})
    distinct = {(run["seed"], *run["budgets"]): run for run in runs}.values()
    body = [
        [name, *(f"{value:.2f}" for value in orders(predictor, distinct, seeds))]
        for name, predictor in PREDICTORS.items()
    ]
    return markdown(["known before training", *(f"seed {seed}" for seed in seeds)], body) if runs else EMPTY


SAID: dict[str, Callable[[Row], float]] = {
    "share of rollouts not vetoed": lambda run: -run["said"]["vetoed"],
    "share of dense rollouts not lost": lambda run: -run["said"]["lost"],
    "tail, own rollouts": lambda run: run["said"]["tail"],
    "tail, dense text": lambda run: run["said"]["tail_text"],
    "mean acceptance": lambda run: run["said"]["acceptance"],
}
"""What a leaderboard says of a policy; each should grow with the last accuracy."""


def foretold_table(rows: Sequence[Row]) -> str:
    """One row per method: what the leaderboard says of it for every seed, and the last accuracies."""
    by_method: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_method.setdefault(row["arm"], {})[row["seed"]] = row
    if not by_method:
        return EMPTY
    seeds = sorted({row["seed"] for row in rows})
    body = []
    for method, found in by_method.items():
        runs = [found[seed] for seed in seeds if seed in found]
        said = [
            ", ".join(f"{100 * run['said'][name]:.0f}" for run in runs)
            for name in ("vetoed", "lost", "tail", "tail_text")
        ]
        last = [f"{100 * judge.final(run):.0f}" if run["evals"] else "" for run in runs]
        body.append([method, runs[0]["sparsity"].split(",")[0].partition(":")[2], *said, ", ".join(last)])
    head = ["method", "tokens", "vetoed, %", "dense text lost, %", "tail, own, %", "tail, dense text, %"]
    return markdown([*head, "last accuracy, %"], body)


def foretold_orders_table(rows: Sequence[Row]) -> str:
    """How well each thing that the leaderboard says orders the last accuracies of a model: Spearman's rank
    correlation."""
    runs = [row for row in rows if row["state"] == "finished"]
    seeds = sorted({run["seed"] for run in runs})
    body = []
    for name, predictor in SAID.items():
        found = orders(predictor, runs, seeds)
        body.append([name, *(f"{value:.2f}" for value in (*found, fmean(found)))])
    return markdown(["said before training", *(f"seed {seed}" for seed in seeds), "mean"], body) if runs else EMPTY


def orders(predictor: Callable[[Row], float], runs: Iterable[Row], seeds: Sequence[int]) -> list[float]:
    """Spearman's rank correlation of the predictor with the last accuracies, for each seed."""
    known = [(run["seed"], predictor(run), judge.final(run)) for run in runs]
    return [spearman([(said, last) for own, said, last in known if own == seed]) for seed in seeds]


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Correlation of the ranks; equal values share their mean rank."""
    ranks = [[fmean([i for i, v in enumerate(sorted(values)) if v == x]) for x in values] for values in zip(*pairs)]
    return correlation(*ranks)


def worst(own: Row) -> float:
    """The lowest tail of a bin that enough prompts reach."""
    return min(tail for tail in own["tails"] if tail is not None)
