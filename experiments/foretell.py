"""Does the leaderboard of a warmed-up model predict how training on its policies ends?

    python experiments/foretell.py --bed search-tiny --seeds 3 --jobs 2 --target 64 --options buffer=4:window=24:sinks=8

Per seed, `alula calibrate --leaderboard` measures evictors at equal bytes held, and each of them trains without a
correction. A stopped command goes on where it was. --out receives `foretell/<bed>.jsonl`: one line per policy and seed,
what the leaderboard said of it and its run.
"""

import json
import signal
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import command
import probe
from arms import Arm
from beds import prepared
from lines import write_lines
from long_beds import LONG_BEDS, LongBed
from raw import raw_run, short
from run import Run, calibrate, in_a_child, run_all
from settings import recipe_settings

from alula.mismatch.leaderboard.row import Row

METHODS = "streaming,random,rkv,snapkv,vase-dkv,triattention,keydiff,h2o"


def leaderboard(bed: LongBed, seed: int, work: Path, target: int, methods: str, options: str) -> list[Row]:
    """The rows at equal bytes held, measured on training problems."""
    path = work / f"leaderboard-{seed}.json"
    page = recipe_settings(bed)["engine"]["page"]
    size = ["--pages", str(page), "--budgets", str(target), "--out", str(path)]
    named = ",".join(f"{name}:{options}" for name in methods.split(","))
    calibrate(bed, seed, work, "--leaderboard", "--no-timing", "--methods", named, *size)
    return [Row.from_dict(row) for row in json.loads(path.read_text())["held"]]


def said(row: Row) -> dict[str, Any]:
    """What the leaderboard says of a policy."""
    found = {
        "vetoed": row.own.share(1).value,
        "lost": row.text.share(1).value,
        "tail": row.own.tail[0],
        "tail_text": row.text.tail[0],
        "acceptance": fmean(row.own.acceptance),
        "held": row.kv.held,
    }
    return {name: short(value) for name, value in found.items()}


def main() -> None:
    parser = command.trainer(__doc__)
    parser.add_argument("--bed", choices=LONG_BEDS, required=True)
    parser.add_argument("--target", type=int, required=True, help="KV tokens whose bytes every policy may hold")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--options", required=True, help="of every method, as in `alula calibrate --methods`")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    bed, work = LONG_BEDS[options.bed], options.work / options.bed
    runs: list[tuple[Run, Row]] = []
    for seed in range(options.seeds):
        in_a_child(prepared, bed, seed, work, probe.print_step)
        rows = leaderboard(bed, seed, work, options.target, options.methods, options.options)
        runs += [(Run(bed, Arm(row.family.split(":")[0], row.policy, "naive"), seed, work), row) for row in rows]
    run_all([run for run, _ in runs], options.jobs, deadline)
    lines = [(raw_run(bed, run.arm, run.seed, work, ()), said(row)) for run, row in runs]
    found = [run | {"said": before} for run, before in lines if run is not None]
    write_lines(options.out / "foretell" / f"{bed.name}.jsonl", found)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
