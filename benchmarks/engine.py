"""The engine's numbers on one GPU: `python benchmarks/engine.py --out benchmarks/results/engine-h200.json`.

Random weights of real shapes, bf16. Each section runs alone with `--only steps,churn,...`; results are merged into
the output file; `python benchmarks/table.py` makes the Markdown tables of docs/benchmarks.md from it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from sections import release, run

from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.bench.bench import (
    Ceilings,
    churn,
    decode_step,
    idle_share,
    packed_scoring,
    rollouts,
    timed,
)
from alula.engine.block_manager import pages_for
from alula.sparsity.policy import DENSE

DEVICE = torch.device("cuda")
SMALL, LARGE = "shape:qwen3-1.7b", "shape:qwen3-8b"


def engine(source: str, kv_memory: str, **options: object) -> Engine:
    return Engine.load(source, device="cuda", kv_memory=kv_memory, **options)  # type: ignore[arg-type]


def steps(ceilings: Ceilings) -> list[dict]:
    one = engine(SMALL, "62GiB", max_rows=64)
    sparse = Sparsity(select=Select("block-topk", budget=64 * 16, block=16, dense_layers=2))
    found = [
        decode_step(one, b, c, s, ceilings)
        for b, c, s in [(64, 1024, DENSE), (64, 8192, DENSE), (16, 32768, DENSE), (16, 32768, sparse)]
    ]
    found.append(idle_share(one, 64, 1024, 256))
    found.append(packed_scoring(one, 64, 1024, ceilings))
    return found


def large(ceilings: Ceilings) -> list[dict]:
    return [decode_step(engine(LARGE, "74GiB", max_rows=64), 64, 8192, DENSE, ceilings)]


def kernel(ceilings: Ceilings) -> list[dict]:
    """The paged decode kernel alone, 64 × 8k, on pages in random order."""
    from alula.ops.paged_attention import paged_attention

    batch, context, page, q_heads, kv_heads, dim = 64, 8192, 16, 16, 8, 128
    count = batch * context // page
    keys, values = (
        torch.empty(count + 1, kv_heads, page, dim, device=DEVICE, dtype=torch.bfloat16).normal_() for _ in "kv"
    )
    table = (torch.randperm(count, device=DEVICE) + 1).int().view(batch, 1, -1)
    tokens = torch.full((batch, 1), context, device=DEVICE, dtype=torch.int32)
    q = torch.randn(batch, q_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    run = lambda: paged_attention(q, keys, values, table, tokens, dim**-0.5, context)  # noqa: E731
    timed(run, DEVICE, 5)
    seconds = min(timed(run, DEVICE, 20) for _ in range(3))
    rate = 2 * keys[1:].numel() * 2 / seconds
    return [
        {
            "kind": "paged decode kernel",
            "batch": batch,
            "context": context,
            "us": seconds * 1e6,
            "bytes_per_s": rate,
            "of_copy": rate / ceilings.bandwidth,
        }
    ]


def transformers_generate(ceilings: Ceilings) -> list[dict]:
    """Against transformers' own generate with SDPA: 64 prompts of 1k tokens, 256 new ones."""
    from alula.models.load import load_model

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


def peak(ceilings: Ceilings) -> list[dict]:
    one = engine(SMALL, "16GiB", max_rows=64)
    row = rollouts(one, 64, 200, 1800, Sparsity(evict=Evict("rkv", budget=512)))
    row["peak_pages_allowed"] = pages_for(512 + 128, one.page) + 1
    return [row]


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


def agreement(ceilings: Ceilings) -> list[dict]:
    """Dense engine log-probs against `score`, on samples of a real model (path in ALULA_SMOLLM2), compiled."""
    path = os.environ.get("ALULA_SMOLLM2")
    if not path:
        print("agreement: set ALULA_SMOLLM2 to SmolLM2-135M-Instruct's GGUF file", file=sys.stderr)
        return []
    asked = [
        "Tell me about birds.",
        "What is 17 * 23? Think step by step.",
        "Write a short story about a lighthouse.",
        "Why is the sky blue?",
    ]
    prompts = [[{"role": "user", "content": text}] for text in asked]
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


SECTIONS = {
    "ready": ready,
    "kernel": kernel,
    "steps": steps,
    "large": large,
    "transformers": transformers_generate,
    "peak": peak,
    "pool": pool,
    "agreement": agreement,
}


if __name__ == "__main__":
    run(SECTIONS, __doc__)
