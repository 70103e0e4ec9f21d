"""Sparrow's own experiment: is training stable if and only if the tail of acceptance is at least τ at every length?

    python experiments/sparrow.py --bed search-tiny --seeds 3 --tau 0.5,0.7,0.85,0.95
    python experiments/sparrow.py --bed search --seeds 1 --tau 0.85,0.9 --seconds 1500 --out OUT   # one GPU

One selector (block-topk); `tis` without rejection, or another `--correction`. Per τ four schedules, and dense:

    a   growing: in every length bin the smallest budget whose tail is at least τ
    b   fixed, reading as much KV as a
    c   fixed: the smallest budget whose worst bin is at least τ
    d   a reversed, moved up or down until it reads as much as a

Tails are calibrated on text of the dense policy (`--text own`: on each budget's own rollouts, as the paper does). Tails
and vetoes of each arm's own rollouts are measured before its first step and after its last. Arms with the same budgets
are one run. A stopped command goes on where it was; `--seconds 0` measures starts and trains nothing. --out receives
`<question>/<bed>.jsonl`, one line per arm and seed, and `calibration/<bed>.jsonl`, one line per budget and seed.
"""

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import command
import probe
from arms import CORRECTIONS, DENSE, Arm
from beds import prepared
from lines import read_lines, write_lines
from long_beds import LONG_BEDS, LongBed
from raw import raw_run, short
from run import Run, in_a_child, run_all

from alula.mismatch.measure import Bins, measure_tails
from alula.mismatch.savings import Savings
from alula.mismatch.tail import Tail
from alula.sparsity.footprint import footprint
from alula.sparsity.policy import Sparsity
from alula.sparsity.schedule import Schedule

ARMS = ("a", "b", "c", "d")
Budgets = tuple[int, ...]
"""One per length bin, or a single one for all bins."""


@dataclass(frozen=True)
class Calibrated:
    """What was measured of a seed's model."""

    bed: LongBed
    tails: dict[int, list[float]]
    """Budget -> tail of every bin that enough prompts reach."""
    lengths: list[tuple[int, int]]
    """Prompt and new tokens of the dense policy's answers."""

    def policy(self, budgets: Budgets) -> Sparsity:
        policy = Sparsity.parse(self.bed.selector(self.bed.read_budgets[0]))
        return policy.with_budget("select", Schedule(budgets, self.bed.bin))

    def read(self, budgets: Budgets) -> float:
        """KV tokens read per selecting layer, as a share of what the dense policy reads."""
        policy = self.policy(budgets)
        uses = [(footprint(policy, prompt, new, 1 + policy.select.dense_layers)) for prompt, new in self.lengths]  # type: ignore[union-attr]
        return sum(use.read.sum() for use in uses) / sum(use.held.sum() for use in uses)

    def smallest(self, passes: Callable[[list[float]], bool]) -> int:
        """The smallest budget whose tails pass; the largest measured where none does."""
        return min((budget for budget, tails in self.tails.items() if passes(tails)), default=max(self.tails))

    def arm(self, name: str, tau: float) -> Budgets:
        bins = len(next(iter(self.tails.values())))
        growing = tuple(accumulate((self.smallest(lambda tails, i=i: tails[i] >= tau) for i in range(bins)), max))  # type: ignore[misc]
        block = Sparsity.parse(self.bed.selector(self.bed.read_budgets[0])).select.block  # type: ignore[union-attr]
        fixed = range(3 * block, max(growing) + block, block)
        if name == "a":
            return growing
        if name == "b":
            return (min(fixed, key=lambda budget: abs(self.read((budget,)) - self.read(growing))),)
        if name == "c":
            return (self.smallest(lambda tails: min(tails) >= tau),)
        shifts = range(-max(growing), max(growing) + block, block)
        moved = {tuple(max(3 * block, budget + shift) for budget in reversed(growing)) for shift in shifts}
        return min(moved, key=lambda budgets: abs(self.read(budgets) - self.read(growing)))


def calibrate(bed: LongBed, seed: int, work: Path, text: str) -> None:
    """`calibration-<text>.jsonl`: the tails of every budget, and the lengths of the dense policy's answers."""
    path = work / f"calibration-{text}.jsonl"
    done = {row["budget"] for row in read_lines(path) if row["seed"] == seed}
    left = [budget for budget in bed.read_budgets if budget not in done]
    if not left:
        return
    measured, bins = probe.Probe(bed, seed, work), length_bins(bed)
    dense = measured.generate(Sparsity())
    policies = [Sparsity.parse(bed.selector(budget)) for budget in left]

    def write(index: int, tail: Tail, savings: Savings) -> None:
        row = {"bed": bed.name, "seed": seed, "text": text, "budget": left[index], "width": bed.bin}
        row |= {"tails": probe.by_bin(tail), "lengths": [(len(r.prompt_ids), len(r)) for r in dense]}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"budget {left[index]}: tails {row['tails']}", flush=True)

    if text == "dense":
        measure_tails(measured.engine, dense, policies, bins, done=write)
        return
    for index, policy in enumerate(policies):
        own = measured.generate(policy)
        measure_tails(measured.engine, own, [policy], bins, done=lambda _, tail, kv, i=index: write(i, tail, kv))  # type: ignore[misc]


def length_bins(bed: LongBed) -> Bins:
    return Bins(width=bed.bin, count=-(-bed.longest // bed.bin))


def calibrated(bed: LongBed, seed: int, work: Path, text: str) -> Calibrated:
    warm = bed.warm_seed(seed)
    rows = [row for row in read_lines(work / f"calibration-{text}.jsonl") if row["seed"] == warm]
    bins = min(sum(tail is not None for tail in row["tails"]) for row in rows)
    return Calibrated(bed, {row["budget"]: row["tails"][:bins] for row in rows}, rows[0]["lengths"])


def planned_arm(found: Calibrated, name: str, tau: float, correction: str, work: Path) -> tuple[Arm, Budgets]:
    """The arm's schedule, written to a file that is named after its budgets."""
    budgets = found.arm(name, tau)
    title = "-".join(map(str, budgets))
    path = work / "schedules" / f"{title}.json"
    path.parent.mkdir(exist_ok=True)
    Schedule(budgets, found.bed.bin, name=title).save(path)
    return Arm(f"τ {tau:g}, {name}", found.bed.selector(str(path)), correction), budgets


def measure_own(bed: LongBed, seed: int, work: Path, runs: Sequence[Run]) -> None:
    """`tails.jsonl`: each arm's policy on its own rollouts, with the warmed-up model and with its last one."""
    path = work / "tails.jsonl"
    done = {(row["name"], row["seed"], row["when"]) for row in read_lines(path)}
    measured: probe.Probe | None = None
    for when in ("start", "end"):
        for name, run in {run.arm.name: run for run in runs}.items():
            if (name, seed, when) in done or (when == "end" and not run.finished):
                continue
            measured = measured or probe.Probe(bed, seed, work)
            start = prepared(bed, seed, work, probe.print_step)
            measured.take((start if when == "start" else run.folder) / "model")
            row = measured.measure(run.arm.sparsity, length_bins(bed))
            found = {"name": name, "seed": seed, "when": when}
            found |= {key: row[key] for key in ("accuracy", "length", "kv_unread", "vetoed_rollouts", "tail", "tails")}
            with path.open("a") as file:
                file.write(json.dumps({key: short(value) for key, value in found.items()}) + "\n")


def write_rows(bed: LongBed, planned: Sequence[tuple[Run, float, Budgets, float]], work: Path, path: Path) -> None:
    """One line per arm and seed: the run, its budgets, and the tails of its own rollouts. A run that has not begun is
    `planned`."""
    tails = {(row["name"], row["seed"], row["when"]): row for row in read_lines(work / "tails.jsonl")}
    lines = []
    for run, tau, budgets, read in planned:
        waiting = {"bed": bed.name, "arm": run.arm.label, "seed": run.seed, "state": "planned", "evals": []}
        row = raw_run(bed, run.arm, run.seed, work, ()) or waiting
        own = {when: tails.get((run.arm.name, run.seed, when)) for when in ("start", "end")}
        lines.append(row | {"tau": tau, "budgets": budgets, "width": bed.bin, "read": short(read), "own": own})
    write_lines(path, lines)


def main() -> None:
    parser = command.trainer(__doc__)
    parser.add_argument("--bed", choices=LONG_BEDS, required=True)
    parser.add_argument("--tau", required=True, help="thresholds, separated by commas")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--correction", choices=CORRECTIONS, default="tis", help="of the sparse arms")
    parser.add_argument("--question", default="sparrow", help="folder of the results")
    parser.add_argument("--text", choices=("dense", "own"), default="dense", help="what tails are calibrated on")
    parser.add_argument("--plan", action="store_true", help="calibrate and print the schedules, train nothing")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    bed, work = LONG_BEDS[options.bed], options.work / options.bed
    planned: list[tuple[Run, float, Budgets, float]] = []
    for seed in range(options.seeds):
        in_a_child(prepared, bed, seed, work, probe.print_step)
        in_a_child(calibrate, bed, bed.warm_seed(seed), work, options.text)
        found = calibrated(bed, seed, work, options.text)
        planned.append((Run(bed, DENSE, seed, work), 1.0, (), 1.0))
        for tau in map(float, options.tau.split(",")):
            for name in options.arms.split(","):
                arm, budgets = planned_arm(found, name, tau, options.correction, work)
                planned.append((Run(bed, arm, seed, work), tau, budgets, found.read(budgets)))
                print(f"seed {seed}, {arm.label}: budgets {budgets}, read {planned[-1][-1]:.3f}", flush=True)
    write_calibration(bed, work, options.text, options.out)
    if options.plan:
        return
    for seed in range(options.seeds):
        runs = [run for run, *_ in planned if run.seed == seed]
        run_all(runs, options.jobs, deadline)
        in_a_child(measure_own, bed, seed, work, runs)
        write_rows(bed, planned, work, options.out / options.question / f"{bed.name}.jsonl")


def write_calibration(bed: LongBed, work: Path, text: str, out: Path) -> None:
    rows = [
        {name: row[name] for name in row if name != "lengths"} for row in read_lines(work / f"calibration-{text}.jsonl")
    ]
    write_lines(out / "calibration" / f"{bed.name}-{text}.jsonl", rows)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
