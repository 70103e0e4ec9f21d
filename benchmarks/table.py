"""The tables of docs/benchmarks.md, from the raw results: `python benchmarks/table.py`."""

import json
from pathlib import Path

RESULTS = Path(__file__).with_name("results")


def engine_table(results: dict) -> list[tuple[str, str, str]]:
    rows = {name: section["rows"] for name, section in results.items()}
    steps = {(r["batch"], r["context"], r["sparsity"]): r for r in rows["steps"] if r["kind"] == "decode step"}
    large, kernel, hf = rows["large"][0], rows["kernel"][0], rows["transformers"][0]
    dense, sparse = steps[16, 32768, "dense"], steps[16, 32768, "block-topk 1024/16"]
    pool = {r["sparsity"]: r for r in rows["pool"]}
    idle = next(r for r in rows["steps"] if r["kind"] == "idle")
    packed = next(r for r in rows["steps"] if r["kind"] == "packed prefill and score")
    cold = next(r for r in rows["ready"] if r["caches"] == "empty")
    gap, peak, wide = rows["agreement"][0], rows["peak"][0], pool["rkv 2048+128"]

    def step(r: dict) -> str:
        return f"{r['of_floor']:.0%} of floor ({r['ms']:.2f} ms; floor {r['floor_ms']:.2f})"

    return [
        ("dense decode step, qwen3-1.7b, 64 × 8k", step(steps[64, 8192, "dense"]), "72 %; 85 %"),
        ("dense decode step, qwen3-8b, 64 × 8k", step(large), "72 %; 85 %"),
        ("dense decode step, qwen3-1.7b, 64 × 1k", step(steps[64, 1024, "dense"]), "50 %; 65 %"),
        ("paged decode kernel alone, 64 × 8k", f"{kernel['of_copy']:.0%} of copy bandwidth", "85 %; 92 %"),
        ("against transformers `generate` (sdpa), 64 × (1k + 256)", f"{hf['ratio']:.1f} × "
         f"({hf['transformers_s']:.1f} s / {hf['alula_s']:.2f} s)", "4 ×; 8 ×"),
        ("rkv 2048 against own dense, one 16 GiB pool, ages 0-16k", f"{wide['against_dense']:.2f} × "
         f"({wide['tokens_per_s']:,.0f} / {pool['dense']['tokens_per_s']:,.0f} tokens/s)", "3 ×; 3.5 ×"),
        ("rkv 512, the same", f"{pool['rkv 512+128']['against_dense']:.1f} × "
         f"({pool['rkv 512+128']['tokens_per_s']:,.0f} tokens/s)", "8 ×; 11 ×"),
        ("block-topk, 64 blocks of 16, two dense layers, 16 × 32k, against own dense step",
         f"{dense['ms'] / sparse['ms']:.2f} × ({dense['ms']:.2f} / {sparse['ms']:.2f} ms)", "3.5 ×; 4.5 ×"),
        ("time spent evicting, 512 run: snapkv / rkv", f"{pool['snapkv 512+128']['evicting_share']:.1%} / "
         f"{pool['rkv 512+128']['evicting_share']:.1%}", "5 % / 8 %; 3 % / 5 %"),
        ("peak pages of a sequence, rkv 512+128", f"{peak['peak_pages_per_sequence']} (allowed "
         f"{peak['peak_pages_allowed']})", "41"),
        ("packed prefill / `score`, qwen3-1.7b, 64 × 1k", f"{packed['prefill_of_matrix_rate']:.0%} / "
         f"{packed['score_of_matrix_rate']:.0%} of the measured matrix rate", "40 %; 55 %"),
        ("ready after load (compile, capture), empty caches", f"{cold['compile_and_capture_s']:.0f} s", "60 s; 30 s"),
        ("dense engine log-probs against `score`, SmolLM2, bf16, compiled", f"mean {gap['mean']:.4f}, p99 "
         f"{gap['p99']:.3f}, max {gap['max']:.2f}", "0.01; 0.005"),
        ("GPU idle, 64 × 1k", f"{idle['idle']:.1%} (a chunk's replays, back to back, against the wall)", "5 %; 2 %"),
    ]  # fmt: skip


def training_table(results: dict) -> list[tuple[str, str, str]]:
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
    for name, wanted in (("small", "2.5 s; 1.5 s"), ("paper", "reported; 4 min")):
        for r in results[name]["rows"]:
            what = f"{r['kind']}, {r['rollouts']} rollouts, mean {r['mean_length']:.0f} tokens, {r['sparsity']}"
            phases = ", ".join(f"{phase} {r[f'{phase}_s']:.2f}" for phase in ("rollout", "score", "update"))
            measured = f"{r['step_s']:.2f} s ({phases}); KV saved {r['kv_saved']:.0%}, peak {r['kv_peak_gib']:.1f} GiB"
            rows.append((what, measured, wanted))
    return rows


def show(title: str, rows: list[tuple[str, str, str]]) -> None:
    print(f"\n| {title} | measured | reach; better |\n|---|---|---|")
    for what, measured, wanted in rows:
        print(f"| {what} | {measured} | {wanted} |")


if __name__ == "__main__":
    show("engine", engine_table(json.loads((RESULTS / "engine-h200.json").read_text())))
    show("training", training_table(json.loads((RESULTS / "training-h200.json").read_text())))
