"""Time and memory at equal accuracy on a long bed: dense, uncorrected and corrected sparse rollouts.

    python experiments/long_arms.py --bed search --method rkv --budget 384 --arms 'dense|strict|sparse-rl' --out OUT
    python experiments/long_arms.py --bed search --method rkv --budget 384 --jobs 2 --finals --out OUT
    python experiments/long_arms.py --bed search --method rkv --budget 384 --work TIMED --out TIMED \
        steps=3 sampling.prompts=64 eval.every=0 engine.kv_memory=80GiB                      # timed at 512 rows

Five arms per seed: `strict`, `sparse-rl` and naive with one compressor and budget; dense; and dense with as many
prompts per step as `strict` kept rollouts, which runs after `strict`. They run one after the other, alone on the
device, so that their seconds can be compared; `--jobs` runs several side by side, for accuracy only. `--finals` asks
the start and every finished arm all held-out problems, one answer each. A stopped command goes on where it was. --out
receives `equal-accuracy/<bed>.jsonl`, one line per arm and seed, and `finals/<bed>.jsonl`, one line per model; lines of
other arms stay there. Arms of other warm-ups belong elsewhere: `--question NAME` writes `NAME/<bed>.jsonl` and
`NAME/finals/<bed>.jsonl`.
"""

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import command
import judge
import probe
from arms import DENSE, Arm
from beds import prepared
from lines import merge_lines, read_lines
from long_beds import LONG_BEDS, LongBed
from raw import raw_run, write_raw
from run import Run, in_a_child, run_all
from settings import recipe_settings

from alula.sparsity.policy import Sparsity

SPARSE = ("strict", "sparse-rl", "naive")
QUESTION = "equal-accuracy"


def sparse_arms(
    bed: LongBed, method: str, budget: int, corrections: Sequence[str] = SPARSE, held: int | None = None
) -> list[Arm]:
    """One arm per correction. With `held` a controller raises the budget while more than `held` % of the rollouts are
    vetoed."""
    policy = bed.selector(budget) if method in ("block-topk", "quest") else bed.evictor(method, budget)
    policy = policy.replace("block-topk", method)
    arms = [Arm(f"{method} {budget}, {name}", policy, name) for name in corrections]
    if held is None:
        return arms
    control = f"control={{enabled: true, on_violation: adapt, vetoed: {held / 100}}}"
    return [extended(arm, f"held at {held} %", control, f"held-{held}") for arm in arms]


def extended(arm: Arm, label: str, setting: str, tag: str) -> Arm:
    """The same arm with one setting more."""
    tags = "-".join(filter(None, [arm.tag, tag]))
    return replace(arm, label=f"{arm.label}, {label}", extra=(*arm.extra, setting), tag=tags)


def in_8_bits(arm: Arm, kv_dtype: str) -> Arm:
    """The same arm, its rollouts with KV in 8 bits."""
    return extended(arm, kv_dtype, f"engine.kv_dtype={kv_dtype}", kv_dtype)


def with_prompts(arm: Arm, prompts: int) -> Arm:
    """The same arm with another number of prompts per step."""
    return extended(arm, f"{prompts} prompts", f"sampling.prompts={prompts}", f"{prompts}-prompts")


def dense_arm(rate: float | None) -> Arm:
    """Dense with a learning rate of its own."""
    return Arm(DENSE.label, DENSE.sparsity, DENSE.correction, () if rate is None else (f"learner.lr={rate}",))


def corrected(dense: Arm, correction: str) -> Arm:
    """The dense arm with a correction, which its rollouts need where they are not the learner's policy."""
    if correction == dense.correction:
        return dense
    return replace(dense, label=f"{dense.label}, {correction}", correction=correction)


def fewer(bed: LongBed, runs: Sequence[Run], dense: Arm, prompts: int) -> Arm | None:
    """The control of `strict`: dense with the prompts per step that it kept on average; None before it has ended."""
    strict = next((run for run in runs if run.arm.correction == "strict"), None)
    row = raw_run(bed, strict.arm, strict.seed, strict.work, ()) if strict else None
    if row is None or row["state"] != "finished":
        return None
    kept = max(1, round(prompts * (1 - judge.over_run(row, "mismatch/rejected"))))
    extra = (*dense.extra, f"sampling.prompts={kept}")
    return Arm("dense, as many as strict keeps", dense.sparsity, dense.correction, extra, "fewer")


def final_answers(bed: LongBed, seed: int, work: Path, runs: list[Run]) -> None:
    """`finals.jsonl`: which held-out problems the start and every finished arm solve, densely, in the data's order."""
    path = work / "finals.jsonl"
    done = {(row["arm"], row["seed"]) for row in read_lines(path)}
    models = {"start": prepared(bed, seed, work, probe.print_step) / "model"}
    models |= {run.arm.label: run.folder / "model" for run in runs if run.finished}
    measured: probe.Probe | None = None
    for arm, model in models.items():
        if (arm, seed) in done:
            continue
        measured = measured or probe.Probe(bed, seed, work, bed.held(seed), answers=1, widen=2)
        measured.take(model)
        rollouts = sorted(measured.generate(Sparsity()), key=lambda rollout: rollout.prompt_index)
        texts = [rollout.text or "" for rollout in rollouts]
        right = bed.grade(texts, [problem.record() for problem in measured.problems])
        row = {
            "bed": bed.name,
            "arm": arm,
            "seed": seed,
            "accuracy": fmean(right),
            "length": fmean(map(len, rollouts)),
            "right": "".join("1" if value else "0" for value in right),
        }
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{arm}: accuracy {row['accuracy']:.3f}, {row['length']:.0f} tokens", flush=True)


def main() -> None:
    parser = command.trainer(__doc__)
    parser.add_argument("--bed", choices=LONG_BEDS, required=True)
    parser.add_argument("--method", required=True, help="the compressor that the gates chose")
    parser.add_argument("--budget", type=int, required=True, help="its budget in KV tokens")
    parser.add_argument("--dense-lr", type=float, help="learning rate of the dense arms; by default the recipe's")
    parser.add_argument("--corrections", default=",".join(SPARSE), help="of the sparse arms, separated by commas")
    parser.add_argument("--held", type=int, help="a controller holds this per cent of vetoed rollouts, in sparse arms")
    parser.add_argument("--kv-dtype", choices=("int8", "fp8"), help="of sparse arms, and of dense once more")
    parser.add_argument("--dense-correction", default=DENSE.correction, help="of the dense arm with KV in 8 bits")
    parser.add_argument("--prompts", type=int, help="prompts per step, in all arms; by default the recipe's")
    parser.add_argument("--arms", default="", help="only arms whose name or label this regular expression finds")
    parser.add_argument("--finals", action="store_true", help="ask all held-out problems at the end")
    parser.add_argument("--question", default=QUESTION, help="folder of the results")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of every run")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    bed, work, extra = LONG_BEDS[options.bed], options.work / options.bed, tuple(options.settings)
    (work / "logs").mkdir(parents=True, exist_ok=True)
    given = dict(setting.partition("=")[::2] for setting in extra)
    prompts = options.prompts or int(given.get("sampling.prompts", recipe_settings(bed)["sampling"]["prompts"]))
    begun: list[Run] = []
    for seed in range(options.seeds):
        in_a_child(prepared, bed, seed, work, probe.print_step)
        dense = dense_arm(options.dense_lr)
        sparse = sparse_arms(bed, options.method, options.budget, options.corrections.split(","), options.held)
        if options.kv_dtype:
            sparse = [in_8_bits(arm, options.kv_dtype) for arm in (*sparse, corrected(dense, options.dense_correction))]
        arms = (*sparse, dense)
        if options.prompts:
            arms = tuple(with_prompts(arm, options.prompts) for arm in arms)
        runs = [Run(bed, arm, seed, work, extra) for arm in arms]
        for _ in range(2):  # the control needs a finished `strict`
            control = fewer(bed, runs, dense, prompts)
            found = [*runs, Run(bed, control, seed, work, extra)] if control else runs
            asked = [run for run in found if run.arm.matches(options.arms)]
            run_all(asked, options.jobs, deadline)
        begun += asked
        if options.finals:
            in_a_child(final_answers, bed, seed, work, found)
        ran = [(run.arm, run.seed) for run in begun]
        write_raw(options.question, bed, ran, work, options.out, extra, keep=True)
    if options.finals:
        folder = options.out if options.question == QUESTION else options.out / options.question
        merge_lines(folder / "finals" / f"{bed.name}.jsonl", read_lines(work / "finals.jsonl"))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
