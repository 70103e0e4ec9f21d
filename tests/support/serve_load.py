"""Load on a real server: many clients of mixed sizes, policies and routes, some of which hang up midway.

    python tests/support/serve_load.py --clients 200 --seconds 60 --out benchmarks/results/serve-load.json

The server is a process of its own, with a tiny model that reads bytes. Every request is answered or cancelled, no page
is left at the end, and the server's memory stays flat.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from served import byte_model

POLICIES = ("dense", "rkv:24+8,window=4,sinks=2", "streaming:32+8", "snapkv:24+8,window=4", "quest:64,block=16")


class Load:
    """Clients that send one request after the other until the time is over."""

    def __init__(self, address: str, clients: int, seconds: float) -> None:
        self.address, self.clients, self.seconds = address, clients, seconds
        self.outcomes: Counter[str] = Counter()
        self.sent = self.tokens = 0

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        self.deadline = time.monotonic() + self.seconds
        async with httpx.AsyncClient(base_url=self.address, timeout=None, limits=limits) as client:
            await asyncio.gather(*(self.client(client, random.Random(i)) for i in range(self.clients)))

    async def client(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while time.monotonic() < self.deadline:
            self.sent += 1
            leave = rng.uniform(0.0, 4.0) if rng.random() < 0.1 else None
            try:
                async with asyncio.timeout(leave):
                    self.outcomes[await self.request(client, rng)] += 1
            except TimeoutError:
                self.outcomes["hung up"] += 1

    async def request(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        sampling = {"max_tokens": rng.choice((1, 4, 16, 48)), "n": rng.choice((1, 1, 2, 3)), "ignore_eos": True}
        shared = {"sparsity": rng.choice(POLICIES)}
        prompt = [rng.randrange(256) for _ in range(rng.choice((1, 7, 40, 150)))]
        kind = rng.choice(("tokens", "completion", "stream", "session"))
        if kind == "stream":
            return await self.stream(client, {"prompt": prompt, "stream": True, "logprobs": 0} | sampling | shared)
        if kind == "completion":
            answer = await client.post("/v1/completions", json={"prompt": prompt} | sampling | shared)
        elif kind == "tokens":
            body = {"token_ids": prompt, "sampling_params": sampling | {"logprobs": 1}} | shared
            answer = await client.post("/inference/v1/generate", json=body)
        else:
            return await self.session(client, prompt, sampling | {"n": 1}, shared)
        if answer.status_code == 200:
            self.check(answer.json(), sampling["max_tokens"] * sampling["n"])
        return str(answer.status_code)

    async def stream(self, client: httpx.AsyncClient, body: dict) -> str:
        count, ended = 0, False
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    count += sum(len(choice["logprobs"]["tokens"]) for choice in json.loads(line[6:])["choices"])
        assert answer.status_code != 200 or (ended and count == body["max_tokens"] * body["n"])
        self.tokens += count
        return str(answer.status_code)

    async def session(self, client: httpx.AsyncClient, prompt: list[int], sampling: dict, shared: dict) -> str:
        """Two turns, then the session is closed, also by a client that hangs up."""
        name = f"{random.randrange(1 << 60):x}"
        try:
            for expected in ("new", "continued"):
                body = {"token_ids": prompt, "sampling_params": sampling} | shared
                answer = await client.post("/inference/v1/generate", json=body, headers={"X-Session-ID": name})
                if answer.status_code != 200:
                    return str(answer.status_code)
                (choice,) = answer.json()["choices"]
                assert choice["kv"]["session"] == expected
                self.check(answer.json(), sampling["max_tokens"])
                prompt = [*prompt, *choice["token_ids"], 7]
            return "200"
        finally:
            await asyncio.shield(client.delete(f"/sessions/{name}"))

    def check(self, answer: dict, tokens: int) -> None:
        assert answer["usage"]["completion_tokens"] == tokens
        self.tokens += tokens


def metric(text: str, name: str) -> float:
    found = re.search(rf"^alula_{name} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def resident(pid: int) -> float:
    """Resident memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def measure(process: subprocess.Popen, address: str, clients: int, seconds: float) -> dict:
    memory: list[float] = []

    async def watch() -> None:
        while True:
            memory.append(round(resident(process.pid), 1))
            await asyncio.sleep(1)

    load, watcher = Load(address, clients, seconds), asyncio.create_task(watch())
    start = time.monotonic()
    await load.run()
    took = time.monotonic() - start
    watcher.cancel()
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        for _ in range(200):
            text = (await client.get("/metrics")).text
            left = {name: metric(text, name) for name in ("running_rollouts", "waiting_rollouts", "kv_pages_in_use")}
            if not any(left.values()):
                break
            await asyncio.sleep(0.1)
        aborted = re.search(r'alula_rollouts_total{finish="abort"} (\d+)', text)
        return {
            "clients": clients,
            "seconds": round(took, 1),
            "sent": load.sent,
            "outcomes": dict(load.outcomes),
            "tokens": load.tokens,
            "rollouts_aborted": int(aborted[1]) if aborted else 0,
            "left": left | {"open_sessions": metric(text, "open_sessions")},
            "memory_mib": memory,
        }


def run(clients: int, seconds: float) -> dict:
    """Start a server, load it, end it with SIGTERM."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = byte_model()
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        command = [sys.executable, "-u", "-m", "alula", "serve", folder, "--port", "0", "--device", "cpu"]
        process = subprocess.Popen(
            [*command, "--max-rows", "64", "--max-length", "512"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        found = re.search(r"http://\S+?(?=;)", process.stdout.readline())
        assert found, "the server did not start"
        try:
            result = asyncio.run(measure(process, found[0], clients, seconds))
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
    return result | {"exit_code": code}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result = run(args.clients, args.seconds)
    args.out.write_text(json.dumps(result) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "memory_mib"}, indent=1))
    failed = set(result["outcomes"]) - {"200", "hung up"} or any(result["left"].values()) or result["exit_code"]
    third = len(result["memory_mib"]) // 3
    print(f"memory: {result['memory_mib'][third]} MiB after a third of the time, {result['memory_mib'][-1]} at the end")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
