"""Training's numbers on one GPU: `python benchmarks/training.py --out benchmarks/results/training-h200.json`.

Random weights of real shapes. A step is the real one: rollouts from the engine, dense scores, correction, packed
updates; rewards are drawn at random, since random weights earn none. Only `gsm8k` is a training as users start it, on
a real model and graded answers: it wants ALULA_SMOLLM2, SmolLM2-135M-Instruct's GGUF file (`make model`), and takes
GSM8K from `--data-dir` or the hub.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from rl_step import GROUP, Step, Workload
from sections import arguments, measured_machine, record, release

from alula import Engine
from alula.bench.ceilings import Ceilings, timed
from alula.bench.decode import StepBench
from alula.config.load import load_config
from alula.engine.rollout import Rollout
from alula.learner.learner import Learner
from alula.learner.packing import Packed
from alula.models.load import LoadedModel, load_model
from alula.settings import LearnerSettings
from alula.trainer.memory_plan import plan_memory
from alula.trainer.speed_plan import plan_speed
from alula.trainer.trainer import Trainer

DEVICE = torch.device("cuda")
LENGTHS = [1024, 4096, 2048, 3072, 1536, 2560, 1024, 1024]
"""Lengths of packed sequences: 16k tokens."""


def random_sequences(rng: np.random.Generator, vocabulary: int, lengths: list[int]) -> list[Rollout]:
    return [
        Rollout(
            rng.integers(0, vocabulary, 128).tolist(), rng.integers(0, vocabulary, n - 128).tolist(), None, "length"
        )
        for n in lengths
    ]


def long_sequences(ceilings: Ceilings) -> Iterator[dict]:
    """Eight sequences of 32k tokens, qwen3-1.7b."""
    settings = {"compile": True, "activation_checkpointing": False, "token_budget": 32768}
    yield {"kind": "learner", "settings": settings, **timed_learner("qwen3-1.7b", settings, [32768] * 8, ceilings)}


def timed_learner(model: str, settings: dict, lengths: list[int], ceilings: Ceilings) -> dict:
    """One update and one scoring pass, each after one that is not timed."""
    loaded = load_model(f"shape:{model}", device="cuda")
    learner = Learner(loaded.model, LearnerSettings(lr=1e-6, **settings))
    sequences = random_sequences(np.random.default_rng(0), 151936, lengths)

    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, packed: Packed) -> tuple:
        return -logprobs.mean() / 4, {}

    def seconds_of(work: Callable[[], Any]) -> float:
        work()
        torch.cuda.reset_peak_memory_stats()
        return timed(work, DEVICE, 1)

    scoring = seconds_of(lambda: learner.score(sequences, 1.0))
    updating = seconds_of(lambda: learner.update(sequences, loss_fn, 1.0))
    flops = learner.flops(sequences)
    return {
        "model": model,
        "tokens": sum(lengths),
        "seconds": updating,
        "mfu": flops.total / updating / ceilings.matrix,
        "mfu_without_head": (flops.total - flops.head) / updating / ceilings.matrix,
        "score_s": scoring,
        "score_mfu": flops.total / 3 / scoring / ceilings.matrix,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def weights(ceilings: Ceilings) -> list[dict]:
    """From learner to engine: shared on one GPU; a copy in place otherwise."""
    loaded = load_model("shape:qwen2.5-1.5b", device="cuda")
    engine = Engine(loaded, kv_memory="1GiB", max_rows=8, compiled=False)
    other = [(name, p.detach().clone()) for name, p in loaded.model.named_parameters()]
    engine.update_weights(other)
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.update_weights(other)
    torch.cuda.synchronize()
    return [{"kind": "weights", "shared_s": 0.0, "copy_s": time.perf_counter() - start}]


def small_step(ceilings: Ceilings) -> Iterator[dict]:
    """SmolLM2-135M's shape: 64 prompts of 100 tokens × 8 rollouts of 256, two updates; dense and rkv 64+16."""
    work = Workload("smollm2-135m", random_prompts(64, 100), [256] * 512, 256, updates=2, kv_memory="20GiB")
    step = Step(work)
    for sparsity in ("dense", "rkv:64+16"):
        for _ in range(2):  # the first compile and capture
            step.run(sparsity, ceilings)
        yield {"kind": "step", **step.run(sparsity, ceilings)}


def paper_step(ceilings: Ceilings) -> Iterator[dict]:
    """The paper's scale, qwen2.5-1.5b: 128 prompts × 8 rollouts of up to 4096 tokens (mean about 1000), 4 updates."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 151936, int(n)).tolist() for n in rng.integers(80, 240, 128)]
    lengths = np.clip(rng.lognormal(6.6, 0.8, 1024), 32, 4096).astype(int).tolist()
    step = Step(Workload("qwen2.5-1.5b", prompts, lengths, 4096, updates=4, kv_memory="40GiB"))
    for sparsity in ("dense", "rkv:512+128,window=8,sinks=0"):
        step.warm_up(sparsity)
        yield {"kind": "step", **step.run(sparsity, ceilings)}


def checked_step(ceilings: Ceilings) -> Iterator[dict]:
    """qwen2.5-1.5b, 32 prompts of 128 tokens × 8 rollouts of 2048, one update: measured, and as `--check` estimates."""
    work = Workload("qwen2.5-1.5b", random_prompts(32, 128), [2048] * 256, 2048, updates=1, kv_memory="40GiB")
    step = Step(work)
    for sparsity in ("dense", "rkv:512+128"):
        step.warm_up(sparsity)
        config = work.config(sparsity)
        speed = plan_speed(config, plan_memory(config), ceilings, 40 << 30)
        estimate = {"rollout_s": speed.rollouts.seconds, "score_s": speed.score, "update_s": speed.update}
        ratio = speed.sparse.tokens_per_second / speed.dense.tokens_per_second
        estimate |= {"step_s": speed.step, "pays_from": speed.pays_from, "sparse_to_dense": ratio}
        yield {"kind": "step", **step.run(sparsity, ceilings), "estimate": estimate}


LONG = {
    "qwen3-1.7b": (32, 4000, 8192, "50GiB", ("dense", "rkv:512+128")),
    "smollm2-135m": (64, 2200, 4096, None, ("dense", "rkv:512+128", "snapkv:512+128")),
}
"""Prompts, mean and longest answer, KV pool and policies, by model."""


def long_steps(ceilings: Ceilings, rows: str = "", out: Path | None = None) -> Iterator[dict]:
    """Steps with long answers, 128-token prompts × 8 rollouts, two updates. `rows`: as `qwen3-1.7b:rkv`, or all; what
    `out` has of the others stays."""
    names = [f"{model}:{policy.partition(':')[0]}" for model, (*_, policies) in LONG.items() for policy in policies]
    wanted = rows.split(",") if rows else names
    if unknown := set(wanted) - set(names):
        raise SystemExit(f"--rows {', '.join(sorted(unknown))}: the rows are {', '.join(names)}")
    before = json.loads(out.read_text()).get("long", {"rows": []})["rows"] if out and out.exists() else []
    yield from (row for row in before if row.get("name", wanted[0]) not in wanted)
    for model, (prompts, mean, most, kv_memory, policies) in LONG.items():
        chosen = [policy for policy in policies if f"{model}:{policy.partition(':')[0]}" in wanted]
        if not chosen:
            continue
        lengths = spread_lengths(prompts * GROUP, mean, most)
        step = Step(Workload(model, random_prompts(prompts, 128), lengths, most, updates=2, kv_memory=kv_memory))
        for sparsity in chosen:
            step.warm_up(sparsity)
            name = f"{model}:{sparsity.partition(':')[0]}"
            yield {"kind": "long step", "name": name, **step.run(sparsity, ceilings)}
        del step
        release()


def random_prompts(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, 49152, (count, length)).tolist()


def spread_lengths(count: int, mean: int, most: int) -> list[int]:
    """Log-normal lengths (σ = 0.6), cut off at `most`, with this mean."""
    drawn, low, high = np.random.default_rng(0).lognormal(0.0, 0.6, count), 1.0, float(most)
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * drawn, most).mean() < mean else (low, middle)
    return np.minimum(low * drawn, most).astype(int).clip(1).tolist()


def gsm8k_step(ceilings: Ceilings, data_dir: str | None = None) -> Iterator[dict]:
    """recipes/smollm2-gsm8k.yaml, 512 rollouts of at most 256 tokens, two updates: the median of six steps.

    `skip_no_signal` is off, so that both updates see every rollout however few problems the model can solve.
    """
    model = os.environ.get("ALULA_SMOLLM2")
    if not model:
        print("gsm8k: set ALULA_SMOLLM2 to SmolLM2-135M-Instruct's GGUF file (`make model`)", file=sys.stderr)
        return
    recipe = Path(__file__).parent.parent / "recipes" / "smollm2-gsm8k.yaml"
    shared = [
        f"model.source={model}",
        "steps=8",
        "eval.every=1000",
        "eval.size=64",
        "eval.sparse=false",
        "checkpoint.every=0",
        "objective.skip_no_signal=false",
        "learner.activation_checkpointing=false",
        "learner.token_budget=65536",
    ]
    if data_dir:
        shared += [f"data.data_dir={data_dir}", f"eval.data.data_dir={data_dir}"]
    for name, settings in (
        ("dense", ["sparsity.evict=null", "objective.correction=none"]),
        ("rkv 64+16", []),
    ):
        with tempfile.TemporaryDirectory() as folder:
            Trainer(load_config(recipe, [*shared, *settings, f"out={folder}/run"])).run()
            lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "time/step" in line][2:]  # the first two compile and capture
        phases = [key.removeprefix("time/") for key in steps[0] if key.startswith("time/")]
        yield {
            "kind": "smollm2-135m on gsm8k",
            "sparsity": name,
            "rollouts": 512,
            "updates": 2,
            "steps": len(steps),
            "mean_length": fmean(step["response/length_mean"] for step in steps),
            **{f"{phase}_s": median(step[f"time/{phase}"] for step in steps) for phase in phases},
            "kv_saved": fmean(step["kv/saved"] for step in steps),
            "kv_peak_gib": max(step["kv/bytes_peak"] for step in steps) / 2**30,
            "step_s_each": [step["time/step"] for step in steps],
        }
        release()


def residual_cost(ceilings: Ceilings) -> Iterator[dict]:
    """What a float32 residual stream costs: with it and without, in turns, the best of five."""
    for model in ("smollm2-135m", "qwen2.5-1.5b"):
        for what, prepare in (("decode step", decode_step), ("learner update", learner_update)):
            runs = {
                residual: prepare(load_model(f"shape:{model}", device=DEVICE, residual=residual))
                for residual in (None, "float32")
            }
            turns = [{residual: run() for residual, run in runs.items()} for _ in range(5)]
            without, wide = (min(turn[residual] for turn in turns) for residual in runs)
            yield {
                "kind": "residual",
                "what": what,
                "model": model,
                "without_ms": without * 1e3,
                "with_ms": wide * 1e3,
                "slower": wide / without - 1,
            }
            del runs
            release()


def decode_step(loaded: LoadedModel) -> Callable[[], float]:
    """Dense, 64 rows of 1k tokens."""
    return StepBench(Engine(loaded, kv_memory="4GiB", max_rows=64, max_length=2048), 64, 1024).seconds


def learner_update(loaded: LoadedModel) -> Callable[[], float]:
    """One optimizer step on 16k packed tokens; the first call compiles."""
    learner = Learner(loaded.model, LearnerSettings(lr=1e-9, token_budget=sum(LENGTHS)))
    sequences = random_sequences(np.random.default_rng(0), loaded.model.config.vocab_size, LENGTHS)
    step = partial(learner.update, sequences, lambda logprobs, entropy, packed: (-logprobs.mean(), {}))
    return partial(timed, step, DEVICE, 1)


SECTIONS = {
    "weights": weights,
    "small": small_step,
    "sequences": long_sequences,
    "residual": residual_cost,
    "paper": paper_step,
    "check": checked_step,
    "long": long_steps,
    "gsm8k": gsm8k_step,
}


if __name__ == "__main__":
    parser = arguments(SECTIONS, __doc__)
    parser.add_argument("--data-dir", help="of gsm8k, as data.data_dir; by default the Hugging Face hub's")
    parser.add_argument("--rows", default="", help="of long: as qwen3-1.7b:rkv, separated by commas; by default all")
    options = parser.parse_args()
    ceilings, machine = measured_machine()
    chosen = {
        "gsm8k": partial(gsm8k_step, data_dir=options.data_dir),
        "long": partial(long_steps, rows=options.rows, out=options.out),
    }
    sections = {name: partial(section, ceilings) for name, section in {**SECTIONS, **chosen}.items()}
    record(sections, options, machine)
