"""What workers on Ray cost: a step of the toy recipe against a local engine, and weights through the object store.

    python benchmarks/ray_rollouts.py --out benchmarks/results/ray-rollouts.json
    python benchmarks/ray_rollouts.py --only weights --device cuda

Weights: packed into buckets, put, fetched by another process and copied into parameters there, against one plain
copy of the same tensors inside a process.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import ray
import torch

from alula.config.load import load_config
from alula.rollouts.weights import pack, unpack
from alula.run.environment import environment
from alula.trainer.trainer import Trainer

RECIPE = Path(__file__).parents[1] / "recipes" / "toy.yaml"
SIZES = {"270 MB": 270e6, "3 GB": 3e9}


def parameters(size: float, device: str) -> dict[str, torch.Tensor]:
    """Random bfloat16 matrices of 2048 × 2048, and one large embedding that lies across buckets."""
    rest, tensors = int(size) // 2, {"embedding": torch.randn(int(size) // 10, device=device).bfloat16()}
    rest -= tensors["embedding"].numel()
    for i in range(max(1, rest // 2048**2)):
        tensors[f"layer {i}"] = torch.randn(2048, 2048, device=device).bfloat16()
    return tensors


class Receiver:
    def __init__(self, shapes: dict[str, torch.Size], device: str) -> None:
        self.tensors = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}

    def ready(self) -> None:
        return None

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
    for name, size in SIZES.items():
        tensors = parameters(size, device)
        receiver = (
            ray.remote(Receiver)
            .options(num_gpus=float(device == "cuda"), num_cpus=0)
            .remote({key: tensor.shape for key, tensor in tensors.items()}, device)
        )
        ray.get(receiver.ready.remote())
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
        ray.kill(receiver)
        size = sum(tensor.numel() * 2 for tensor in tensors.values())
        row = {"weights": name, "bytes": size, "put_s": median(put), "take_s": median(take), "copy_s": median(plain)}
        yield row | {"gb_per_s": size / (median(put) + median(take)) / 1e9}
        del tensors, copies


def steps(count: int) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        for backend in ("local", "ray"):
            out = Path(folder) / backend
            settings = [
                f"out={out}",
                f"steps={count}",
                "model.device=cpu",
                "eval.every=0",
                f"rollouts.backend={backend}",
            ]
            Trainer(load_config(RECIPE, settings)).run()
            rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][3:]
            yield {"backend": backend} | {
                name: median(row[f"time/{name}"] for row in rows) for name in ("step", "rollout", "weights")
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["weights", "steps"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    result: dict[str, object] = {"environment": environment()}
    if given.only != "steps":
        result["weights"] = list(weights(given.device, given.repeat))
    if given.only != "weights":
        result["steps"] = list(steps(given.steps))
    print(json.dumps({name: part for name, part in result.items() if name != "environment"}, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
