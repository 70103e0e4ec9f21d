"""What the benchmark scripts share: sections that run alone, results merged into one JSON file."""

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from alula.bench import Ceilings, measure_ceilings

Section = Callable[[Ceilings], list[dict]]


def run(sections: dict[str, Section], description: str | None) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results are merged into this file")
    parser.add_argument("--only", default=",".join(sections), help="sections, separated by commas")
    arguments = parser.parse_args()
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    ceilings = measure_ceilings(torch.device("cuda"))
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
               "copy_bytes_per_s": ceilings.bandwidth, "matrix_flop_per_s": ceilings.matrix}  # fmt: skip
    print(json.dumps(machine), flush=True)
    for name in arguments.only.split(","):
        start = time.perf_counter()
        try:
            rows = sections[name](ceilings)
        except Exception as error:  # one section's failure must not cost the others' results
            rows = [{"error": f"{type(error).__name__}: {error}"}]
            traceback.print_exc(limit=8)
        release()
        results[name] = {"machine": machine, "rows": rows}
        for row in rows:
            print(json.dumps(row), flush=True)
        print(f"[{name}: {time.perf_counter() - start:.0f} s]", flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()
