"""Every section of docs/benchmarks.md again, the oldest first: `python benchmarks/retake.py --data-dir DATA`.

Each section runs in a process of its own. Only one that ends without an error replaces the old section; its seconds are
written down, and `--seconds` leaves out what would take longer than is left. The rows of any other stay in a temporary
file, whose name is printed. Tables are written at the end, after Ctrl-C as well.
ALULA_SMOLLM2 names SmolLM2-135M-Instruct's GGUF file, DATA holds `gsm8k/`. `vllm.py` compares with vLLM.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import table
from sections import merge

HERE = Path(__file__).parent
SCRIPTS = {"engine": "engine.py", "open-engine": "open_engine.py", "training": "training.py", "sparrow": "sparrow.py"}
SCRIPTS |= {"distill": "distill.py"}
NEED_DATA = ("training", "distill")
OTHER_PAGES = {"distill": ("select", "evict", "speed", "overhead_32k")}
"""Sections that other pages show, or that need other options."""


@dataclass(frozen=True)
class Section:
    file: str
    name: str
    taken: str
    """ISO date; empty if never."""
    seconds: float
    """How long it took then; 0 if not known."""

    @property
    def results(self) -> Path:
        return results_of(self.file)


def results_of(file: str) -> Path:
    return table.RESULTS / f"{file}-h200.json"


def sections() -> list[Section]:
    """The oldest first; of the same age, the quickest, and those of unknown length after them."""
    found = []
    for file in SCRIPTS:
        for name, section in json.loads(results_of(file).read_text()).items():
            if name not in OTHER_PAGES.get(file, ()):
                found.append(Section(file, name, section.get("taken", ""), section.get("seconds", 0)))
    return sorted(found, key=lambda section: (section.taken, section.seconds or float("inf")))


def retake(section: Section, options: Sequence[str], limit: float) -> str:
    """Run a section; how it ended, in a few words."""
    out, start, problem = Path(tempfile.mkdtemp(prefix="retake-"), "rows.json"), time.perf_counter(), ""
    command = [sys.executable, str(HERE / SCRIPTS[section.file]), "--only", section.name, "--out", str(out)]
    try:
        subprocess.run([*command, *options], timeout=limit, check=True)
    except subprocess.TimeoutExpired:
        problem = f"stopped after {limit:.0f} s"
    except subprocess.CalledProcessError as error:
        problem = f"failed with status {error.returncode}"
    if not out.exists():  # a section without its model measures nothing, and says so
        return problem or "failed: it has no rows"
    seconds, new = time.perf_counter() - start, json.loads(out.read_text())[section.name]
    rows = new.pop("rows")
    problem = problem or next((f"failed: {row['error']}" for row in rows if "error" in row), "")
    if problem:
        return f"{problem}; its rows are in {out}"
    merge(section.results, section.name, {**new, "seconds": round(seconds), "rows": rows})
    shutil.rmtree(out.parent)
    return f"taken in {seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder with gsm8k/; by default the Hugging Face hub's")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop in this time")
    parser.add_argument("--only", default="", help="as engine:pool,training:small; by default all")
    parser.add_argument("--list", action="store_true", help="only say what would run, with its age")
    given = parser.parse_args()
    only, deadline = set(filter(None, given.only.split(","))), time.perf_counter() + given.seconds
    chosen = [section for section in sections() if not only or f"{section.file}:{section.name}" in only]
    if unknown := only - {f"{section.file}:{section.name}" for section in chosen}:
        names = ", ".join(f"{section.file}:{section.name}" for section in sections())
        raise SystemExit(f"--only {', '.join(sorted(unknown))}: the sections are {names}")
    if given.list:
        for section in chosen:
            print(f"{section.file}:{section.name}: taken {section.taken}, {section.seconds or '?'} s")
        return
    if not Path(os.environ.get("ALULA_SMOLLM2", "")).is_file():
        print("ALULA_SMOLLM2 names no file: sections with a real model will fail", flush=True)
    try:
        for section in chosen:
            left = deadline - time.perf_counter()
            options = ["--data-dir", given.data_dir] if given.data_dir and section.file in NEED_DATA else []
            outcome = "left out: no time" if section.seconds > left or left <= 0 else retake(section, options, left)
            print(f"{section.file}:{section.name}: {outcome}", flush=True)
    finally:
        page = HERE.parent / "docs" / "benchmarks.md"
        page.write_text(table.filled(page.read_text()))


if __name__ == "__main__":
    main()
