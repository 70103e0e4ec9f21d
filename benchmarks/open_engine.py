"""The open engine on one GPU: `python benchmarks/open_engine.py --out benchmarks/results/open-engine-h200.json`.

Random weights of a real shape, bf16. `sessions`: the second turn of sessions against computing the same history again.
`prefixes`: groups that arrive as separate requests, with and without shared prefixes. `mixed`: dense, evicting and
selecting requests at once, against one kind after the other.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from sections import release, run

from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.bench.ceilings import Ceilings
from alula.sparsity.policy import DENSE

MODEL = "shape:qwen3-1.7b"
RKV = Sparsity(Evict("rkv", 512, buffer=128))
QUEST = Sparsity(select=Select("quest", budget=512, block=16))
Row = dict[str, Any]


def engine(kv_memory: str, **options: Any) -> Engine:
    return Engine.load(MODEL, device="cuda", kv_memory=kv_memory, **options)


def prompts(one: Engine, count: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, one.model.config.vocab_size, (count, length)).tolist()


def seconds_of(work: Any) -> tuple[float, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def sessions(_: Ceilings) -> Iterator[Row]:
    """64 sessions; the first turn ends with `history` tokens, the second gives 256 more and samples 16."""
    for policy, history in [(DENSE, 2048), (DENSE, 8192), (RKV, 2048), (RKV, 8192), (QUEST, 8192)]:
        one = engine("80GiB", max_rows=64, max_length=10240)
        second_turn(one, policy, history)  # warms up
        yield second_turn(one, policy, history)
        del one
        release()


def second_turn(one: Engine, policy: Sparsity, history: int) -> Row:
    batch, given, new = one.max_rows, 256, 16
    first = Sampling(max_new_tokens=64, ignore_eos=True)
    second = Sampling(max_new_tokens=new, ignore_eos=True)
    for request in one.requests(prompts(one, batch, history - 64), first, policy, session=True):
        one.submit(request)
    opened = one.drain()
    for rollout, tokens in zip(opened, prompts(one, batch, given, seed=1)):
        one.extend(rollout.session, tokens, second)  # type: ignore[arg-type]
    spent, turns = seconds_of(one.drain)
    for rollout in opened:
        one.close(rollout.session)  # type: ignore[arg-type]
    histories = [r.prompt_ids + r.token_ids[: len(r) - new] for r in turns]
    again, _ = seconds_of(lambda: one.generate(histories, second, policy, progress=False))
    return {
        "kind": "second turn",
        "model": one.name,
        "sessions": batch,
        "history": history,
        "given": given,
        "new_tokens": new,
        "sparsity": policy.describe(),
        "seconds": spent,
        "again_seconds": again,
        "speedup": again / spent,
    }


def prefixes(_: Ceilings) -> Iterator[Row]:
    """512 requests, 64 prompts of 1,024 tokens with 8 samples each, 64 new tokens."""
    one = engine("80GiB", max_rows=256, max_length=2048)
    sampling, texts = Sampling(max_new_tokens=64, ignore_eos=True), prompts(one, 64, 1024)
    keys = one._scheduler._prefix_keys
    for turn, shared in enumerate((True, False, True, False)):
        one._scheduler._prefix_keys = keys if shared else lambda request: []  # type: ignore[method-assign]

        def serve() -> list:
            for index in range(512):
                one.submit(one.requests([texts[index // 8]], sampling, RKV, indices=[index])[0])
            return one.drain()

        spent, done = seconds_of(serve)
        hits = sum(r.kv.cached_prompt_tokens for r in done) / sum(len(r.prompt_ids) for r in done)
        yield {
            "kind": "shared prefixes",
            "model": one.name,
            "requests": 512,
            "group": 8,
            "prompt": 1024,
            "new_tokens": 64,
            "shared": shared,
            "warm_up": turn < 2,
            "seconds": spent,
            "hits": hits,
        }
    texts_by_group = one.generate(texts, Sampling(n=8, max_new_tokens=64, ignore_eos=True), RKV, progress=False)
    spent, _rollouts = seconds_of(
        lambda: one.generate(texts, Sampling(n=8, max_new_tokens=64, ignore_eos=True), RKV, progress=False)
    )
    yield {
        "kind": "one request per group",
        "model": one.name,
        "requests": 64,
        "seconds": spent,
        "n": len(texts_by_group),
    }


def mixed(_: Ceilings) -> Iterator[Row]:
    one = engine("40GiB", max_rows=192, max_length=2048)
    sampling, texts = Sampling(max_new_tokens=512, ignore_eos=True), prompts(one, 64, 128)
    policies = [DENSE, RKV, QUEST]
    for _repeat in range(2):
        apart = 0.0
        for policy in policies:
            apart += seconds_of(partial(one.generate, texts, sampling, policy, progress=False))[0]
        together, _rollouts = seconds_of(
            lambda: one.generate(texts * 3, sampling, [p for p in policies for _ in texts], progress=False)
        )
    yield {"kind": "mixed kinds", "model": one.name, "rows": 192, "apart_s": apart, "together_s": together}


if __name__ == "__main__":
    run({"sessions": sessions, "prefixes": prefixes, "mixed": mixed}, __doc__)
