"""What the commands that train arms have in common."""

import argparse
from pathlib import Path


def trainer(description: str | None, seeds: int = 1) -> argparse.ArgumentParser:
    """A parser with --seeds, --jobs, --seconds, --work and --out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then runs are stopped, to be continued")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the raw lines")
    return parser
