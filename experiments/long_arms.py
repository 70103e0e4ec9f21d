"""Time and memory at equal accuracy on a long bed: dense, uncorrected and corrected sparse rollouts.

    python experiments/long_arms.py --bed search --method rkv --budget 384 --seeds 1 --seconds 1500 --out OUT
    python experiments/long_arms.py --bed search --method rkv --budget 384 --work TIMED --out TIMED \
        steps=3 sampling.prompts=64 eval.every=0 engine.kv_memory=80GiB                      # timed at 512 rows

Five arms per seed: `strict`, `sparse-rl` and naive with one compressor and budget; dense; and dense with as many
prompts per step as `strict` kept rollouts, which runs after `strict`. They run one after the other, alone on the
device, so that their seconds can be compared; `--jobs` runs several side by side, for accuracy only. A stopped command
goes on where it was. --out receives `equal-accuracy/<bed>.jsonl`, one line per arm and seed.
"""

import argparse
import signal
import time
from pathlib import Path

import judge
import probe
from arms import DENSE, Arm
from beds import prepared
from long_beds import LONG_BEDS, LongBed
from raw import raw_run, write_raw
from run import Run, in_a_child, run_all
from settings import recipe_settings

SPARSE = ("strict", "sparse-rl", "naive")


def sparse_arms(bed: LongBed, method: str, budget: int) -> list[Arm]:
    policy = bed.selector(budget) if method in ("block-topk", "quest") else bed.evictor(method, budget)
    policy = policy.replace("block-topk", method)
    return [Arm(f"{method} {name}", policy, name) for name in SPARSE]


def dense_arm(rate: float | None) -> Arm:
    """Dense with a learning rate of its own."""
    return Arm(DENSE.label, DENSE.sparsity, DENSE.correction, () if rate is None else (f"learner.lr={rate}",))


def fewer(bed: LongBed, strict: Run, dense: Arm, prompts: int) -> Arm | None:
    """The control of `strict`: dense with the prompts per step that it kept on average; None before it has ended."""
    row = raw_run(bed, strict.arm, strict.seed, strict.work, ())
    if row is None or not strict.finished:
        return None
    kept = max(1, round(prompts * (1 - judge.over_run(row, "mismatch/rejected"))))
    extra = (*dense.extra, f"sampling.prompts={kept}")
    return Arm("dense, as many as strict keeps", dense.sparsity, dense.correction, extra, "fewer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", choices=LONG_BEDS, required=True)
    parser.add_argument("--method", required=True, help="the compressor that the gates chose")
    parser.add_argument("--budget", type=int, required=True, help="its budget in KV tokens")
    parser.add_argument("--dense-lr", type=float, help="learning rate of the dense arms; by default the recipe's")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of every run")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    bed, work, extra = LONG_BEDS[options.bed], options.work / options.bed, tuple(options.settings)
    (work / "logs").mkdir(parents=True, exist_ok=True)
    given = dict(setting.partition("=")[::2] for setting in extra)
    prompts = int(given.get("sampling.prompts", recipe_settings(bed)["sampling"]["prompts"]))
    begun: list[Run] = []
    for seed in range(options.seeds):
        in_a_child(prepared, bed, seed, work, probe.print_step)
        dense = dense_arm(options.dense_lr)
        runs = [Run(bed, arm, seed, work, extra) for arm in (*sparse_arms(bed, options.method, options.budget), dense)]
        run_all(runs, options.jobs, deadline)
        if control := fewer(bed, runs[0], dense, prompts):
            runs.append(Run(bed, control, seed, work, extra))
            run_all(runs[-1:], 1, deadline)
        begun += runs
        write_raw("equal-accuracy", bed, [(run.arm, run.seed) for run in begun], work, options.out, extra)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
