"""The engine's numbers on one GPU: `python benchmarks/engine.py --out benchmarks/results/engine-h200.json`.

Random weights of real shapes, bf16. Each section runs alone with `--only steps,pool,...`; results are merged into
the output file; `python benchmarks/table.py` makes the Markdown tables of docs/benchmarks.md from it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from churn import churn
from sections import release, run

from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.bench.ceilings import Ceilings, timed
from alula.bench.decode import decode_step, rollouts
from alula.engine.block_manager import pages_for
from alula.engine.prefill import forward_packed
from alula.engine.rollout import Rollout
from alula.models.load import load_model
from alula.ops.eight_bits import DTYPES, quantise
from alula.ops.sample import sample
from alula.sparsity.policy import DENSE

DEVICE = torch.device("cuda")
SMALL, LARGE = "shape:qwen3-1.7b", "shape:qwen3-8b"


def engine(source: str, kv_memory: str, **options: object) -> Engine:
    return Engine.load(source, device="cuda", kv_memory=kv_memory, **options)  # type: ignore[arg-type]


EVICTING = Sparsity(evict=Evict("rkv", budget=512, buffer=128))
SELECTING = Sparsity(select=Select("block-topk", budget=64 * 16, block=16, dense_layers=2))


def stored_as(*dtypes: str | None) -> Iterator[Engine]:
    """One engine after another on the same weights, which differ in how they store KV."""
    loaded = load_model(SMALL, device="cuda")
    for dtype in dtypes:
        one = Engine(loaded, kv_memory="62GiB", kv_dtype=dtype, max_rows=64, max_length=32768 + 64)
        yield one
        one.sleep()
        del one
        release()


def steps(ceilings: Ceilings) -> Iterator[dict]:
    """Decode steps with KV in bfloat16 and in 8 bits, in one process."""
    for one in stored_as(None, *DTYPES):
        for batch, context in ((64, 8192), (64, 1024), (16, 32768)):
            yield decode_step(one, batch, context, DENSE, ceilings)
        yield decode_step(one, 16, 32768, SELECTING, ceilings)


def whole_rollouts(ceilings: Ceilings) -> Iterator[dict]:
    """Rollouts with KV in bfloat16 and in int8, in one process."""
    for one in stored_as(None, "int8"):
        for policy in (DENSE, EVICTING):
            rollouts(one, 64, 128, 2048, policy)  # captures its graphs
            yield rollouts(one, 64, 128, 2048, policy)


def prefill(ceilings: Ceilings) -> list[dict]:
    return [packed_scoring(engine(SMALL, "62GiB", max_rows=64), 64, 1024, ceilings)]


def packed_scoring(engine: Engine, sequences: int, length: int, ceilings: Ceilings) -> dict[str, Any]:
    """Dense scoring of whole sequences, packed: share of the measured matrix rate."""
    rng = np.random.default_rng(0)
    prompt, config = 32, engine.model.config
    made = []
    for _ in range(sequences):
        ids = rng.integers(0, config.vocab_size, length).tolist()
        made.append(Rollout(ids[:prompt], ids[prompt:], None, "length"))
    engine.score(made[:1])
    engine.score(made)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    engine.score(made)
    scoring = time.perf_counter() - start
    packed = [r.prompt_ids + r.token_ids for r in made]
    per_pass = max(1, engine.prefill_tokens // length)
    batches = [packed[i : i + per_pass] for i in range(0, len(packed), per_pass)]
    prefill = timed(lambda: [forward_packed(engine.runner, b) for b in batches], engine.device, 2)
    model: Any = engine.model
    head = model.get_output_embeddings().weight.numel()
    table = model.get_input_embeddings().weight.numel()
    total = sum(p.numel() for p in model.parameters())
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    body = total - table - (0 if tied else head)
    tokens = sequences * length
    geometry = engine.geometry
    attention = 2 * 2 * geometry.layers * geometry.attention_width * sequences * length * length / 2
    work = 2 * body * tokens + attention
    return {
        "kind": "packed prefill and score",
        "model": engine.name,
        "sequences": sequences,
        "length": length,
        "prefill_s": prefill,
        "score_s": scoring,
        "prefill_tokens_per_s": tokens / prefill,
        "prefill_of_matrix_rate": work / prefill / ceilings.matrix,
        "score_of_matrix_rate": (work + 2 * head * tokens) / scoring / ceilings.matrix,
    }


def large(ceilings: Ceilings) -> list[dict]:
    return [decode_step(engine(LARGE, "74GiB", max_rows=64), 64, 8192, DENSE, ceilings)]


def kernel(ceilings: Ceilings) -> Iterator[dict]:
    """The paged decode kernel alone over KV in bfloat16 and in 8 bits, 64 × 8k, random KV, pages in random order."""
    for kv_dtype in (None, *DTYPES):
        yield timed_kernel(ceilings, kv_dtype)


def timed_kernel(ceilings: Ceilings, kv_dtype: str | None) -> dict:
    from alula.ops.paged_attention import paged_attention

    batch, context, page, q_heads, kv_heads, dim = 64, 8192, 16, 16, 8, 128
    count = batch * context // page
    keys, values = (
        torch.empty(count + 1, kv_heads, page, dim, device=DEVICE, dtype=torch.bfloat16).normal_() for _ in "kv"
    )
    table = (torch.randperm(count, device=DEVICE) + 1).int().view(batch, 1, -1)
    tokens = torch.full((batch, 1), context, device=DEVICE, dtype=torch.int32)
    q = torch.randn(batch, q_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    scales = None
    if kv_dtype:
        (keys, key_scales), (values, value_scales) = (quantise(x, DTYPES[kv_dtype]) for x in (keys, values))
        scales = torch.stack([key_scales, value_scales])
    run = lambda: paged_attention(q, keys, values, table, tokens, dim**-0.5, context, scales)  # noqa: E731
    timed(run, DEVICE, 5)
    seconds = min(timed(run, DEVICE, 20) for _ in range(3))
    rate = (2 * keys[1:].nbytes + (scales[:, 1:].nbytes if scales is not None else 0)) / seconds
    return {
        "kind": "paged decode kernel",
        "batch": batch,
        "context": context,
        "kv": "random",
        "kv_dtype": kv_dtype,
        "us": seconds * 1e6,
        "bytes_per_s": rate,
        "of_copy": rate / ceilings.bandwidth,
    }


def transformers_generate(ceilings: Ceilings) -> list[dict]:
    """Against transformers' own generate with SDPA: 64 prompts of 1k tokens, 256 new ones."""
    batch, prompt, new = 64, 1024, 256
    loaded = load_model(SMALL, device="cuda")
    model = loaded.model
    model.config._attn_implementation = "sdpa"
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt), device=DEVICE)
    options = {"do_sample": True, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    model.generate(ids, max_new_tokens=4, **options)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=new, **options)
    torch.cuda.synchronize()
    theirs = time.perf_counter() - start
    ours_engine = Engine(loaded, kv_memory="20GiB", max_rows=64)
    rollouts(ours_engine, batch, prompt, new, DENSE)  # captures and compiles
    ours = rollouts(ours_engine, batch, prompt, new, DENSE, seed=1)
    return [
        {
            "kind": "against transformers",
            "batch": batch,
            "prompt": prompt,
            "new_tokens": new,
            "transformers_s": theirs,
            "alula_s": ours["seconds"],
            "ratio": theirs / ours["seconds"],
        }
    ]


def pool(ceilings: Ceilings) -> list[dict]:
    """One 16 GiB KV pool, sequences of every age up to 16k: dense on demand against eviction."""
    longest, found = 16384, []
    for sparsity in (
        DENSE,
        *(Sparsity(evict=Evict(m, budget=b)) for m, b in (("rkv", 2048), ("rkv", 512), ("snapkv", 512))),
    ):
        tokens, page = (16 << 30) // 114688, 16  # a token of this model's KV is 114,688 bytes
        rows = 2 * tokens // longest  # dense: what fits at the mean age, 8k
        if sparsity.evict:
            each = pages_for(sparsity.evict.budget + sparsity.evict.buffer, page) + 1  # type: ignore[operator]
            rows = tokens // page // each - 2
        one = engine(SMALL, "16GiB", max_rows=rows, max_length=longest + 64)
        found.append(churn(one, sparsity, longest=longest, rows=rows, steps=1024))
        print(json.dumps(found[-1]), flush=True)
        del one
        release()
    for row in found[1:]:
        row["against_dense"] = row["tokens_per_s"] / found[0]["tokens_per_s"]
    return found


READY = """
import time; start = time.perf_counter()
from alula import Engine
from alula import Sampling
e = Engine.load("{source}", device="cuda", kv_memory="20GiB", max_rows=64); loaded = time.perf_counter()
e.generate([[1, 2, 3]] * 64, Sampling(max_new_tokens=32, ignore_eos=True), progress=False)
print("READY", loaded - start, time.perf_counter() - loaded)
"""


def ready(ceilings: Ceilings) -> list[dict]:
    """Compile and capture in a fresh process with empty caches, until the first 64 rollouts are done."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for caches in ("empty", "warm"):
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder + "/triton"}
            done = subprocess.run(
                [sys.executable, "-c", READY.format(source=SMALL)],
                env=environment,
                text=True,
                capture_output=True,
                check=True,
            )
            load, first = map(float, done.stdout.split("READY")[1].split())
            found.append(
                {"kind": "ready", "model": SMALL, "caches": caches, "load_s": load, "compile_and_capture_s": first}
            )
    return found


ASKED = [
    "Tell me about birds.",
    "What is 17 * 23? Think step by step.",
    "Write a short story about a lighthouse.",
    "Why is the sky blue?",
]


def agreement(ceilings: Ceilings) -> list[dict]:
    """Dense engine log-probs against `score`, on samples of a real model (path in ALULA_SMOLLM2), compiled."""
    path = os.environ.get("ALULA_SMOLLM2")
    if not path:
        print("agreement: set ALULA_SMOLLM2 to SmolLM2-135M-Instruct's GGUF file", file=sys.stderr)
        return []
    prompts = [[{"role": "user", "content": text}] for text in ASKED]
    found = []
    for dtype in ("bfloat16", "float16"):
        one = engine(path, "8GiB", max_rows=128, dtype=dtype)
        made = one.generate(prompts, Sampling(n=16, max_new_tokens=384, seed=1), progress=False)  # type: ignore[arg-type]
        gap = torch.cat([(r.logprobs - s.logprobs).abs() for r, s in zip(made, one.score(made))])
        found.append(
            {
                "kind": "engine against score",
                "model": one.name,
                "dtype": dtype,
                "tokens": len(gap),
                "mean": gap.mean().item(),
                "p99": gap.quantile(0.99).item(),
                "max": gap.max().item(),
            }
        )
    return found


def sampler(ceilings: Ceilings) -> list[dict]:
    """The sampler alone, in a captured graph. Its floor reads every logit once."""
    found = []
    for batch, vocabulary in ((256, 151936), (64, 151936), (256, 49152)):
        logits = 3 * torch.randn(batch, vocabulary, device=DEVICE)
        arguments = (
            logits,
            torch.ones(batch, device=DEVICE),
            torch.randint(2**62, (batch,), device=DEVICE),
            torch.arange(batch, device=DEVICE),
            torch.full((batch,), -1, device=DEVICE),
        )
        sample(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sample(*arguments)
        timed(graph.replay, DEVICE, 5)
        seconds = min(timed(graph.replay, DEVICE, 50) for _ in range(3))
        floor = logits.numel() * 4 / ceilings.bandwidth
        found.append(
            {"kind": "sampler", "batch": batch, "vocabulary": vocabulary, "us": seconds * 1e6, "floor_us": floor * 1e6}
        )
    return found


def draws(ceilings: Ceilings) -> Iterator[dict]:
    """How often a draw depends on the batch: the same requests with two numbers of rows, until tokens first differ.

    On samples of a real model (path in ALULA_SMOLLM2).
    """
    path = os.environ.get("ALULA_SMOLLM2")
    if not path:
        print("draws: set ALULA_SMOLLM2 to SmolLM2-135M-Instruct's GGUF file", file=sys.stderr)
        return
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in ASKED]
    sampling = Sampling(n=128, max_new_tokens=256, ignore_eos=True)
    rkv, knorm = (Sparsity(evict=Evict(method, budget=96, buffer=32)) for method in ("rkv", "knorm"))
    for dtype, policies in (("float32", (DENSE, rkv, knorm)), ("bfloat16", (DENSE,)), ("float16", (DENSE,))):
        loaded = load_model(path, device="cuda", dtype=dtype)
        engines = [Engine(loaded, kv_memory="8GiB", max_rows=rows, compiled=False) for rows in (512, 48)]
        for policy in policies:
            compared = different = 0
            for a, b in zip(*(one.generate(prompts, sampling, policy, progress=False) for one in engines)):
                equal = [x == y for x, y in zip(a.token_ids, b.token_ids)]
                compared += equal.index(False) + 1 if False in equal else len(equal)
                different += False in equal
            yield {
                "kind": "draws",
                "model": Path(path).stem,
                "dtype": dtype,
                "sparsity": policy.describe(),
                "compared": compared,
                "different": different,
            }


SECTIONS = {
    "ready": ready,
    "kernel": kernel,
    "steps": steps,
    "rollouts": whole_rollouts,
    "prefill": prefill,
    "large": large,
    "transformers": transformers_generate,
    "pool": pool,
    "agreement": agreement,
    "sampler": sampler,
    "draws": draws,
}


if __name__ == "__main__":
    run(SECTIONS, __doc__)
