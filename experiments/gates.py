"""Is a long bed worth training on? Its gates, measured before any arm of a question is trained.

    python experiments/gates.py --bed search-tiny --seeds 3
    python experiments/gates.py --bed search --seeds 1 --seconds 1500 --out OUT   # one GPU

Warms the model up, trains densely for 16 steps, probes compressors over their budgets, and prints one row per gate:
limit, measured value, passed or not. The gates are those of docs/results/long-bed.md; they were fixed before the beds
were made. A stopped command goes on where it was. --out receives `gates/<bed>.jsonl` (one line per gate and seed),
`budgets/<bed>.jsonl` (one line per policy and seed) and `long-bed/<bed>.jsonl` (the dense runs).
"""

import argparse
import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import judge
import probe
from arms import DENSE
from lines import read_lines, write_lines
from long_beds import LONG_BEDS, LongBed
from long_tables import kv_share
from markdown import markdown
from raw import raw_run, short, write_raw
from run import Run, in_a_child, run_all

from alula.engine.engine import Engine
from alula.engine.rollout import Rollout, Sampling
from alula.sparsity.policy import Sparsity

METHODS = ("rkv", "streaming", "block-topk")
"""Unlike each other: attention and redundancy, position, selection of pages."""
KEPT, LOST, KV_SHARE = 0.9, 0.5, 0.15
ENTROPY = 0.1
"""Nat; a token above it is a choice."""
TOP = 64
"""Most likely tokens that the entropy is summed over: a lower bound with a large vocabulary, exact with a tiny one."""


@dataclass(frozen=True)
class Gate:
    bed: str
    seed: int
    gate: str
    limit: str
    value: float
    passed: bool
    note: str = ""

    @property
    def cells(self) -> list[str]:
        return [self.gate, self.limit, f"{self.value:.3g}", "yes" if self.passed else "no", self.note]


def measure_text(bed: LongBed, seed: int, work: Path) -> None:
    """`text.jsonl`: lengths, cut-off answers, entropy and guesses of the warmed-up model under the dense policy."""
    path = work / "text.jsonl"
    if any(row["seed"] == seed for row in read_lines(path)):
        return
    measured = probe.Probe(bed, seed, work)
    rollouts = measured.generate(Sparsity())
    entropies = token_entropies(measured.engine, rollouts)
    prompt, answer = (fmean(map(len, parts)) for parts in zip(*((r.prompt_ids, r.token_ids) for r in rollouts)))
    row = {
        "bed": bed.name,
        "seed": seed,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "longest": max(map(len, rollouts)),
        "cut_off": fmean(rollout.finish == "length" for rollout in rollouts),
        "choices": fmean(entropy > ENTROPY for entropy in entropies),
        "entropy": fmean(entropies),
        "guess": guess_accuracy(measured),
        "chance": bed.task.chance,
    }
    with path.open("a") as file:
        file.write(json.dumps({name: short(value) for name, value in row.items()}) + "\n")


def probe_budgets(bed: LongBed, seed: int, work: Path, methods: Sequence[str]) -> None:
    """`budgets.jsonl`: accuracy, KV and vetoes of the warmed-up model under every budget; a method's in one batch."""
    path = work / "budgets.jsonl"
    measured: probe.Probe | None = None
    for method in methods:
        done = {row["sparsity"] for row in read_lines(path) if row["seed"] == seed}
        left = [policy for policy in probe.grid(bed, [method]) if policy not in done]
        if not left:
            continue
        measured = measured or probe.Probe(bed, seed, work)
        with path.open("a") as file:
            for row in measured.measure_together(left):
                file.write(json.dumps(row) + "\n")
                print(f"{row['sparsity']}: accuracy {row['accuracy']}, KV share {kv_share(row):.3f}", flush=True)


def token_entropies(engine: Engine, rollouts: Sequence[Rollout]) -> list[float]:
    top = min(TOP, engine.model.config.vocab_size)
    found: list[float] = []
    for scores in engine.score(rollouts, topk=top):
        assert scores.topk_logprobs is not None
        found += (-(scores.topk_logprobs.exp() * scores.topk_logprobs).sum(-1)).tolist()
    return found


def guess_accuracy(measured: probe.Probe) -> float:
    """Accuracy of the model when it must answer at once: `answer` follows the prompt."""
    mark = measured.engine.tokenizer(" answer", add_special_tokens=False)["input_ids"]
    prompts = [[*(problem.prompt_ids or ()), *mark] for problem in measured.problems]
    rollouts = measured.engine.generate(prompts, Sampling(n=8, max_new_tokens=64), Sparsity(), progress=False)
    texts = [f"answer {(rollout.text or '').strip()}" for rollout in rollouts]
    return fmean(measured.bed.grade(texts, [measured.problems[r.prompt_index].record() for r in rollouts]))


def gates_of(bed: LongBed, seed: int, work: Path, compressors: Sequence[str]) -> Iterator[Gate]:
    text = next(row for row in read_lines(work / "text.jsonl") if row["seed"] == seed)
    probed = [row for row in read_lines(work / "budgets.jsonl") if row["seed"] == seed]

    def gate(name: str, limit: str, value: float, passed: bool, note: str = "") -> Gate:
        return Gate(bed.name, seed, name, limit, float(short(value)), bool(passed), note)

    run = raw_run(bed, DENSE, seed, work, ())
    if run and run["evals"]:
        start, end = judge.start(run), judge.final(run)
        steps = judge.dense_accuracy(run)[-1][0]
        yield gate("dense accuracy, start", "0.30 to 0.80", start, 0.3 <= start <= 0.8)
        yield gate("dense gain in 16 steps", "at least 0.10", end - start, end - start >= 0.1, f"{steps} steps")
        yield gate("dense accuracy, end", "below 0.97", end, end < 0.97)
    dense = next(row["accuracy"] for row in probed if row["sparsity"] == "dense")
    if dense:  # else nothing can be kept or lost
        shares = {method: smallest_share(probed, method, KEPT * dense) for method in compressors}
        second = sorted(share for share in shares.values())[1]
        reached = ", ".join(f"{m} {s:.2f}" if s < 1 else f"{m} none" for m, s in shares.items())
        yield gate(
            f"KV share at {KEPT:.0%} of dense, second best", f"at most {KV_SHARE}", second, second <= KV_SHARE, reached
        )
        lowest = {method: lowest_accuracy(probed, method) / dense for method in compressors}
        worst = max(lowest.values())
        shown = ", ".join(f"{m} {value:.2f}" for m, value in lowest.items())
        yield gate("smallest budget, share of dense accuracy", f"below {LOST}", worst, worst < LOST, shown)
    choices = text["choices"]
    yield gate(f"tokens with entropy above {ENTROPY} nat", "at least 0.10", choices, choices >= 0.1)
    share = text["prompt_tokens"] / (text["prompt_tokens"] + text["answer_tokens"])
    yield gate(
        "prompt, share of sequence", "at most 0.10", share, share <= 0.1, f"{text['answer_tokens']:.0f} new tokens"
    )
    yield gate("answers cut off", "below 0.02", text["cut_off"], text["cut_off"] < 0.02)
    guess = max(text["guess"], text["chance"])
    note = f"random {text['chance']:.3g}, model {text['guess']:.3g}"
    yield gate("right without the work", "at most 0.10", guess, guess <= 0.1, note)


def of_method(rows: Sequence[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["sparsity"].startswith(f"{method}:")]


def smallest_share(rows: Sequence[dict[str, Any]], method: str, accuracy: float) -> float:
    """The smallest KV share with at least this accuracy; all of it if no budget reaches it."""
    return min((kv_share(row) for row in of_method(rows, method) if row["accuracy"] >= accuracy), default=1.0)


def lowest_accuracy(rows: Sequence[dict[str, Any]], method: str) -> float:
    return min(row["accuracy"] for row in of_method(rows, method))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", choices=LONG_BEDS, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    bed, work, methods = LONG_BEDS[options.bed], options.work / options.bed, options.methods.split(",")
    seeds, found = range(options.seeds), []
    for seed in seeds:
        in_a_child(measure_text, bed, seed, work)
        run_all([Run(bed, DENSE, seed, work)], 1, deadline)
        in_a_child(probe_budgets, bed, seed, work, methods)
        found += [*gates_of(bed, seed, work, methods)]
        head = ["gate", "limit", f"seed {seed}", "passed", "note"]
        print(f"\n{markdown(head, [gate.cells for gate in found if gate.seed == seed])}\n", flush=True)
    write_raw("long-bed", bed, [(DENSE, seed) for seed in seeds], work, options.out)
    write_lines(options.out / "gates" / f"{bed.name}.jsonl", map(asdict, found))
    write_lines(options.out / "budgets" / f"{bed.name}.jsonl", read_lines(work / "budgets.jsonl"))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
