"""Throughput of `alula serve` against `Engine.generate` on the same requests.

    python benchmarks/serve.py --out benchmarks/results/serve-h200.json
    python benchmarks/serve.py --model shape:tiny-qwen3 --device cpu --kv-memory 64MiB --requests 16 --prompt 32 \
        --new 64 --sparsity dense --sparsity rkv:48+16 --out tiny.json

The server is a process of its own, this script is its client: one HTTP request per prompt, all at once, with log-probs.
A round ends when the last answer's last byte has come; answers are parsed and counted after it. Before it, both sides
warm up with the same requests: every batch size, every context size and the evictions that a round will have, then a
short round. All prompts are new, so that the server's prefix cache is of no use. The file is written after each side.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from alula import Engine, Sampling, Sparsity
from alula.cpus import set_threads
from alula.engine.engine import BUCKETS

FEW = 16
"""New tokens of a request that only warms up: two chunks of decode steps."""
SMALLEST_CONTEXT = 512
"""A decode step is captured for contexts up to this many tokens, up to twice as many, and so on."""


@dataclass
class Round:
    """Requests that are sent together."""

    prompts: list[list[int]]
    new: int
    n: int = 1

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.n * self.new


Run = Callable[[str, Round], float]
"""Serves a round under a policy; returns its seconds."""


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-1.7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sparsity", action="append", help="repeatable; default: dense and rkv:512+128")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--new", type=int, default=1024, help="new tokens")
    parser.add_argument("--rounds", type=int, default=1, help="measured rounds; the fastest counts")
    parser.add_argument("--kv-memory", default="40GiB", help="of each side: the device holds both at a time")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    policies = args.sparsity or ["dense", "rkv:512+128"]
    result: dict[str, Any] = {name: value for name, value in vars(args).items() if name not in ("out", "sparsity")}
    result["rows"] = []

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - start, 1)
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    with serving(args) as address:
        engine = Engine.load(args.model, device=args.device, max_rows=args.requests, kv_memory=args.kv_memory)
        set_threads(engine.model)  # as the server does
        result["machine"] = machine(args.device)
        sides: dict[str, Run] = {"server": over_http(address()), "generate": in_process(engine)}
        result["loaded_seconds"] = round(time.perf_counter() - start, 1)
        for policy in policies:
            row: dict[str, Any] = {"sparsity": policy}
            result["rows"].append(row)
            for side, run in sides.items():
                row |= measure(side, run, args, policy, engine.model.config.vocab_size)
                save()
            row["share"] = max(row["server"]) / max(row["generate"])
            save()
            rates = ", ".join(f"{side} {max(row[side]):,.0f} tokens/s" for side in sides)
            print(f"{policy:16} {rates}: {row['share']:.1%}", flush=True)
    save()


def measure(side: str, run: Run, args: argparse.Namespace, policy: str, vocabulary: int) -> dict[str, Any]:
    """Tokens per second of each measured round, and the seconds of the warm-up."""
    rng = np.random.default_rng([*policy.encode(), *side.encode()])
    start = time.perf_counter()
    for round_ in warm_up(rng, vocabulary, args, Sparsity.parse(policy)):
        run(policy, round_)
    seconds = time.perf_counter() - start
    rounds = [Round(prompts(rng, vocabulary, args.requests, args.prompt), args.new) for _ in range(args.rounds)]
    return {side: [r.tokens / run(policy, r) for r in rounds], f"{side}_warm_up_seconds": round(seconds, 1)}


def warm_up(rng: np.random.Generator, vocabulary: int, args: argparse.Namespace, policy: Sparsity) -> Iterator[Round]:
    """All that a measured round compiles or captures. The rows of a batch are samples of one prompt: that is quick."""
    for rows in (bucket for bucket in BUCKETS if bucket < args.requests):
        yield Round(prompts(rng, vocabulary, 1, args.prompt), FEW, rows)
    evict = policy.evict
    edges = {evict.budget + evict.buffer} if evict and isinstance(evict.budget, int) else set()
    edge = SMALLEST_CONTEXT
    while edge < args.prompt + args.new:
        edges.add(edge)
        edge *= 2
    for edge in sorted(edges):
        yield Round(prompts(rng, vocabulary, 1, max(1, edge - FEW // 2)), FEW, args.requests)
    yield Round(prompts(rng, vocabulary, args.requests, args.prompt), max(FEW, args.new // 8))


def prompts(rng: np.random.Generator, vocabulary: int, count: int, length: int) -> list[list[int]]:
    return rng.integers(0, vocabulary, (count, length)).tolist()


def in_process(engine: Engine) -> Run:
    def run(policy: str, round_: Round) -> float:
        sampling = Sampling(n=round_.n, max_new_tokens=round_.new, ignore_eos=True)
        start = time.perf_counter()
        rollouts = engine.generate(round_.prompts, sampling, Sparsity.parse(policy), progress=False)
        seconds = time.perf_counter() - start
        assert sum(map(len, rollouts)) == round_.tokens
        return seconds

    return run


def over_http(address: str) -> Run:
    url = urlsplit(address)
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"

    async def post(body: bytes) -> bytes:
        """One request. A library would spend more time on 256 connections than the server does."""
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        return answer

    async def post_all(bodies: list[bytes]) -> list[bytes]:
        return await asyncio.wait_for(asyncio.gather(*map(post, bodies)), 300)

    def run(policy: str, round_: Round) -> float:
        params = {"max_tokens": round_.new, "n": round_.n, "ignore_eos": True, "logprobs": 1}
        bodies = [
            json.dumps({"token_ids": prompt, "sampling_params": params, "sparsity": policy}).encode()
            for prompt in round_.prompts
        ]
        start = time.perf_counter()
        answers = asyncio.run(post_all(bodies))
        seconds = time.perf_counter() - start
        assert sum(map(checked_tokens, answers)) == round_.tokens
        return seconds

    return run


def checked_tokens(answer: bytes) -> int:
    """Tokens of an answer, each with its log-prob."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server answered: {answer[:500].decode()}")
    choices = json.loads(body)["choices"]
    assert all(len(choice["logprobs"]["content"]) == len(choice["token_ids"]) for choice in choices)
    return sum(len(choice["token_ids"]) for choice in choices)


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[Callable[[], str]]:
    """A server that loads in the background; the function waits for it and returns its address."""
    command = [sys.executable, "-u", "-m", "alula", "serve", args.model, "--port", "0", "--device", args.device]
    command += ["--max-rows", str(args.requests), "--kv-memory", args.kv_memory]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)

    def address() -> str:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://\S+?(?=;)", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line}")
        return found[0]

    try:
        yield address
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def machine(device: str) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{os.cpu_count()} cores"
    return {"device": name, "torch": torch.__version__}


if __name__ == "__main__":
    main()
