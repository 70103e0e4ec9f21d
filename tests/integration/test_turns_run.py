"""Whole runs over several turns: recipes/turns-toy.yaml learns, and survives kill -9 bit for bit."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

import toy
from alula.config.load import load_config
from alula.environments.lookup import Lookup
from alula.trainer.trainer import train
from processes import end_of

RECIPE = toy.RECIPE.with_name("turns-toy.yaml")
LIMIT = 40
"""Steps; every seed tried needed at most 30."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sparsity", ["recipe", "dense"])
def test_a_tiny_model_learns_to_use_the_tool(tmp_path, sparsity):
    settings = ["sparsity=dense"] if sparsity == "dense" else []
    free = "engine.buckets=null"  # faster; only the last bits differ
    run = toy.trainer(load_config(RECIPE, [f"out={tmp_path}", "eval.sparse=false", free, *settings]))
    run.evaluate()
    assert run.evaluation.accuracy < 0.1, "without lookups it can only guess"
    while run.step < LIMIT and (run.evaluation.accuracy or 0) < 0.9:
        run.train_step()
        if run.step % 10 == 0:
            run.evaluate()
    assert run.evaluation.accuracy >= 0.9
    last = toy.rows(tmp_path, "metrics.jsonl")[-1]
    assert last["environment/turns"] > 2.5
    assert (last["kv/saved"] > 0.05) == (sparsity == "recipe")


class Slow(Lookup):
    """Its answers take a random time, another one in every run."""

    def step(self, completion):
        time.sleep(random.random() * 0.005)
        return super().step(completion)


QUICK = ("steps=5", "sampling.prompts=4", "sampling.n=4", "eval.every=2", "eval.size=8", "checkpoint.every=1")


def start(out: Path) -> int:
    """The run in a child process, resumed if there is a checkpoint."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        config = load_config(
            RECIPE, [f"out={out}", "environment.use=test_turns_run:Slow", "engine.buckets=[16]", *QUICK]
        )
        with open(os.devnull, "w") as silent:
            status = 0 if train(config, resume="auto", stream=silent) else 130
    finally:
        os._exit(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    began = time.monotonic()
    assert end_of(start(tmp_path / "whole")) == 0
    duration = time.monotonic() - began
    moments, kills = random.Random(1), 0
    for _ in range(20):
        child = start(tmp_path / "killed")
        if kills < 2:
            time.sleep(moments.uniform(0.3, 0.7) * duration)
            os.kill(child, signal.SIGKILL)
        if end_of(child) == 0:
            break
        kills += 1
    assert kills >= 1
    assert toy.files(tmp_path / "killed") == toy.files(tmp_path / "whole")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert weights[0] == weights[1]
