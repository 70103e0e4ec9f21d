"""What the benchmark scripts share: sections that run alone, results merged into one JSON file after every row."""

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import date
from functools import partial
from pathlib import Path

import torch

from alula.bench.ceilings import Ceilings, measure_ceilings
from alula.files import write_atomically

Rows = Iterable[dict]


def run(sections: dict[str, Callable[[Ceilings], Rows]], description: str | None) -> None:
    """The command line of a script whose sections compare with what the machine can do."""
    options = arguments(sections, description).parse_args()
    ceilings, machine = measured_machine()
    record({name: partial(section, ceilings) for name, section in sections.items()}, options, machine)


def measured_machine() -> tuple[Ceilings, dict]:
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs an NVIDIA GPU: torch finds none.")
    ceilings = measure_ceilings(torch.device("cuda"))
    release()  # some sections need nearly all of the memory
    return ceilings, {"copy_bytes_per_s": ceilings.bandwidth, "matrix_flop_per_s": ceilings.matrix}


def arguments(sections: Iterable[str], description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results are merged into this file")
    parser.add_argument("--only", default=",".join(sections), help="sections, separated by commas")
    return parser


def record(sections: dict[str, Callable[[], Rows]], options: argparse.Namespace, machine: dict, **about: dict) -> None:
    """Run the sections that `options` name; their rows, with the day, the machine and other facts, go into the file."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    machine = {"device": device, "torch": torch.__version__, **machine}
    facts = {"taken": date.today().isoformat(), "machine": machine, **about}
    print(json.dumps(machine), flush=True)
    names = options.only.split(",")
    if unknown := set(names) - set(sections):
        raise SystemExit(f"--only {', '.join(sorted(unknown))}: the sections are {', '.join(sections)}")
    for name in names:
        start, rows = time.perf_counter(), []
        try:
            for row in sections[name]():
                rows.append(row)
                print(json.dumps({k: v for k, v in row.items() if len(json.dumps(v)) < 1000}), flush=True)
                merge(options.out, name, {**facts, "rows": rows})
        except Exception as error:  # one section's failure must not cost the others' results
            rows.append({"error": f"{type(error).__name__}: {error}"})
            traceback.print_exc(limit=8)
            merge(options.out, name, {**facts, "rows": rows})
        release()
        print(f"[{name}: {time.perf_counter() - start:.0f} s]", flush=True)


def merge(path: Path, name: str, section: dict) -> None:
    """After every row, since a run may be cut off; other sections stay as they are."""
    results = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(results | {name: section}, indent=1) + "\n")


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()
