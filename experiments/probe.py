"""Before any training: what does a KV budget do to the warmed-up model?

    python experiments/probe.py --bed tiny --seeds 3

For every budget of every compressor, on rollouts of the policy itself: accuracy, of careful chains and of shortcuts
apart; KV saved; vetoed rollouts and the hazard of a veto per token (ξ < 1e-4); the tail (5th percentile) of acceptance.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from beds import TASK_BEDS, Bed, TaskBed, prepared
from lines import read_lines
from raw import short, write_probe
from settings import recipe_settings

from alula.data import Dataset, prepare
from alula.engine.engine import Engine
from alula.engine.rollout import Rollout, Sampling
from alula.mismatch.measure import Bins
from alula.mismatch.tail import MIN_PROMPTS, Tail
from alula.models.load import load_model
from alula.objective.veto import REFERENCE_VETO
from alula.sparsity.policy import Sparsity

EVICTORS = ("rkv", "snapkv", "streaming", "keydiff")
VETO = math.log(REFERENCE_VETO)


class Probe:
    """The warmed-up model on problems, by default on some that no run trains or is evaluated on."""

    def __init__(
        self, bed: TaskBed, seed: int, work: Path, problems: Dataset | None = None, answers: int = 2, widen: int = 1
    ) -> None:
        """`widen` lets as many times the rows of a training step decode together."""
        self.bed, self.seed = bed, seed
        recipe = recipe_settings(bed)
        rows = recipe["sampling"]["prompts"] * recipe["sampling"]["n"]
        options = {**recipe["engine"], "max_rows": widen * rows}
        if "buckets" in options:
            options["buckets"] = [*options["buckets"], *(rows * times for times in range(2, widen + 1))]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        start = prepared(bed, seed, work, print_step)
        self.engine = Engine.load(str(start / "model"), device=device, **options)
        self.problems = prepare(problems or probe_problems(bed, seed), self.engine.tokenizer, chat=False)
        self.sampling = Sampling(n=answers, max_new_tokens=recipe["sampling"]["max_new_tokens"], seed=seed)

    def take(self, model: Path) -> None:
        """Go on with another model of the same shape."""
        device = self.engine.device
        self.engine.update_weights(load_model(model, device=device).model.named_parameters())

    def measure(self, sparsity: str, bins: Bins | None = None) -> dict[str, Any]:
        """What a policy does to the answers, and how far it is from the dense one; with `bins` also by length."""
        start, policy = time.perf_counter(), Sparsity.parse(sparsity)
        rollouts = self.generate(policy)
        generated = time.perf_counter() - start
        alphas = self.engine.acceptance(rollouts, policy)
        tail = Bins(width=1 << 20, count=1).tail(rollouts, alphas)
        row = {
            **self.answers(sparsity, rollouts),
            **self.vetoes(rollouts),
            "tail": float(tail.value[0]),
            "tail_low": float(tail.lower[0]),
            "tail_high": float(tail.upper[0]),
            "generate_s": generated,
        }
        return row | ({"tails": by_bin(bins.tail(rollouts, alphas))} if bins else {})

    def measure_together(self, policies: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Answers and vetoes of several policies that decode in one batch, without tails."""
        size = len(self.problems)
        prompts = [list(problem.prompt_ids or ()) for problem in self.problems] * len(policies)
        parsed = [Sparsity.parse(policy) for policy in policies for _ in range(size)]
        rollouts = self.engine.generate(prompts, self.sampling, parsed, progress=False)
        for place, policy in enumerate(policies):
            own = [replace(r, prompt_index=r.prompt_index % size) for r in rollouts if r.prompt_index // size == place]
            found = self.answers(policy, own) | self.vetoes(own)
            yield {name: short(value) for name, value in found.items()}

    def vetoes(self, rollouts: list[Rollout]) -> dict[str, Any]:
        ratios = [d.logprobs - r.logprobs for d, r in zip(self.engine.score(rollouts), rollouts)]
        vetoed = [int((ratio < VETO).sum()) for ratio in ratios]
        return {
            "vetoed_rollouts": mean([float(count > 0) for count in vetoed]),
            "veto_hazard": sum(vetoed) / sum(map(len, rollouts)),
        }

    def generate(self, policy: Sparsity) -> list[Rollout]:
        prompts = [list(problem.prompt_ids or ()) for problem in self.problems]
        return self.engine.generate(prompts, self.sampling, policy, progress=False)

    def answers(self, sparsity: str, rollouts: list[Rollout]) -> dict[str, Any]:
        right: dict[bool, list[float]] = {True: [], False: []}
        texts = [rollout.text or "" for rollout in rollouts]
        guesses = [self.bed.is_shortcut(text) for text in texts]
        values = self.bed.grade(texts, [self.problems[rollout.prompt_index].record() for rollout in rollouts])
        for guess, value in zip(guesses, values):
            right[guess].append(value)
        held = sum(rollout.kv.mean_tokens * len(rollout) for rollout in rollouts)
        read = sum(rollout.kv.mean_read_tokens * len(rollout) for rollout in rollouts)
        whole = sum(rollout.kv.dense_mean_tokens * len(rollout) for rollout in rollouts)
        return {
            "bed": self.bed.name,
            "seed": self.seed,
            "sparsity": sparsity,
            "accuracy": mean(right[False] + right[True]),
            "careful": mean(right[False]),
            "guess": mean(right[True]),
            "careful_share": len(right[False]) / len(rollouts),
            "rollouts": len(rollouts),
            "length": mean([float(len(rollout)) for rollout in rollouts]),
            "careful_length": mean([float(len(rollout)) for rollout, guess in zip(rollouts, guesses) if not guess]),
            "kv_saved": 1 - held / whole,
            "kv_unread": 1 - read / whole,
        }


def probe_problems(bed: TaskBed, seed: int, count: int | None = None) -> Dataset:
    return bed.task.dataset(count or bed.probe_prompts, 3000 + seed)


def by_bin(tail: Tail) -> list[float | None]:
    """The tail of every length bin; None where too few prompts reach it."""
    return [float(f"{t:.4g}") if count >= MIN_PROMPTS else None for t, count in zip(tail.value, tail.prompts)]


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def grid(bed: Bed, methods: Sequence[str] = (*EVICTORS, "block-topk")) -> list[str]:
    found = ["dense"]
    for method in methods:
        if method in EVICTORS:
            found += [bed.evictor(method, budget) for budget in bed.budgets]
        else:
            found += [bed.selector(budget) for budget in bed.read_budgets]
    return found


def print_step(what: str, step: int, most: int, loss: float) -> None:
    if step % 25 == 0 or step == most:
        print(f"  {what}: step {step}, loss {loss:.4f}", flush=True)


def run(bed: TaskBed, seed: int, work: Path, policies: list[str], prompts: int | None = None) -> list[dict[str, Any]]:
    """Rows of a seed; what was measured before is not measured again."""
    path = work / "probe.jsonl"
    done = {(row["seed"], row["sparsity"]) for row in read_lines(path)}
    left = [policy for policy in policies if (seed, policy) not in done]
    probe = Probe(bed, seed, work, probe_problems(bed, seed, prompts)) if left else None
    for policy in left:
        assert probe is not None
        row = probe.measure(policy)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {name: f"{value:.3f}" for name, value in row.items() if isinstance(value, float)}
        print(f"{policy:34} " + " ".join(f"{name} {shown[name]}" for name in shown if "_s" not in name), flush=True)
    return [row for row in read_lines(path) if row["seed"] == seed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", choices=TASK_BEDS, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", default=",".join((*EVICTORS, "block-topk")))
    parser.add_argument("--prompts", type=int, help="problems to probe on; by default the bed's")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    bed, work = TASK_BEDS[options.bed], options.work / options.bed
    work.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        start = time.perf_counter()
        prepared(bed, seed, work, print_step)
        print(f"warm-up: {time.perf_counter() - start:.0f} s", flush=True)
        run(bed, seed, work, grid(bed, options.methods.split(",")), options.prompts)
    write_probe(bed, work, options.out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
