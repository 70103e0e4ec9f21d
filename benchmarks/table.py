"""Tables of docs/benchmarks.md, from the raw results: `python benchmarks/table.py docs/benchmarks.md`.

Replaces the text between `<!-- NAME -->` and `<!-- end of NAME -->`; without a file it prints all tables.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from churn import FRESH
from transformers import AutoModelForCausalLM

from alula import Sparsity
from alula.models.geometry import Geometry
from alula.sparsity.footprint import footprint
from alula.trainer.preflight import load_model_config

RESULTS = Path(__file__).with_name("results")
Table = tuple[Sequence[str], list[tuple[str, ...]]]
"""Column titles and rows. A cell holds one number or one short phrase."""


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def rows_of(results: dict) -> dict[str, list[dict]]:
    return {name: section["rows"] for name, section in results.items()}


def policy_name(row: dict) -> str:
    """`rkv 512+128`, `block-topk 1024`: newer results write `:` for the space, older ones the block of 16 as well."""
    return row["sparsity"].replace(":", " ").removesuffix("/16")


def engine(results: dict) -> Table:
    rows = rows_of(results)
    plain = [r for r in rows["steps"] if r["kind"] == "decode step" and r["kv_dtype"] is None]
    steps = {(r["batch"], r["context"], policy_name(r)): r for r in plain}
    kernel, hf, packed = rows["kernel"][0], rows["transformers"][0], rows["prefill"][0]
    dense, sparse = steps[16, 32768, "dense"], steps[16, 32768, "block-topk 1024"]
    pool = {policy_name(r): r for r in rows["pool"]}
    cold = next(r for r in rows["ready"] if r["caches"] == "empty")

    def step(what: str, r: dict, *targets: str) -> tuple[str, ...]:
        return (what, f"{r['ms']:.2f} ms", f"{r['floor_ms']:.2f} ms", percent(r["of_floor"]), *targets)

    def throughput(policy: str, digits: int, *targets: str) -> tuple[str, ...]:
        ours, reference = pool[policy], pool["dense"]
        what = f"{policy}, one 16 GiB pool, ages 0-16k, against dense"
        rates = [f"{r['tokens_per_s']:,.0f} tokens/s" for r in (ours, reference)]
        return (what, *rates, f"{ours['against_dense']:.{digits}f} ×", *targets)

    def alone(what: str, result: str, *targets: str) -> tuple[str, ...]:
        return (what, "", "", result, *targets)

    kv = ", random KV" if kernel.get("kv") == "random" else ""
    lines = [
        step("dense decode step, qwen3-1.7b, 64 × 8k, of floor", steps[64, 8192, "dense"], "72 %", "85 %"),
        step("dense decode step, qwen3-8b, 64 × 8k, of floor", rows["large"][0], "72 %", "85 %"),
        step("dense decode step, qwen3-1.7b, 64 × 1k, of floor", steps[64, 1024, "dense"], "50 %", "65 %"),
        alone(f"paged decode kernel, 64 × 8k{kv}, of copy bandwidth", percent(kernel["of_copy"]), "85 %", "92 %"),
        (
            "64 × (1k + 256) tokens, against transformers `generate` (sdpa)",
            f"{hf['alula_s']:.2f} s",
            f"{hf['transformers_s']:.1f} s",
            f"{hf['ratio']:.1f} ×",
            "4 ×",
            "8 ×",
        ),
        throughput("rkv 2048+128", 2, "3 ×", "3.5 ×"),
        throughput("rkv 512+128", 1, "8 ×", "11 ×"),
        (
            "block-topk step, 64 blocks of 16, two dense layers, 16 × 32k, against dense",
            f"{sparse['ms']:.2f} ms",
            f"{dense['ms']:.2f} ms",
            f"{dense['ms'] / sparse['ms']:.2f} ×",
            "3.5 ×",
            "4.5 ×",
        ),
        alone(
            "time spent evicting, snapkv 512+128", percent(pool["snapkv 512+128"]["evicting_share"], 1), "5 %", "3 %"
        ),
        alone("time spent evicting, rkv 512+128", percent(pool["rkv 512+128"]["evicting_share"], 1), "8 %", "5 %"),
        alone("packed prefill, 64 × 1k, of matrix rate", percent(packed["prefill_of_matrix_rate"]), "40 %", "55 %"),
        alone("`score`, 64 × 1k, of matrix rate", percent(packed["score_of_matrix_rate"]), "40 %", "55 %"),
        alone("compile and capture, empty caches", f"{cold['compile_and_capture_s']:.0f} s", "60 s", "30 s"),
    ]
    for gap in rows["agreement"]:
        what = f"engine against `score`, log-probs, SmolLM2, {gap.get('dtype', 'bfloat16')}"
        lines.append(alone(f"{what}, mean", f"{gap['mean']:.4f}", "0.01", "0.005"))
        lines.append(alone(f"{what}, p99", f"{gap['p99']:.3f}", "", ""))
        lines.append(alone(f"{what}, max", f"{gap['max']:.2f}", "", ""))
    for r in rows["sampler"]:
        what = f"sampler, {r['batch']} × {r['vocabulary']:,}, against reading the logits once"
        result = f"{r['us'] / r['floor_us']:.1f} ×"
        target = "100 µs" if (r["batch"], r["vocabulary"]) == (256, 151936) else ""
        lines.append((what, f"{r['us']:.0f} µs", f"{r['floor_us']:.0f} µs", result, target, ""))
    return ("measurement", "Alula", "reference", "result", "target", "stretch"), lines


def residual(results: dict) -> Table:
    lines = [
        (r["what"], r["model"], f"{r['without_ms']:.2f}", f"{r['with_ms']:.2f}", f"{100 * r['slower']:+.1f} %")
        for r in results["residual"]["rows"]
    ]
    return ("float32 residual stream", "model", "without, ms", "with, ms", "change"), lines


STEPS = {
    "gsm8k": ("SmolLM2-135M on GSM8K", "2.5", "1.5"),
    "small": ("SmolLM2-135M", "2.5", "1.5"),
    "paper": ("qwen2.5-1.5b", "", "240"),
}


def training_steps(results: dict) -> Table:
    phases = ("rollout", "reward", "mismatch", "score", "update")
    lines = [
        (
            model,
            policy_name(r),
            f"{r['rollouts']:,}",
            f"{r['mean_length']:.0f}",
            *(f"{r[f'{phase}_s']:.2f}" if f"{phase}_s" in r else "" for phase in phases),
            f"{r['step_s']:.2f}",
            *targets,
            percent(r["kv_saved"]),
            f"{r['kv_peak_gib']:.1f}",
        )
        for name, (model, *targets) in STEPS.items()
        for r in results[name]["rows"]
    ]
    head = ("model", "policy", "rollouts", "mean tokens", *(f"{phase}, s" for phase in phases))
    return (*head, "step, s", "target, s", "stretch, s", "KV saved", "peak KV, GiB"), lines


def checked(results: dict) -> Table:
    """Steps as `alula train --check` estimates them."""
    lines = []
    rows = results["check"]["rows"]
    for r in rows:
        estimate = r["estimate"]
        parts = [f"{r[name]:.1f} / {estimate[name]:.1f}" for name in ("rollout_s", "update_s", "step_s")]
        ratio = f"{rows[0]['step_s'] / r['step_s']:.2f} × / {rows[0]['estimate']['step_s'] / estimate['step_s']:.2f} ×"
        lines.append((policy_name(r), *parts, ratio if r is not rows[0] else ""))
    return ("policy", "rollouts, s", "update, s", "step, s", "sparse against dense"), lines


def long_steps(results: dict) -> Table | None:
    """Whole steps with long answers; `strict` scores all rollouts, the default those of later updates."""
    if "long" not in results:
        return None
    lines = [
        (
            r["model"],
            policy_name(r),
            f"{r['rollouts']:,}",
            f"{r['mean_length']:,.0f} / {r['most']:,}",
            *(f"{r[f'{part}_s']:.1f}" for part in ("rollout", "decode", "evict", "floor", "score", "update", "step")),
            *(f"{r[f'strict_{part}_s']:.1f}" for part in ("score", "step")),
            percent(r["update_of_matrix_rate"]),
        )
        for r in sorted(results["long"]["rows"], key=lambda row: (row["model"], -row["rollout_s"]))
    ]
    seconds = ("rollout, s", "decode steps, s", "evictions, s", "floor, s", "score, s", "update, s", "step, s")
    seconds += ("score, all rollouts, s", "step, all scored, s")
    return ("model", "policy", "rollouts", "mean / most tokens", *seconds, "update, of matrix rate"), lines


VLLM_ROWS = {
    "decode": "256 × (128 + 1,024)",
    "mixed": "64 × (1,024 + 256)",
    "prompts": "64 × 8,192-token prompts, 1 token each",
    "long": "64 × (8,192 + 256)",
    "tight": "96 × (128 + 8,192), 16 GiB KV pool, dense",
    "tight-rkv-2048": "the same, rkv 2048+128",
    "tight-rkv-512": "the same, rkv 512+128",
}


def against_vllm(results: dict) -> Table:
    """Seconds of each row with both engines; a decode step is what 255 more tokens take after the same prompts."""
    seconds = {
        name: {r["engine"]: r["seconds"] for r in results[name]["rows"]} for name in VLLM_ROWS if name in results
    }
    both = [seconds[name] for name in ("prompts", "long") if name in seconds]
    named = {VLLM_ROWS[name]: engines for name, engines in seconds.items()}
    if len(both) == 2:
        steps = {engine: (both[1][engine] - both[0][engine]) / 255 for engine in both[0] if engine in both[1]}
        named["decode step at 64 × 8k, ms"] = {engine: 1e3 * each for engine, each in steps.items()}
    lines = []
    for what, engines in named.items():
        unit = "ms" if what.endswith("ms") else "s"
        ours, theirs = engines.get("alula"), engines.get("vllm")
        ratio = f"{theirs / ours:.2f} ×" if ours and theirs else ""
        cells = [f"{value:.2f} {unit}" if value else "" for value in (ours, theirs)]
        lines.append((what.removesuffix(", ms"), *cells, ratio))
    return ("work, qwen3-1.7b", "Alula", "vLLM", "Alula is faster by"), lines


REACH = {"qwen3-1.7b": ("2.3 ×", "2.8 ×"), "qwen3-4b": ("2.0 ×", "2.4 ×"), "qwen3-8b": ("1.75 ×", "2.1 ×")}


def decoding(results: dict) -> Table:
    """Mean steps over 16 bins, in ms, and their ratio."""
    lines = []
    for r in results["decode"]["rows"]:
        means = [f"{r[f'{name}_ms'] / len(r['bins']):.2f}" for name in ("dense", "sparse", "sparse_floor")]
        ratios = f"{r['ratio']:.2f} ×", f"{r['floor_ratio']:.2f} ×"
        lines.append((r["model"], str(r["batch"]), *means, *ratios, *REACH[r["model"]]))
    means = ("dense, ms", "sparse, ms", "its floor, ms")
    return ("model", "batch", *means, "against dense", "floors allow", "target", "stretch"), lines


def steady(results: dict) -> Table:
    rows, bandwidth = results["both"]["rows"], results["both"]["machine"]["copy_bytes_per_s"]
    floors = [steady_floor(r, bandwidth) for r in rows]
    dense = rows[0]["mean_rows"] / floors[0]
    lines = []
    for r, floor in list(zip(rows, floors))[1:]:
        step, allowed = r["step_ms"] * (1 - r["evicting_share"]), r["mean_rows"] / floor / dense
        evicting = f"{r['step_ms'] - step:.2f}" if r["evictions"] else ""
        times = (f"{step:.2f}", evicting, f"{1e3 * floor:.2f}")
        lines.append(
            (r["policy"], f"{r['mean_rows']:.0f}", *times, f"{r['against_dense']:.2f} ×", f"{allowed:.2f} ×", "4 ×")
        )
    titles = ("decode step, ms", "its evictions, ms", "floor of both, ms", "against dense", "floors allow", "stretch")
    return ("policy", "rows", *titles), lines


def steady_floor(row: dict, bandwidth: float) -> float:
    """Seconds to read the weights once, and for rows of every age KV, page summaries and what evictions move."""
    geometry = geometry_of(row["model"])
    use = footprint(Sparsity.parse(row["sparsity"]), FRESH, row["longest"] - FRESH, geometry.layers)
    tokens = (use.read.mean() + use.moved.mean()) * geometry.kv_token_bytes
    summaries = use.scored.mean() * geometry.layers * geometry.kv_heads * geometry.vector_bytes
    return (geometry.parameters * geometry.value_bytes + row["mean_rows"] * (tokens + summaries)) / bandwidth


@cache
def geometry_of(model: str) -> Geometry:
    with torch.device("meta"):
        return Geometry.of(AutoModelForCausalLM.from_config(load_model_config(model), dtype=torch.bfloat16))


def sparrow(results: dict) -> Table:
    rows = rows_of(results)
    cost = rows["cost"][0]
    lines = [
        ("scoring and top-k, share of the sparse step at 32k", percent(rows["share"][0]["share"], 1), "20 %", "10 %"),
        ("cost model on held-out steps, median error", percent(cost["median_error"], 1), "10 %", "5 %"),
        ("analytic cost model, median error", percent(cost["analytic_error"]), "", ""),
    ]
    for r in rows["calibration"]:
        what = f"calibration, SmolLM2-135M, 8 budgets, 2k tokens, 64 prompts, {r['run']} run"
        lines.append((what, f"{r['seconds']:.0f} s", "60 s", "20 s"))
    return ("measurement", "result", "target", "stretch"), lines


def plans(results: dict) -> str:
    """Planned schedules, measured on new rollouts from other prompts."""
    parts = []
    for row in results["real"]["rows"]:
        if row["kind"] == "plan":
            outcome = row.get("table")
            if outcome is None:
                reason = row["out_of_reach"].partition(": ")[2].partition(";")[0]
                outcome = f"Out of reach: {reason}."
            parts.append(f"`{row['policy']}`, τ = {row['tau']:.3f}:\n\n{outcome}")
    return "\n\n".join(parts)


def agreement(results: dict) -> Table:
    sections = ("agreement", "agreement_float16", "agreement_residual")
    lines = [
        (
            policy_name(r),
            "yes" if r["adapter"] else "no",
            r["dtype"].removeprefix("torch."),
            "float32" if r.get("residual") else "",
            f"{r['mean']:.4f}",
            f"{r['p99']:.3f}",
        )
        for section in sections
        for r in results[section]["rows"]
    ]
    return ("policy", "adapter", "dtype", "residual", "mean", "p99"), lines


def overhead(results: dict) -> Table:
    lines = [
        (policy_name(r), percent(r["fraction"]), percent(r["of_update"]))
        for r in results["overhead"]["rows"]
        if r.get("divergence", "kl") == "kl"
    ]
    return ("policy", "rollouts used", "of a learner update"), lines


def adapter_decode(results: dict) -> Table:
    lines = [
        (policy_name(r), f"{r['without_ms']:.2f}", f"{r['with_ms']:.2f}", f"{100 * r['slower']:+.1f} %")
        for r in results["decode"]["rows"]
        if r["kind"] == "decode"
    ]
    return ("decode step", "without adapter, ms", "with, ms", "change"), lines


def markdown(table: Table) -> str:
    head, rows = table
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def eight_bits(results: dict) -> Table:
    """Steps and rollouts with KV in bfloat16 and in the 8-bit formats that were measured."""
    steps, whole = (results[section]["rows"] for section in ("steps", "rollouts"))
    names = [name for name in ("int8", "fp8") if any(r["kv_dtype"] == name for r in steps)]
    lines = []
    for rows, size, key, unit in ((steps, "context", "ms", "ms"), (whole, "new_tokens", "seconds", "s")):
        by_format = {(r["batch"], r[size], policy_name(r), r["kv_dtype"]): r for r in rows}
        for exact in (r for r in rows if r["kv_dtype"] is None):
            key_of = exact["batch"], exact[size], policy_name(exact)
            narrow = [by_format.get((*key_of, name)) for name in names]
            times = [f"{r[key]:.2f} {unit}, {exact[key] / r[key]:.2f} ×" if r else "" for r in narrow]
            what = "step, {} × {:,}, {}" if rows is steps else "rollouts, {} × (128 + {:,}), {}"
            floors = f"{exact['floor_ms'] / narrow[0]['floor_ms']:.2f} ×" if rows is steps and narrow[0] else ""
            lines.append((what.format(*key_of), f"{exact[key]:.2f} {unit}", *times, floors))
    return ("qwen3-1.7b", "bfloat16", *names, "floors allow"), lines


def draws(results: dict) -> Table:
    lines = [
        (
            policy_name(r),
            r["dtype"],
            f"{r['compared']:,}",
            f"{r['different']:,}",
            f"{r['different'] / r['compared']:.1g}",
        )
        for r in results["draws"]["rows"]
    ]
    return ("policy", "dtype", "draws compared", "different", "rate"), lines


def opened(results: dict) -> Table:
    sessions, prefixes = results["sessions"]["rows"], results["prefixes"]["rows"]
    lines = [
        (
            f"second turn of 64 sessions, {r['history']:,} tokens + {r['given']} given, {policy_name(r)}",
            f"{r['seconds']:.2f} s",
            f"{r['again_seconds']:.2f} s",
            f"{r['speedup']:.1f} ×",
        )
        for r in sessions
    ]
    shared, apart = (next(r for r in prefixes if r.get("shared") is s and not r["warm_up"]) for s in (True, False))
    name = "512 requests in groups of 8, prompts of 1,024, prefixes shared"
    ratio = f"{apart['seconds'] / shared['seconds']:.1f} ×"
    lines.append((name, f"{shared['seconds']:.2f} s", f"{apart['seconds']:.2f} s", ratio))
    return ("measurement", "time", "reference", "result"), lines


SECTIONS: dict[str, dict[str, Callable[[dict], Table | None]]] = {
    "engine": {"engine": engine, "draws": draws, "eight bits": eight_bits},
    "training": {"residual": residual, "steps": training_steps, "long steps": long_steps, "checked": checked},
    "vllm": {"vllm": against_vllm},
    "sparrow": {"decoding": decoding, "steady": steady, "sparrow": sparrow},
    "open-engine": {"open engine": opened},
    "distill": {"agreement": agreement, "overhead": overhead, "adapter": adapter_decode},
}
"""Tables by raw file and by their name on the page; None if their section has not been measured."""


def quantised() -> Table:
    """From the files that `alula calibrate --verify` writes: with KV in 8 bits, and without."""
    columns = ("policy", "KV", "tail of α", "95 % band", "vetoed rollouts", "KV tokens saved")
    lines = []
    for file, kv in (("int8-smollm2", "int8"), ("fp8-smollm2", "fp8"), ("exact-smollm2", "float32")):
        results = json.loads((RESULTS / f"{file}.json").read_text())
        for r in results if isinstance(results, list) else [results]:
            tail, vetoed = r["tail"], r["vetoed"]
            band = f"{tail['lower'][0]:.3f}-{tail['upper'][0]:.3f}"
            counts = f"{vetoed['rollouts']} of {vetoed['of']}"
            policy = r["policy"].replace(":", " ")
            lines.append((policy, kv, f"{tail['value'][0]:.3f}", band, counts, percent(r["kv"]["saved"])))
    return columns, lines


def rounding() -> Table:
    """From the file that `kv_formats.py` writes."""
    columns = ("KV", "rounded", "tail of α", "mean α", "KL divergence")
    rows = json.loads((RESULTS / "kv-formats-smollm2.json").read_text())
    lines = [
        (r["format"], r["rounded"], f"{r['tail']:.3f}", f"{r['mean']:.3f}", f"{1000 * r['kl']:.2f}e-3") for r in rows
    ]
    return columns, lines


def days() -> str:
    """When each section was taken, the oldest first."""
    sections: dict[str, list[str]] = {}
    for file in SECTIONS:
        for name, section in json.loads((RESULTS / f"{file}-h200.json").read_text()).items():
            sections.setdefault(section["taken"], []).append(f"{file}:{name}")
    return "\n".join(f"- {day}: {', '.join(names)}" for day, names in sorted(sections.items()))


def tables() -> dict[str, str]:
    filled = {"quantised": markdown(quantised()), "rounding": markdown(rounding()), "days": days()}
    for file, named in SECTIONS.items():
        path = RESULTS / f"{file}-h200.json"
        results = json.loads(path.read_text()) if path.exists() else {}
        made = {name: table(results) for name, table in named.items()} if results else {}
        filled |= {name: markdown(table) for name, table in made.items() if table is not None}
        if file == "sparrow":
            filled["plans"] = plans(results)
    return filled


def filled(page: str) -> str:
    for name, table in tables().items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        page = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{table}\n{end}", page, flags=re.DOTALL)  # noqa: B023
    return page


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(filled(path.read_text()))
    if not sys.argv[1:]:
        print("\n\n".join(tables().values()))
