"""CPU threads against model size: seconds of generating and of scoring a batch, for `SMALL_MODEL` in alula/cpus.py.

    python benchmarks/threads.py --out threads.json

Every row is the fastest of three repetitions, since other work on the machine can only add time.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from alula.cpus import available_cpus
from alula.engine.engine import Engine
from alula.engine.rollout import Sampling
from alula.learner.learner import Learner
from alula.models.load import LoadedModel
from alula.settings import LearnerSettings
from alula.sparsity.policy import DENSE

SIZES = ((64, 3), (128, 4), (256, 6), (384, 8), (512, 8), (768, 12))
"""Hidden size and layers."""
ROWS, PROMPT, ANSWER, REPEATS = 32, 16, 32, 3


def model_of(hidden: int, layers: int) -> LoadedModel:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16 if hidden < 512 else hidden // 64,
        vocab_size=512,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    return LoadedModel(AutoModelForCausalLM.from_config(config).eval(), None, f"{hidden}x{layers}", ())


def measure(loaded: LoadedModel, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    engine = Engine(loaded, kv_memory="64MiB", max_rows=ROWS, max_length=PROMPT + ANSWER)
    learner = Learner(loaded.model, LearnerSettings(activation_checkpointing=False), total_steps=100)
    prompts = [[1 + (i + j) % 500 for j in range(PROMPT)] for i in range(ROWS)]
    seconds: dict[str, list[float]] = {"generate": [], "score": []}
    for _ in range(REPEATS):
        start = time.perf_counter()
        rollouts = engine.generate(prompts, Sampling(max_new_tokens=ANSWER, ignore_eos=True), DENSE, progress=False)
        seconds["generate"].append(time.perf_counter() - start)
        start = time.perf_counter()
        learner.score(rollouts)
        seconds["score"].append(time.perf_counter() - start)
    return {name: min(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("threads.json"))
    arguments = parser.parse_args()
    counts = [count for count in (1, 2, 4, 8, 16) if count <= available_cpus()]
    rows = []
    for hidden, layers in SIZES:
        loaded = model_of(hidden, layers)
        parameters = sum(p.numel() for p in loaded.model.parameters())
        for threads in counts:
            row = {"parameters": parameters, "threads": threads, "load": os.getloadavg()[0], **measure(loaded, threads)}
            rows.append({"cpus": available_cpus(), **row})
            print(json.dumps(rows[-1]), flush=True)
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
