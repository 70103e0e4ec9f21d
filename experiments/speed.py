"""Question 6: from which response length on do sparse rollouts pay for the dense scoring pass?

    python experiments/speed.py

Combines decode steps and scoring of qwen3-1.7b on an H200 (benchmarks/results/engine-h200.json) into time per generated
token at a fixed batch of 64: a decode step costs a + b · (KV tokens read), fitted through its two measured lengths;
rkv 512+128 reads 576 tokens in the mean and spends its measured share of time on evictions. Writes
docs/results/speed/breakeven.jsonl.
"""

import json

from tables import BENCHMARKS, RESULTS

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
BATCH, HELD = 64, 512 + 128 / 2


def main() -> None:
    measured = json.loads((BENCHMARKS / "engine-h200.json").read_text())
    steps = {
        row["context"]: row["ms"]
        for row in measured["steps"]["rows"]
        if (row["kind"], row["sparsity"], row["batch"], row["kv_dtype"]) == ("decode step", "dense", BATCH, None)
    }
    (short, short_ms), (long, long_ms) = sorted(steps.items())
    slope = (long_ms - short_ms) / (long - short)
    base = short_ms - slope * short
    [scored] = measured["prefill"]["rows"]
    scoring = 1e6 * scored["score_s"] / (scored["sequences"] * scored["length"])
    [evicting] = [row["evicting_share"] for row in measured["pool"]["rows"] if row["sparsity"] == "rkv:512+128"]

    def microseconds(kv: float) -> float:
        return 1e3 * (base + slope * kv) / BATCH

    rows = []
    for length in LENGTHS:
        dense = microseconds(length / 2)
        held = min(HELD, length / 2)
        evicts = length > HELD
        sparse = microseconds(held) / (1 - evicting if evicts else 1.0)
        rows.append(
            {
                "length": length,
                "dense_us": dense,
                "sparse_us": sparse,
                "score_us": scoring,
                "rollout_ratio": dense / sparse,
                "with_scoring": dense / (sparse + scoring),
            }
        )
    path = RESULTS / "speed" / "breakeven.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({k: round(v, 3) for k, v in row.items()}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
