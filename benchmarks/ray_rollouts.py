"""What workers on Ray cost: steps of the toy recipe against a local engine, and weights through the object store.

    python benchmarks/ray_rollouts.py --out benchmarks/results/ray-rollouts.json
    python benchmarks/ray_rollouts.py --device cuda --steps 6 --repeat 3 --out benchmarks/results/ray-rollouts-h200.json

Weights: packed into buckets, put, fetched by another process and copied into parameters there, against one plain
copy of the same tensors inside a process.

Steps: the median after the first three. On a GPU the model has Qwen3-1.7B's layers, and learner and worker share the
GPU (`rollouts.colocated`): the script stops with an error unless every step was sampled by the version before it,
from captured graphs, and the worker had released its KV memory while the learner worked. With `--colocated` the same
is checked on the CPU. Settings at the end of the line override those of the recipe.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch

from alula.config.load import load_config
from alula.models.load import load_model
from alula.rollouts.weights import pack, unpack
from alula.rollouts.worker import RolloutWorker
from alula.run.environment import environment
from alula.trainer.trainer import Trainer

RECIPE = Path(__file__).parents[1] / "recipes" / "toy.yaml"
SIZES: dict[str, list[float | str]] = {"cpu": [270e6, 3e9], "cuda": [270e6, 3e9, "shape:qwen3-1.7b"]}
"""Bytes of weights, or a model."""
SETTINGS = {
    "cpu": [],
    "cuda": [
        "model={source: shape:qwen3-1.7b, dtype: bfloat16}",
        "sampling={prompts: 16, n: 8, max_new_tokens: 64}",
        "sparsity=rkv:16+16,window=8,sinks=4",
        "engine={kv_memory: 8GiB, max_rows: 128, compiled: false}",
        "learner.compile=false",
    ],
}
"""Settings on top of the toy recipe, by device. Compiling would take longer than the steps."""
WARM_UP = 3


def parameters(what: float | str, device: str) -> dict[str, torch.Tensor]:
    """A model's, or random bfloat16 matrices of 2048 × 2048 and one large embedding that lies across buckets."""
    if isinstance(what, str):
        model = load_model(what, device=torch.device(device), dtype="bfloat16").model
        return {name: parameter.detach() for name, parameter in model.named_parameters()}
    rest, tensors = int(what) // 2, {"embedding": torch.randn(int(what) // 10, device=device).bfloat16()}
    rest -= tensors["embedding"].numel()
    for i in range(max(1, rest // 2048**2)):
        tensors[f"layer {i}"] = torch.randn(2048, 2048, device=device).bfloat16()
    return tensors


class Receiver:
    """The worker's side."""

    def prepare(self, shapes: dict[str, torch.Size], device: str) -> None:
        self.tensors = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}

    def take(self, buckets: list) -> float:
        """Seconds to fetch and copy, as a worker does."""
        began = time.perf_counter()
        for name, tensor in unpack((pieces, ray.get(data)) for pieces, data in buckets):
            self.tensors[name].copy_(tensor)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def sums(self) -> float:
        return sum(float(tensor.double().sum()) for tensor in self.tensors.values())


def weights(device: str, repeat: int) -> Iterator[dict[str, object]]:
    receiver = ray.remote(Receiver).options(num_gpus=float(device == "cuda"), num_cpus=0).remote()
    for what in SIZES[device]:
        tensors = parameters(what, device)
        ray.get(receiver.prepare.remote({key: tensor.shape for key, tensor in tensors.items()}, device))
        copies = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
        put, take, plain = [], [], []
        for _ in range(repeat):
            began = time.perf_counter()
            for key, tensor in tensors.items():
                copies[key].copy_(tensor)
            if device == "cuda":
                torch.cuda.synchronize()
            plain.append(time.perf_counter() - began)
            began = time.perf_counter()
            buckets = [(pieces, ray.put(data)) for pieces, data in pack(tensors.items())]
            put.append(time.perf_counter() - began)
            take.append(ray.get(receiver.take.remote(buckets)))
            del buckets
        expected = sum(float(tensor.double().sum()) for tensor in tensors.values())
        assert abs(ray.get(receiver.sums.remote()) - expected) < 1e-6 * max(1.0, abs(expected))
        size = sum(tensor.numel() * 2 for tensor in tensors.values())
        row = {"weights": what, "bytes": size, "put_s": median(put), "take_s": median(take), "copy_s": median(plain)}
        yield row | {"gb_per_s": size / (median(put) + median(take)) / 1e9}
        del tensors, copies
    ray.kill(receiver)


def steps(count: int, device: str, colocated: bool, more: list[str]) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        for backend in ("local", "ray"):
            out = Path(folder) / backend
            settings = [
                f"out={out}",
                f"steps={count}",
                "eval.every=0",
                *more,
                f"model.device={device}",
                f"rollouts.backend={backend}",
                *(["rollouts.colocated=true"] if backend == "ray" and colocated else []),
            ]
            run = Trainer(load_config(RECIPE, settings))
            seen = watched(run) if backend == "ray" and colocated else None
            assert run.run()
            rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            assert len(rows) == count
            row: dict[str, object] = {
                "backend": backend,
                "model": run.config.model.source,
                "colocated": seen is not None,
            }
            for name in ("step", "rollout", "score", "update", "weights", *(["ship"] if backend == "ray" else [])):
                row[name] = median(each[f"time/{name}"] for each in rows[WARM_UP:])
            if backend == "ray":
                row["weight_bytes"] = rows[-1]["workers/weight_bytes"]
            if seen is not None:
                assert len(seen) == count
                check(seen, device)
                row["worker"] = seen
            yield row
            del run
            gc.collect()
            torch.cuda.empty_cache()


def watched(run: Trainer) -> list[dict[str, Any]]:
    """The only worker's engine after the rollouts of every step, and while the learner scores them; the list grows as
    the run goes."""
    seen: list[dict[str, Any]] = []
    collect, score = run.collector.collect, run.updater.score

    def look() -> dict[str, Any]:
        [worker] = run.rollouts.pool.workers
        free = {"free_bytes": torch.cuda.mem_get_info()[0]} if torch.cuda.is_available() else {}
        return ray.get(worker.actor.__ray_call__.remote(engine_state)) | free

    def collected(*given: Any) -> Any:
        batch = collect(*given)
        versions = sorted({span.version for rollout in batch.rollouts for span in rollout.spans})
        seen.append({"sampled_by": versions, "generated": look()})
        return batch

    def scored(batch: Any) -> None:
        seen[-1]["learning"] = look()
        score(batch)

    run.collector.collect, run.updater.score = collected, scored
    return seen


def engine_state(worker: RolloutWorker) -> dict[str, Any]:
    engine = worker.engine
    return {
        "awake": engine.cache.resident,
        "version": engine.policy_version,
        "graphs": len(engine.runner.graphs),
        "kv_bytes": engine.pool.usable * engine.page * engine.geometry.kv_token_bytes,
    }


def check(seen: list[dict[str, Any]], device: str) -> None:
    """Raise unless the worker slept and woke in every step, and every step's tokens are of the version before it."""
    for version, step in enumerate(seen):
        generated, learning = step["generated"], step["learning"]
        assert step["sampled_by"] == [version] == [generated["version"]], step
        assert generated["awake"], step
        assert not learning["awake"], step
        if device == "cuda":
            assert generated["graphs"], step
            assert learning["free_bytes"] - generated["free_bytes"] >= 0.95 * generated["kv_bytes"], step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["weights", "steps"], help="the other part stays as --out has it")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=30, help="more than three, which warm up")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--colocated", action="store_true", help="let the worker sleep while the learner works")
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    parts: dict[str, Iterator[dict[str, object]]] = {}
    if given.only != "steps":
        parts["weights"] = weights(given.device, given.repeat)
    if given.only != "weights":
        settings, cuda = [*SETTINGS[given.device], *given.settings], given.device == "cuda"
        parts["steps"] = steps(given.steps, given.device, given.colocated or cuda, settings)
    before = json.loads(given.out.read_text()) if given.only and given.out and given.out.exists() else {}
    result: dict[str, Any] = before | {"environment": environment()}
    for name, rows in parts.items():
        result[name] = []
        result.setdefault("taken", {})[name] = {key: result["environment"][key] for key in ("commit", "command")}
        for row in rows:
            print(json.dumps(row), flush=True)
            result[name].append(row)
            if given.out:
                given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
