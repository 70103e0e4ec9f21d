"""Throughput of `alula serve` against `Engine.generate` on the same requests.

    python benchmarks/serve.py --out benchmarks/results/serve-h200.json
    python benchmarks/serve.py --model shape:tiny-qwen3 --device cpu --requests 16 --prompt 32 --new 64 --out tiny.json

The server is a process of its own, this script is its client: one HTTP request per prompt, all at once, with log-probs.
Both sides warm up first. Every round has new prompts, so that the server's prefix cache is of no use.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from alula import Engine, Sampling, Sparsity

Prompts = list[list[int]]
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-1.7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sparsity", action="append", help="repeatable; default: dense and rkv:512+128")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--new", type=int, default=1024, help="new tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-memory", default=None)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    policies = args.sparsity or ["dense", "rkv:512+128"]
    result: dict[str, Any] = {name: value for name, value in vars(args).items() if name not in ("out", "sparsity")}
    result |= {"machine": machine(args.device), "rows": []}
    served = measure_server(args, policies)
    engine = Engine.load(args.model, device=args.device, max_rows=args.requests, kv_memory=args.kv_memory)
    for policy in policies:
        row = {"sparsity": policy, "server": served[policy], "generate": measure_generate(engine, args, policy)}
        row["share"] = max(row["server"]) / max(row["generate"])
        result["rows"].append(row)
        print(
            f"{policy:16} server {max(row['server']):,.0f} tokens/s, generate {max(row['generate']):,.0f} tokens/s: "
            f"{row['share']:.1%}",
            flush=True,
        )
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def rounds(args: argparse.Namespace, vocabulary: int, policy: str) -> list[tuple[Prompts, int]]:
    """Prompts and new tokens of each round; the first ones warm up."""
    rng = np.random.default_rng(list(policy.encode()))
    lengths = [max(1, args.new // 8)] * WARM_UP + [args.new] * args.rounds
    return [(rng.integers(0, vocabulary, (args.requests, args.prompt)).tolist(), new) for new in lengths]


def measure_generate(engine: Engine, args: argparse.Namespace, policy: str) -> list[float]:
    """Tokens per second of each measured round."""
    rates = []
    for prompts, new in rounds(args, engine.model.config.vocab_size, policy):
        start = time.perf_counter()
        sampling = Sampling(max_new_tokens=new, ignore_eos=True)
        rollouts = engine.generate(prompts, sampling, Sparsity.parse(policy), progress=False)
        rates.append(sum(map(len, rollouts)) / (time.perf_counter() - start))
    return rates[WARM_UP:]


def measure_server(args: argparse.Namespace, policies: list[str]) -> dict[str, list[float]]:
    """The same over HTTP, by policy."""
    from alula.models.shapes import shape

    vocabulary = int(shape(args.model.removeprefix("shape:"))["vocab_size"])
    command = [sys.executable, "-u", "-m", "alula", "serve", args.model, "--port", "0", "--device", args.device]
    command += ["--max-rows", str(args.requests)]
    command += ["--kv-memory", args.kv_memory] if args.kv_memory else []
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://\S+?(?=;)", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line}")
        work = {policy: rounds(args, vocabulary, policy) for policy in policies}
        return {policy: asyncio.run(load(found[0], policy, work[policy]))[WARM_UP:] for policy in policies}
    finally:
        server.terminate()
        server.wait(60)


async def load(address: str, policy: str, work: list[tuple[Prompts, int]]) -> list[float]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
        for _ in range(600):
            try:
                if (await client.get("/health")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)
        rates = []
        for prompts, new in work:
            start = time.perf_counter()
            counts = await asyncio.gather(*(generate(client, policy, prompt, new) for prompt in prompts))
            rates.append(sum(counts) / (time.perf_counter() - start))
        return rates


async def generate(client: httpx.AsyncClient, policy: str, prompt: list[int], new: int) -> int:
    params = {"max_tokens": new, "ignore_eos": True, "logprobs": 1}
    body = {"token_ids": prompt, "sampling_params": params, "sparsity": policy}
    answer = await client.post("/inference/v1/generate", json=body)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == new
    return len(choice["token_ids"])


def machine(device: str) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{os.cpu_count()} cores"
    return {"device": name, "torch": torch.__version__}


if __name__ == "__main__":
    main()
