"""What some policies do to the warmed-up models of a long bed, before any training.

    python experiments/policies.py --bed search-tiny --seeds 3 --question rkv-window rkv:48+4,window=4,sinks=8 ...

For each policy, on its own rollouts: accuracy, KV and vetoes. --out receives `<question>/<bed>.jsonl`, one line per
policy and seed. A stopped command goes on with the next seed.
"""

import argparse
from pathlib import Path

from beds import prepared
from lines import read_lines, write_lines
from long_beds import LONG_BEDS
from probe import Probe, print_step
from run import in_a_child


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", choices=LONG_BEDS, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--question", required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("policies", nargs="+", metavar="POLICY")
    options = parser.parse_args()
    bed, work = LONG_BEDS[options.bed], options.work / options.bed
    path = options.out / options.question / f"{bed.name}.jsonl"
    for seed in range(options.seeds):
        rows = read_lines(path)
        done = {row["sparsity"] for row in rows if row["seed"] == seed}
        left = [policy for policy in options.policies if policy not in done]
        if left:
            in_a_child(prepared, bed, seed, work, print_step)
            found = list(Probe(bed, seed, work).measure_together(left))
            for row in found:
                print(f"{row['sparsity']}: accuracy {row['accuracy']}, vetoed {row['vetoed_rollouts']}", flush=True)
            write_lines(path, [*rows, *found])


if __name__ == "__main__":
    main()
