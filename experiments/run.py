"""Run the arms of one question, several side by side, and write their raw results.

    python experiments/run.py --bed tiny --question collapse --seeds 3
    python experiments/run.py --bed smollm2 --question collapse --seeds 1 --jobs 4 --seconds 500 --out OUT

A run is a folder of `alula train` under --work; a finished one is not repeated, an unfinished one is resumed. When
--seconds are over, running arms are stopped with a checkpoint, and the same command goes on from there. What is
missing, the warm-up and the probe that chooses the budgets, is made first. --out receives one JSON line a run.
"""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from itertools import chain
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import command
import probe
from arms import BY_PROBE, METHODS, PROBED, QUESTIONS, Arm
from beds import BEDS, Bed, TaskBed, prepared
from choice import TAU, below_threshold, chosen_budgets
from raw import write_probe, write_raw

import alula.trainer.trainer  # noqa: F401  imported once, before the forks
from alula.config.load import load_config
from alula.errors import unknown

FORK = multiprocessing.get_context("fork")
"""Every run is a child of its own: nothing of CUDA is touched in the parent."""

ALULA = (sys.executable, "-m", "alula")


@dataclass(frozen=True)
class Run:
    bed: Bed
    arm: Arm
    seed: int
    work: Path
    settings: tuple[str, ...] = ()
    """On top of everything, for trying out."""

    @property
    def folder(self) -> Path:
        return self.work / "runs" / f"{self.arm.name}-s{self.seed}"

    @property
    def log(self) -> Path:
        return self.work / "logs" / f"{self.folder.name}.log"

    @property
    def shared(self) -> Path:
        """There if the run had the device with others: its seconds are not comparable."""
        return self.log.with_suffix(".shared")

    @property
    def finished(self) -> bool:
        status = self.folder / "status.json"
        return status.exists() and json.loads(status.read_text())["state"] == "finished"

    def prepare(self, trainer: Any) -> None:
        """What an experiment changes in the trainer."""

    def __call__(self) -> None:
        import torch

        from alula.trainer.trainer import Trainer

        os.environ["OMP_NUM_THREADS"] = "1"  # several runs share the machine
        torch.set_num_threads(1)
        start, data = prepared(self.bed, self.seed, self.work, probe.print_step), self.work / f"data-{self.seed}"
        settings = [
            f"model.source={start / 'model'}",
            f"data.source={data / 'train.jsonl'}",
            f"seed={self.seed}",
            f"eval.data.source={data / 'held.jsonl'}",
            f"out={self.folder}",
        ]
        config = load_config(self.bed.recipe, [*settings, *self.arm.settings, *self.settings])
        with self.log.open("a") as log:
            try:
                trainer = Trainer(config, resume="auto", stream=log)
                self.prepare(trainer)
                trainer.run()
                if self.finished:  # nobody goes on from it, and beside the model it is most of the folder
                    shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
            except BaseException:
                traceback.print_exc(file=log)
                raise SystemExit(1) from None


def in_a_child(function, *arguments) -> None:  # type: ignore[no-untyped-def]
    child = FORK.Process(target=function, args=arguments)
    child.start()
    try:
        child.join()
    finally:
        child.terminate()
    if child.exitcode:
        raise SystemExit(f"{function.__name__} failed")


def calibrate(bed: TaskBed, seed: int, work: Path, *options: str) -> None:
    """`alula calibrate` with the model that the seed starts from, on its training problems."""
    words = [str(work / f"start-{bed.warm_seed(seed)}" / "model"), "--data", str(work / f"data-{seed}" / "train.jsonl")]
    words += ["--no-chat", "--seed", str(seed), "--length", str(bed.longest), "--prompts", "256"]
    subprocess.run([*ALULA, "calibrate", *words, *options], check=True)


def planned(bed: TaskBed, seed: int, work: Path) -> str:
    """The file of the growing schedule for τ: calibrated on the warmed-up model and the training problems, planned on
    lower confidence bounds."""
    seed = bed.warm_seed(seed)
    path, calibration = work / f"schedule-{seed}.json", work / f"calibration-{seed}.json"
    if not path.exists():
        block, _, rest = bed.select.removeprefix(",block=").partition(",")
        method = ["--methods", f"block-topk:{rest}", "--pages", block]
        budgets = ["--budgets", ",".join(map(str, bed.read_budgets)), "--bin", str(bed.bin)]
        calibrate(bed, seed, work, *method, *budgets, "--tau", str(TAU), "--out", str(calibration))
        subprocess.run([*ALULA, "plan", str(calibration), "--tau", str(TAU), "--out", str(path)], check=True)
    return str(path)


def run_all(runs: list[Run], jobs: int, deadline: float) -> None:
    """`jobs` at a time until all are finished, the time is over or an interrupt comes.

    A run that failed is tried once more after all others: where several share a GPU, it is mostly memory that failed.
    """
    left = [run for run in {run.folder: run for run in runs}.values() if not run.finished]
    busy: list[tuple[Run, BaseProcess, float]] = []
    failed: set[Path] = set()
    asked = False
    for run in left:
        run.log.parent.mkdir(parents=True, exist_ok=True)
    while left or busy:
        while left and len(busy) < jobs and time.perf_counter() < deadline:
            run = left.pop(0)
            if jobs > 1:
                run.shared.touch()
            child = FORK.Process(target=run)
            child.start()
            busy.append((run, child, time.perf_counter()))
        try:
            time.sleep(0.2)
        except KeyboardInterrupt:
            deadline = 0.0
        if time.perf_counter() > deadline:
            left.clear()
            for _, child, _ in [] if asked else busy:
                child.terminate()  # SIGTERM: the trainer writes a checkpoint and ends
            asked = True
        for entry in [entry for entry in busy if not entry[1].is_alive()]:
            run, child, start = entry
            busy.remove(entry)
            state = f"failed, see {run.log}" if child.exitcode else "done" if run.finished else "stopped"
            if child.exitcode and run.folder not in failed:
                failed.add(run.folder)
                left.append(run)
            print(f"{run.folder.name}: {state}, {time.perf_counter() - start:.0f} s", flush=True)


def refuse(bed: Bed, questions: list[str], methods: list[str]) -> None:
    """What cannot be asked, before anything is made for it."""
    for method in methods:
        if method not in METHODS:
            raise SystemExit(str(unknown("compressor in --methods", method, METHODS)))
    for question in questions:
        if question not in QUESTIONS:
            raise SystemExit(str(unknown("--question", question, QUESTIONS)))
        if question in BY_PROBE and not isinstance(bed, TaskBed):
            raise SystemExit(f"--question {question}: needs a probe of its budgets, which --bed {bed.name} has not")
        if question != "compressors" and "rkv" not in methods:
            raise SystemExit(
                f"--methods {','.join(methods)}: --question {question} is about rkv; add rkv, or ask "
                "--question compressors, which compares the others."
            )


def main() -> None:
    parser = command.trainer(__doc__, seeds=3)
    parser.add_argument("--bed", choices=BEDS, required=True)
    parser.add_argument("--question", required=True, help=f"of {', '.join(QUESTIONS)}; several with commas")
    parser.add_argument("--arms", default="", help="only arms whose name or label this regular expression finds")
    parser.add_argument("--methods", help="only these compressors, separated by commas; the others are not probed")
    parser.add_argument("--budget", type=int, help="of the evictors, in place of the probe's choice")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of every run, for trying out")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    bed, work = BEDS[options.bed], options.work / options.bed
    methods = options.methods.split(",") if options.methods else list(METHODS)
    asked = options.question.split(",")
    refuse(bed, asked, methods)
    for seed in range(options.seeds):
        in_a_child(prepared, bed, seed, work, probe.print_step)
    questions: dict[str, list[Run]] = {}
    for question in asked:
        if options.budget is None and isinstance(bed, TaskBed):
            probed = [method for method in PROBED.get(question, ("rkv",)) if method in methods]
            for seed in range(options.seeds if bed.warm_seeds else 1):
                in_a_child(probe.run, bed, seed, work, probe.grid(bed, probed))
        questions[question] = []
        for seed in range(options.seeds):
            budgets: dict[str, Any] = chosen_budgets(bed, seed, work, options.budget)
            if question == "transfer":
                assert isinstance(bed, TaskBed)
                budgets = {"rkv": below_threshold(bed, seed, work), "schedule": planned(bed, seed, work)}
                in_a_child(probe.run, bed, bed.warm_seed(seed), work, [bed.selector(budgets["schedule"])])
            budgets = {m: b for m, b in budgets.items() if m in (*methods, "schedule")}
            print(f"{question}, seed {seed}: budgets {budgets}", flush=True)
            arms = QUESTIONS[question](bed, budgets)
            questions[question] += [Run(bed, arm, seed, work, tuple(options.settings)) for arm in arms]
        questions[question] = [run for run in questions[question] if run.arm.matches(options.arms)]
    # One queue, a whole seed of every question before the next: a stop in time leaves seeds that can be compared.
    run_all(sorted(chain.from_iterable(questions.values()), key=lambda run: run.seed), options.jobs, deadline)
    if isinstance(bed, TaskBed):
        write_probe(bed, work, options.out)
    for question, runs in questions.items():
        write_raw(question, bed, [(run.arm, run.seed) for run in runs], work, options.out, options.settings)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
