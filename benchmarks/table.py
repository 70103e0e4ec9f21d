"""The tables of docs/benchmarks.md, from the raw results: `python benchmarks/table.py docs/benchmarks.md`.

It replaces what stands between `<!-- NAME -->` and `<!-- end of NAME -->`; without a file it prints all tables.
"""

import json
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).with_name("results")


def engine_table(results: dict) -> list[tuple[str, ...]]:
    rows = {name: section["rows"] for name, section in results.items()}
    steps = {(r["batch"], r["context"], r["sparsity"]): r for r in rows["steps"] if r["kind"] == "decode step"}
    large, kernel, hf = rows["large"][0], rows["kernel"][0], rows["transformers"][0]
    dense, sparse = steps[16, 32768, "dense"], steps[16, 32768, "block-topk 1024/16"]
    pool = {r["sparsity"]: r for r in rows["pool"]}
    idle = next(r for r in rows["steps"] if r["kind"] == "idle")
    packed = next(r for r in rows["steps"] if r["kind"] == "packed prefill and score")
    cold = next(r for r in rows["ready"] if r["caches"] == "empty")
    peak, wide = rows["peak"][0], pool["rkv 2048+128"]

    def step(r: dict) -> str:
        return f"{r['of_floor']:.0%} of floor ({r['ms']:.2f} ms; floor {r['floor_ms']:.2f})"

    return [
        ("dense decode step, qwen3-1.7b, 64 × 8k", step(steps[64, 8192, "dense"]), "72 %; 85 %"),
        ("dense decode step, qwen3-8b, 64 × 8k", step(large), "72 %; 85 %"),
        ("dense decode step, qwen3-1.7b, 64 × 1k", step(steps[64, 1024, "dense"]), "50 %; 65 %"),
        ("paged decode kernel alone, 64 × 8k", f"{kernel['of_copy']:.0%} of copy bandwidth", "85 %; 92 %"),
        (
            "against transformers `generate` (sdpa), 64 × (1k + 256)",
            f"{hf['ratio']:.1f} × ({hf['transformers_s']:.1f} s / {hf['alula_s']:.2f} s)",
            "4 ×; 8 ×",
        ),
        (
            "rkv 2048 against own dense, one 16 GiB pool, ages 0-16k",
            f"{wide['against_dense']:.2f} × "
            f"({wide['tokens_per_s']:,.0f} / {pool['dense']['tokens_per_s']:,.0f} tokens/s)",
            "3 ×; 3.5 ×",
        ),
        (
            "rkv 512, the same",
            f"{pool['rkv 512+128']['against_dense']:.1f} × ({pool['rkv 512+128']['tokens_per_s']:,.0f} tokens/s)",
            "8 ×; 11 ×",
        ),
        (
            "block-topk, 64 blocks of 16, two dense layers, 16 × 32k, against own dense step",
            f"{dense['ms'] / sparse['ms']:.2f} × ({dense['ms']:.2f} / {sparse['ms']:.2f} ms)",
            "3.5 ×; 4.5 ×",
        ),
        (
            "time spent evicting, 512 run: snapkv / rkv",
            f"{pool['snapkv 512+128']['evicting_share']:.1%} / {pool['rkv 512+128']['evicting_share']:.1%}",
            "5 % / 8 %; 3 % / 5 %",
        ),
        (
            "peak pages of a sequence, rkv 512+128",
            f"{peak['peak_pages_per_sequence']} (allowed {peak['peak_pages_allowed']})",
            "41",
        ),
        (
            "packed prefill / `score`, qwen3-1.7b, 64 × 1k",
            f"{packed['prefill_of_matrix_rate']:.0%} / "
            f"{packed['score_of_matrix_rate']:.0%} of the measured matrix rate",
            "40 %; 55 %",
        ),
        ("ready after load (compile, capture), empty caches", f"{cold['compile_and_capture_s']:.0f} s", "60 s; 30 s"),
        *(
            (
                f"dense engine log-probs against `score`, SmolLM2, {gap.get('dtype', 'bfloat16')}, compiled",
                f"mean {gap['mean']:.4f}, p99 {gap['p99']:.3f}, max {gap['max']:.2f}",
                "0.01; 0.005",
            )
            for gap in rows["agreement"]
        ),
        ("GPU idle, 64 × 1k", f"{idle['idle']:.1%} (a chunk's replays, back to back, against the wall)", "5 %; 2 %"),
    ]


def training_table(results: dict) -> list[tuple[str, ...]]:
    rows = []
    for r in results["learner"]["rows"]:
        given = r["settings"]
        settings = given if isinstance(given, str) else ", ".join(f"{k}={v}" for k, v in given.items())
        what = f"learner, qwen2.5-1.5b, 4 × 16k packed tokens ({settings})"
        measured = f"{r['mfu']:.0%} of the measured matrix rate, peak {r['peak_gib']:.0f} GiB"
        rows.append((what, measured, "40 %; 50 %"))
    weights = results["weights"]["rows"][0]
    rows.append(
        (
            "weights from learner to engine, 1.5b",
            f"shared: 0; copied in place: {weights['copy_s'] * 1e3:.1f} ms",
            "50 ms; 0",
        )
    )
    for r in results["residual"]["rows"]:
        times = f"{r['slower']:+.1%} ({r['with_ms']:.2f} / {r['without_ms']:.2f} ms)"
        rows.append((f"{r['what']} with a float32 residual stream against without, {r['model']}", times, "reported"))
    for name, wanted in (("gsm8k", "2.5 s; 1.5 s"), ("small", "2.5 s; 1.5 s"), ("paper", "reported; 4 min")):
        for r in results[name]["rows"]:
            what = f"{r['kind']}, {r['rollouts']} rollouts, mean {r['mean_length']:.0f} tokens, {r['sparsity']}"
            listed = ("rollout", "reward", "mismatch", "score", "update")
            phases = ", ".join(f"{phase} {r[f'{phase}_s']:.2f}" for phase in listed if f"{phase}_s" in r)
            measured = f"{r['step_s']:.2f} s ({phases}); KV saved {r['kv_saved']:.0%}, peak {r['kv_peak_gib']:.1f} GiB"
            rows.append((what, measured, wanted))
    return rows


REACH = {"qwen3-1.7b": "2.3 ×; 2.8 ×", "qwen3-4b": "2.0 ×; 2.4 ×", "qwen3-8b": "1.75 ×; 2.1 ×"}


def sparrow_table(results: dict) -> list[tuple[str, ...]]:
    rows = {name: section["rows"] for name, section in results.items()}
    found = []
    for r in rows["decode"]:
        what = f"decoding to 32k at the published 0.86, {r['model']}, batch {r['batch']}, against own dense"
        found.append((what, f"{r['ratio']:.2f} × (floors allow {r['floor_ratio']:.2f})", REACH[r["model"]]))
    for r in rows["generation"]:
        what = f"one real generation to 8k against the sum of steps, 1.7b, {r['policy']}"
        found.append((what, f"{r['off']:+.1%}", "10 %"))
    for r in rows["both"][1:]:
        what = f"steady decoding to 32k in 80 GiB, 1.7b, {r['policy']}, against own dense"
        found.append((what, f"{r['against_dense']:.2f} × ({r['mean_rows']:.0f} rows)", "reported; 4 ×"))
    share, cost = rows["share"][0], rows["cost"][0]
    found.append(("scoring + top-k, share of the sparse step at 32k", f"{share['share']:.1%}", "20 %; 10 %"))
    error = f"{cost['median_error']:.1%} (analytic form: {cost['analytic_error']:.0%})"
    found.append(("cost model on held-out steps, median error", error, "10 %; 5 %"))
    for r in rows["calibration"]:
        what = f"calibration, smollm2-135m, 8 budgets, 2k tokens, 64 prompts, {r['run']} run"
        found.append((what, f"{r['seconds']:.0f} s", "60 s; 20 s"))
    return found


def distill_table(results: dict) -> list[tuple[str, ...]]:
    rows = {name: section["rows"] for name, section in results.items()}
    found = []
    for r in rows["agreement"] + rows["agreement_float16"] + rows["agreement_residual"]:
        kind = f"{r['sparsity']}, {'with' if r['adapter'] else 'no'} φ, {r['dtype'].removeprefix('torch.')}"
        kind += ", float32 residual" if r.get("residual") else ""
        what = f"learner's sparse forward against the engine, {kind}"
        found.append((what, f"mean {r['mean']:.4f}, p99 {r['p99']:.3f}", "0.02"))
    for r in rows["overhead"]:
        how = f"{r['fraction']:.0%} of rollouts, {r['divergence']}, teacher {r['teacher']}"
        found.append((f"distilling, {r['sparsity']}, {how}", f"{r['of_update']:.0%} of a learner update", "60 %"))
    for r in rows["decode"]:
        if r["kind"] == "decode":
            times = f"{r['slower']:+.1%} ({r['with_ms']:.2f} / {r['without_ms']:.2f} ms)"
            found.append((f"decode step with φ against without, {r['sparsity']}", times, "3 %"))
    return found


def distilled(results: dict) -> list[tuple[str, ...]]:
    """Tail and mean on held-out prompts before and after distillation, per budget and seed."""
    return [
        (
            r["sparsity"],
            f"{r['seed']}",
            f"{r['steps']}",
            f"{r['before']['tail']:.4f} → {r['after']['tail']:.4f}",
            f"{r['before']['mean']:.4f} → {r['after']['mean']:.4f}",
        )
        for section in ("select", "evict")
        for r in results[section]["rows"]
        if r["kind"] == "acceptance"
    ]


def sparser(results: dict) -> list[tuple[str, ...]]:
    """The smallest budget whose tail meets tau before and after, and its rollout speed against dense."""
    speeds = {(r["policy"], r["budget"]): f"{r['against_dense']:.2f} ×" for r in results["speed"]["rows"]}
    found = []
    for section in ("select", "evict"):
        for r in results[section]["rows"]:
            for tau in THRESHOLDS if "ladder" in r else ():
                met = [
                    min((rung["budget"] for rung in r["ladder"][when] if rung["tail"] >= tau), default=None)
                    for when in ("before", "after")
                ]
                ratios = [speeds.get((section, b), "not measured") if b else "–" for b in met]
                budgets = " → ".join(str(b or "–") for b in met)
                found.append((f"{r['sparsity']}, τ = {tau:.2f}", budgets, " → ".join(ratios)))
    return found


def plans(results: dict) -> str:
    """The planned schedules, measured again on rollouts of their own from other prompts."""
    rows = [row for row in results["real"]["rows"] if row["kind"] == "plan"]
    return "\n\n".join(
        f"`{row['policy']}`, τ = {row['tau']:.3f}:\n\n{row.get('table') or row['out_of_reach']}" for row in rows
    )


def markdown(rows: list[tuple[str, ...]], *titles: str) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


THRESHOLDS = (0.80, 0.83, 0.86, 0.88, 0.90)
MEASURED = ("measured", "reach; better")


def tables() -> dict[str, str]:
    raw = {
        name: json.loads((RESULTS / f"{name}-h200.json").read_text())
        for name in ("engine", "training", "sparrow", "distill")
    }
    return {
        "engine": markdown(engine_table(raw["engine"]), "engine", *MEASURED),
        "training": markdown(training_table(raw["training"]), "training", *MEASURED),
        "sparrow": markdown(sparrow_table(raw["sparrow"]), "sparrow", *MEASURED),
        "plans": plans(raw["sparrow"]),
        "distill": markdown(distill_table(raw["distill"]), "distillation", *MEASURED),
        "distilled": markdown(distilled(raw["distill"]), "distilled", "seed", "steps", "tail", "mean"),
        "sparser": markdown(sparser(raw["distill"]), "distilled at", "smallest budget", "rollout speed against dense"),
    }


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
