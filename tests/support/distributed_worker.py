"""Run by test_distributed.py on two or four ranks: the same steps as one process takes."""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from alula.distributed import World, init_world
from alula.learner.learner import Learner
from alula.models.load import load_model
from alula.run.checkpoint import Checkpoints
from alula.run.export import export
from alula.settings import LearnerSettings, LoRASettings

SHAPE = "tiny-llama"
# eps well above rounding: Adam would otherwise turn a gradient that is zero but for rounding into a full step
SETTINGS = {"lr": 1e-2, "eps": 1e-4, "token_budget": 30, "logprob_chunk": 7, "max_grad_norm": 0.1}


def rollouts():
    rng = random.Random(0)
    return [
        SimpleNamespace(
            prompt_ids=[rng.randrange(64) for _ in range(rng.randint(1, 9))],
            token_ids=[rng.randrange(64) for _ in range(rng.randint(1, 9))],
        )
        for _ in range(7)
    ]


def share(world: World):
    """Unequal shares, so that some ranks have fewer micro-batches than others, and one of four has none."""
    starts = {1: [0, 7], 2: [0, 6, 7], 4: [0, 3, 6, 7, 7]}[world.size]
    return list(range(7))[starts[world.rank] : starts[world.rank + 1]]


def learner(world, dtype="float32", residual=None, keep_reference=False, **settings):
    model = load_model(f"shape:{SHAPE}", dtype=dtype, residual=residual).model
    return Learner(model, LearnerSettings(**{**SETTINGS, **settings}), world, keep_reference=keep_reference)


def step(learning, poison=False):
    everything, mine = rollouts(), share(learning.world)
    tokens = sum(len(r.token_ids) for r in everything)

    def loss(logprobs, entropy, batch):
        weights = batch.rows(torch.tensor([float(i + 1) for i in mine]))[batch.sequence]
        total = -(weights * logprobs.exp()).sum() / tokens
        metrics = {
            "tokens": torch.tensor(len(logprobs)),
            "entropy": entropy.mean(),
            "probability": logprobs.exp().mean(),
        }
        return total * (float("nan") if poison else 1.0), metrics

    return learning.update([everything[i] for i in mine], loss)


def summary(update):
    return {k: getattr(update, k) for k in ("loss", "metrics", "grad_norm", "taken", "tokens", "scored_tokens")}


def layout(learning):
    """How a weight lies on the ranks: the mesh, this rank's rows and their values, and the timeouts of its groups."""
    weight = learning.model.get_parameter("model.embed_tokens.weight")
    mesh, local = weight.device_mesh, weight.detach().to_local()
    groups = [mesh.get_group(dim)._get_backend(torch.device("cpu")) for dim in range(mesh.ndim)]
    return {
        "shape": list(mesh.shape),
        "place": mesh.get_coordinate(),
        "rows": len(local),
        "sum": float(local.double().sum()),
        "timeouts": [group.options._timeout.total_seconds() for group in groups],
    }


def main(out: Path) -> None:
    world = init_world("cpu", timeout=120)
    report = {}

    def write(name, tensors):
        tensors = {n: t.detach().clone().contiguous() for n, t in tensors}
        if world.rank == 0:
            save_file(tensors, out / f"{name}.safetensors")

    first = learner(world, keep_reference=True)
    report["steps"] = [summary(step(first)) for _ in range(2)]
    write("after-two", first.full_parameters())
    checkpoints = Checkpoints(out / "checkpoints", world=world)
    checkpoints.save(2, first.tensors(), {"learner": first.state(), "rank": world.rank})
    report["steps"].append(summary(step(first)))
    write("after-three", first.full_parameters())
    report["mesh"] = world.all_gather(layout(first))
    export(out / "exported", first.model, first.full_parameters(), world=world)
    mine = [rollouts()[i] for i in share(world)]
    scored = zip(first.score(mine), first.score(mine, reference=True))
    pairs = [(a.tolist(), b.tolist()) for a, b in scored]
    report["scores"] = [pair for part in world.all_gather(pairs) for pair in part]

    second = learner(world)
    state = checkpoints.load(checkpoints.latest(), second.tensors())
    second.resume(state["learner"])
    step(second)
    same = [
        torch.equal(a.to_local(), second.tensors()[n].to_local())
        for n, a in first.tensors().items()
        if hasattr(a, "to_local")
    ]
    report["resumed"] = world.all_gather({"rank": state["rank"], "tensors": len(same), "equal": all(same)})

    from_one = learner(world)
    single = Checkpoints(out / "single", world=world)
    from_one.resume(single.load(single.latest(), from_one.tensors())["learner"])
    write("from-one", from_one.full_parameters())

    before = [t.to_local().clone() for t in second.tensors().values() if hasattr(t, "to_local")]
    report["poisoned"] = world.all_gather(step(second, poison=world.rank == 1).taken)
    after = [t.to_local() for t in second.tensors().values() if hasattr(t, "to_local")]
    report["untouched"] = all(world.all_gather(all(torch.equal(a, b) for a, b in zip(before, after))))

    adapted = learner(world, lora=LoRASettings(rank=2, alpha=4))
    step(adapted)
    write("lora", adapted.full_parameters())

    for dtype in ("bfloat16", "float16"):
        half = learner(world, dtype=dtype, keep_reference=True)
        report[dtype] = summary(step(half))
        scores = [a.tolist() for a in half.score(mine, reference=True)]
        report[dtype]["reference"] = [score for part in world.all_gather(scores) for score in part]
        report[dtype]["held"] = sorted({str(p.dtype) for p in half.reference.parameters()})
        report[dtype]["dtypes"] = sorted({str(t.dtype) for _, t in half.full_parameters()})

    wide = learner(world, dtype="bfloat16", residual="float32")
    streams = set()
    for layer in wide.policy.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda _, inputs: streams.add(str(inputs[0].dtype)))
    report["residual"] = summary(step(wide)) | {"streams": sorted(streams)}

    if world.rank == 0:
        (out / "report.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
