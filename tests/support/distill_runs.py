"""Small runs that distil, and a small model that has learned a task."""

import io
import json
from types import SimpleNamespace

import pytest
import torch

from alula.config.load import read_tree
from alula.data.load_tokenizer import attach_tokenizer
from alula.data.tasks import build
from alula.data.tasks.tokenizer import supervised_ids, task_tokenizer
from alula.learner.learner import Learner
from alula.models.load import load_model
from alula.settings import LearnerSettings
from alula.trainer.trainer import Trainer
from toy import without_clocks

RECIPE = {
    "steps": 4,
    "model": {"source": "shape:tiny-llama"},
    "data": {"source": "task:copy-last", "size": 96, "options": {"symbols": 8, "prefix": 12}},
    "rewards": {"use": ["task:copy-last"], "workers": 1},
    "sparsity": {"evict": {"method": "rkv", "budget": 10, "buffer": 2, "window": 2, "sinks": 1}},
    "sampling": {"prompts": 6, "n": 4, "max_new_tokens": 8},
    "learner": {"lr": 3e-3, "token_budget": 4096, "activation_checkpointing": False},
    "distill": {
        "rank": 4,
        "lr": 3e-3,
        "fraction": 0.5,
        "every": 2,
        "activation_checkpointing": False,
        "move": {"sparsity": "rkv:8+2,window=2,sinks=1", "tau": 0.01, "every": 2, "prompts": 24},
    },
    "engine": {"kv_memory": "4MiB"},
    "eval": {"every": 4, "size": 24, "sparse": True},
    "checkpoint": {"every": 3, "best": False},
}
FIRST = {"steps": 3, "prompts": 5, "minibatches": 2}


def trained(out, stop_after=None, resume=False, **changes):
    """Metrics of a run of RECIPE with changed sections; `stop_after` interrupts it after that step."""
    config = read_tree(RECIPE | {"out": str(out)} | changes)
    trainer = Trainer(config, resume=resume, stream=io.StringIO())
    if stop_after is not None:
        step = trainer.train_step

        def train_step():
            if trainer.step == stop_after:
                raise KeyboardInterrupt
            step()

        trainer.train_step = train_step
    if stop_after is None:
        trainer.run()
    else:
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    return [without_clocks(json.loads(line)) for line in (out / "metrics.jsonl").read_text().splitlines()]


def watched(out, **changes):
    """A trainer and a list that collects the rollouts, advantages and θ of every call of its distiller."""
    trainer = Trainer(read_tree(RECIPE | {"out": str(out)} | changes), stream=io.StringIO())
    distiller, calls = trainer.distill.distiller, []
    step = distiller.step

    def distil(rollouts, advantages):
        theta = {name: value.detach().clone() for name, value in trainer.learner.full_parameters()}
        base = dict(distiller.policy.teacher.named_parameters())
        assert all(torch.equal(base[name], value) for name, value in theta.items()), "the teacher is θ after its update"
        calls.append(SimpleNamespace(rollouts=rollouts, advantages=advantages, theta=theta))
        return step(rollouts, advantages)

    distiller.step = distil
    return trainer, calls


def distilling_run(out, first, **options):
    """A run of two steps that distils all of its rollouts; `first` are the settings of `distill.first`."""
    distill = RECIPE["distill"] | {"move": None, "every": 1, "fraction": 1.0, "first": first}
    config = read_tree(RECIPE | {"out": str(out), "steps": 2, "eval": {"every": 2, "size": 8}, "distill": distill})
    return Trainer(config, stream=io.StringIO(), **options)


def successor_model():
    """A tiny model that has learned to continue the alphabet, its training prompts and held-out prompts."""
    task = build("successor", symbols=8, prefix=20, length=10)
    tokenizer = task_tokenizer(task)
    loaded = attach_tokenizer(load_model("shape:tiny-qwen3"), tokenizer, resize=True)
    pairs = [supervised_ids(tokenizer, example) for example in task.dataset(512, seed=0)]
    learner = Learner(loaded.model, LearnerSettings(lr=4e-3, activation_checkpointing=False))
    sequences = [SimpleNamespace(prompt_ids=prompt, token_ids=answer) for prompt, answer in pairs]
    for step in range(40):
        rows = sequences[(16 * step) % 512 :][:16]
        learner.update(rows, lambda logprobs, _, batch: (-logprobs.mean(), {}))
    held_out = [supervised_ids(tokenizer, example)[0] for example in task.dataset(24, seed=1)]
    return loaded, [prompt for prompt, _ in pairs[:128]], held_out
