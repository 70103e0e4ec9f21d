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
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
from sections import arguments, measured_machine, record, release

from alula import Engine, Evict, Sampling, Sparsity
from alula.bench.ceilings import Ceilings, timed
from alula.bench.decode import StepBench
from alula.config.load import load_config, read_tree
from alula.config.settings import LearnerSettings
from alula.engine.rollout import Rollout
from alula.engine.sequence import Request
from alula.learner.learner import Learner
from alula.learner.packing import Packed
from alula.models.load import LoadedModel, load_model
from alula.objective.advantages import group_advantages
from alula.objective.correction import Correction, correct
from alula.objective.policy_loss import Divisors, divisors, policy_loss
from alula.objective.settings import Loss
from alula.trainer.memory_plan import plan_memory
from alula.trainer.speed_plan import plan_speed
from alula.trainer.trainer import Trainer

DEVICE = torch.device("cuda")
LENGTHS = [1024, 4096, 2048, 3072, 1536, 2560, 1024, 1024]
"""Of packed sequences: 16k tokens."""


class Phases(dict):
    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self[name] = self.get(name, 0.0) + time.perf_counter() - start


def update_loss(
    advantages: torch.Tensor, old: list, weights: list, loss: Loss, shares: Divisors
) -> Callable[..., tuple]:
    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, packed: Packed) -> tuple:
        return policy_loss(
            logprobs,
            packed.flat(old),
            packed.rows(advantages)[packed.sequence],
            packed.flat(weights),
            packed.sequence,
            loss,
            shares.rows(torch.tensor(packed.index, device=logprobs.device)),
        )

    return loss_fn


def one_step(
    loaded: LoadedModel,
    engine: Engine,
    learner: Learner,
    sparsity: Sparsity,
    prompts: list[list[int]],
    lengths: list[int],
    group: int,
    updates: int,
    correction: Correction,
) -> dict:
    """A whole step with a given response length per rollout; those of one prompt and one length share its KV."""
    phases, n = Phases(), len(lengths)
    requests, first = [], 0
    while first < n:
        last = first + 1
        while last % group and lengths[last] == lengths[first]:
            last += 1
        sampling = Sampling(n=last - first, max_new_tokens=lengths[first], ignore_eos=True)
        requests.append(
            Request(engine.inputs.next_id(), prompts[first // group], sampling, sparsity, frozenset(), first)
        )
        first = last
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    engine.pool.peak = 0
    with phases.phase("rollout"):
        rollouts = sorted(engine.stream(requests), key=lambda r: (r.prompt_index, r.sample_index))
    with phases.phase("sleep"):
        engine.sleep()
    sequences = rollouts
    with phases.phase("score"):
        old = [logprobs.cpu() for logprobs in learner.score(sequences, 1.0)]
    rewards = torch.tensor(np.random.default_rng(0).integers(0, 2, n), dtype=torch.float32)
    flat = torch.cat([torch.full((len(t),), i) for i, t in enumerate(old)])
    corrected = correct(torch.cat(old), torch.cat([r.logprobs for r in rollouts]), flat, correction, sequences=n)
    advantages = group_advantages(rewards, torch.arange(n) // group)
    loss = Loss("grpo")
    weights = list(corrected.weights.split([len(t) for t in old]))
    order = np.random.default_rng(1).permutation(n).reshape(updates, -1)
    with phases.phase("update"):
        for chosen in order:
            own = [int(i) for i in chosen]
            part = torch.cat([torch.full((len(old[i]),), k) for k, i in enumerate(own)]).to(engine.device)
            shares = divisors(loss, correction, part, len(own), None)

            loss_fn = update_loss(advantages[own], [old[i] for i in own], [weights[i] for i in own], loss, shares)
            learner.update([sequences[i] for i in own], loss_fn, 1.0)
    with phases.phase("wake"):
        engine.wake()
        engine.policy_version += 1  # the optimizer wrote into the engine's own parameters
    tokens = sum(lengths)
    return {
        "sparsity": sparsity.describe(),
        "rollouts": n,
        "response_tokens": tokens,
        "updates": updates,
        "mean_length": tokens / n,
        "step_s": time.perf_counter() - start,
        **{f"{k}_s": v for k, v in phases.items()},
        "rollout_tokens_per_s": tokens / phases["rollout"],
        "veto_rate": 1 - corrected.keep.float().mean().item(),
        "kv_saved": float(np.mean([r.kv.saved for r in rollouts])),
        "kv_peak_gib": engine.pool.peak * engine.page * engine.geometry.kv_token_bytes / 2**30,
        "learner_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def random_sequences(rng: np.random.Generator, vocabulary: int, lengths: list[int]) -> list[Rollout]:
    return [
        Rollout(
            rng.integers(0, vocabulary, 128).tolist(), rng.integers(0, vocabulary, n - 128).tolist(), None, "length"
        )
        for n in lengths
    ]


def learner_speed(ceilings: Ceilings) -> list[dict]:
    """16k packed tokens of 1-4k sequences, one optimizer step of four micro-batches, qwen2.5-1.5b."""
    found = []
    rng = np.random.default_rng(0)
    for settings in ({"compile": True, "activation_checkpointing": False}, {"compile": True}, {}):
        loaded = load_model("shape:qwen2.5-1.5b", device="cuda")
        learner = Learner(loaded.model, LearnerSettings(lr=1e-6, **settings))
        lengths = LENGTHS * 4
        sequences = random_sequences(rng, 151936, lengths)

        def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, packed: Packed) -> tuple:
            return -logprobs.mean() / 4, {}

        learner.update(sequences, loss_fn, 1.0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        learner.update(sequences, loss_fn, 1.0)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        flops = learner.flops(sequences)
        start = time.perf_counter()
        learner.score(sequences, 1.0)
        scoring = time.perf_counter() - start
        found.append(
            {
                "kind": "learner",
                "settings": settings or "defaults",
                "tokens": sum(lengths),
                "seconds": seconds,
                "mfu": flops.total / seconds / ceilings.matrix,
                "mfu_without_head": (flops.total - flops.head) / seconds / ceilings.matrix,
                "score_s": scoring,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                "full_logits_gib": 16384 * 151936 * 4 / 2**30,
            }
        )
        print(json.dumps(found[-1]), flush=True)
        del learner, loaded
        release()
    return found


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


def small_step(ceilings: Ceilings) -> list[dict]:
    """SmolLM2-135M's shape: 64 prompts of 100 tokens × 8 rollouts of 256, two updates; dense and rkv 64+16."""
    rng = np.random.default_rng(0)
    loaded = load_model("shape:smollm2-135m", device="cuda")
    engine = Engine(loaded, kv_memory="20GiB", max_rows=512, max_length=1024)
    learner = Learner(
        loaded.model, LearnerSettings(lr=1e-6, compile=True, activation_checkpointing=False, token_budget=32768)
    )
    prompts = [rng.integers(0, 49152, 100).tolist() for _ in range(64)]
    found = []
    for sparsity in (Sparsity(), Sparsity(evict=Evict("rkv", budget=64, buffer=16))):
        correction = Correction.none() if sparsity.dense else Correction.sparse_rl()
        for _ in range(3):
            row = one_step(loaded, engine, learner, sparsity, prompts, [256] * 512, 8, 2, correction)
            print(json.dumps(row), flush=True)
        found.append({"kind": "step smollm2-135m", **row})
    return found


def paper_step(ceilings: Ceilings) -> list[dict]:
    """The paper's scale, qwen2.5-1.5b: 128 prompts × 8 rollouts of up to 4096 tokens (mean about 1000), 4 updates."""
    rng = np.random.default_rng(0)
    loaded = load_model("shape:qwen2.5-1.5b", device="cuda")
    engine = Engine(loaded, kv_memory="40GiB", max_rows=1024, max_length=4608)
    learner = Learner(loaded.model, LearnerSettings(lr=1e-6, compile=True, token_budget=16384))
    prompts = [rng.integers(0, 151936, int(n)).tolist() for n in rng.integers(80, 240, 128)]
    lengths = np.clip(rng.lognormal(6.6, 0.8, 1024), 32, 4096).astype(int).tolist()
    sparsity = Sparsity(evict=Evict("rkv", budget=512, buffer=128, window=8, sinks=0))
    first = one_step(
        loaded, engine, learner, sparsity, prompts, [min(n, 700) for n in lengths], 8, 4, Correction.sparse_rl()
    )
    del first
    row = one_step(loaded, engine, learner, sparsity, prompts, lengths, 8, 4, Correction.sparse_rl())
    return [{"kind": "step at the paper's scale, qwen2.5-1.5b", **row}]


def checked_step(ceilings: Ceilings) -> Iterator[dict]:
    """qwen2.5-1.5b, 32 prompts of 128 tokens × 8 rollouts of 2048, one update: measured, and as `--check` estimates."""
    rng, answer = np.random.default_rng(0), 2048
    loaded = load_model("shape:qwen2.5-1.5b", device="cuda")
    engine = Engine(loaded, kv_memory="40GiB", max_rows=256, max_length=2304)
    learner = Learner(loaded.model, LearnerSettings(lr=1e-6))
    prompts = [rng.integers(0, 151936, 128).tolist() for _ in range(32)]
    for name in ("dense", "rkv:512+128"):
        sparsity = Sparsity.parse(name)
        correction = Correction.none() if sparsity.dense else Correction.sparse_rl()
        for tokens in (700, answer):  # the first compiles and captures
            row = one_step(loaded, engine, learner, sparsity, prompts, [tokens] * 256, 8, 1, correction)
        tree = {
            "out": "runs/none",
            "model": {"source": "shape:qwen2.5-1.5b", "dtype": "bfloat16"},
            "data": {"source": "gsm8k", "max_prompt_tokens": 128},
            "rewards": {"use": "math"},
            "sparsity": name,
            "sampling": {"prompts": 32, "n": 8, "max_new_tokens": answer},
        }
        config = read_tree(tree)
        speed = plan_speed(config, plan_memory(config), ceilings, 40 << 30)
        estimate = {"rollout_s": speed.rollouts.seconds, "score_s": speed.score, "update_s": speed.update}
        ratio = speed.sparse.tokens_per_second / speed.dense.tokens_per_second
        estimate |= {"step_s": speed.step, "pays_from": speed.pays_from, "sparse_to_dense": ratio}
        yield {"kind": "step qwen2.5-1.5b", **row, "estimate": estimate}


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
    "learner": learner_speed,
    "residual": residual_cost,
    "paper": paper_step,
    "check": checked_step,
    "gsm8k": gsm8k_step,
}


if __name__ == "__main__":
    parser = arguments(SECTIONS, __doc__)
    parser.add_argument("--data-dir", help="of gsm8k, as data.data_dir; by default the Hugging Face hub's")
    options = parser.parse_args()
    ceilings, machine = measured_machine()
    gsm8k = partial(gsm8k_step, data_dir=options.data_dir)
    sections = {name: partial(section, ceilings) for name, section in {**SECTIONS, "gsm8k": gsm8k}.items()}
    record(sections, options, machine)
