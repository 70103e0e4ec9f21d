"""The speed estimate of `--check`, against whole steps that were recorded on a GPU."""

import json
from pathlib import Path

import pytest

import toy
from alula.bench.ceilings import Ceilings
from alula.config.run import RunConfig
from alula.trainer.check import speed_table
from alula.trainer.memory_plan import plan_memory
from alula.trainer.speed_plan import SpeedPlan, kv_memory, plan_speed

RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "training-h200.json").read_text())
MACHINE = RECORDED["small"]["machine"]
H200 = Ceilings(MACHINE["copy_bytes_per_s"], MACHINE["matrix_flop_per_s"])
COMMON = (
    "model.dtype=bfloat16",
    "data={source: gsm8k, max_prompt_tokens: 128}",
    "rewards.use=math",
    "objective.kl=0",
    "engine={max_rows: 512}",
)


def config_of(tmp_path, model: str, sparsity: str, answer: int, *settings: str) -> RunConfig:
    sampling = f"sampling={{prompts: 64, n: 8, max_new_tokens: {answer}}}"
    return toy.toy(tmp_path, f"model.source=shape:{model}", f"sparsity={sparsity}", sampling, *COMMON, *settings)


def estimate(config: RunConfig, kv_bytes: float = 100e9, ranks: int = 1) -> SpeedPlan:
    return plan_speed(config, plan_memory(config, ranks), H200, kv_bytes, ranks)


@pytest.mark.parametrize(("row", "sparsity", "within"), [(0, "dense", 0.1), (1, "rkv:64+16,window=8,sinks=4", 0.27)])
def test_recorded_short_steps_are_estimated(tmp_path, row, sparsity, within):
    """Short sparse rollouts only within a quarter."""
    measured = RECORDED["small"]["rows"][row]
    assert (measured["rollouts"], measured["mean_length"]) == (512, 256)
    speed = estimate(config_of(tmp_path, "smollm2-135m", sparsity, 256))
    for part, seconds in (("rollout", speed.rollouts.seconds), ("update", speed.update), ("step", speed.step)):
        assert seconds == pytest.approx(measured[f"{part}_s"], rel=within), part


@pytest.mark.parametrize("row", [0, 1], ids=["dense", "rkv"])
def test_recorded_long_steps_are_estimated_within_a_fifth(tmp_path, row):
    measured = RECORDED["check"]["rows"][row]
    assert (measured["rollouts"], measured["mean_length"]) == (256, 2048)
    settings = ("sampling.prompts=32", "engine.max_rows=256")
    speed = estimate(config_of(tmp_path, "qwen2.5-1.5b", measured["sparsity"], 2048, *settings), 40 << 30)
    for part, seconds in (("rollout", speed.rollouts.seconds), ("update", speed.update), ("step", speed.step)):
        assert seconds == pytest.approx(measured[f"{part}_s"], rel=0.2), part
    dense, sparse = (one["rollout_tokens_per_s"] for one in RECORDED["check"]["rows"])
    assert speed.sparse.tokens_per_second / speed.dense.tokens_per_second == pytest.approx(sparse / dense, rel=0.1)


def test_sparsity_pays_from_some_length_on(tmp_path):
    config = config_of(tmp_path, "qwen2.5-1.5b", "rkv:512+128", 8192)
    speed = estimate(config)
    assert 512 < speed.pays_from < 4096
    assert speed.sparse.tokens_per_second > 2 * speed.dense.tokens_per_second
    assert speed.rollouts == speed.sparse
    short = estimate(config_of(tmp_path, "qwen2.5-1.5b", "rkv:512+128", 256))
    assert short.sparse.tokens_per_second == short.dense.tokens_per_second, "nothing is evicted"
    little = estimate(config, kv_bytes=4e9)
    assert little.pays_from < speed.pays_from, "little memory: dense rollouts wait for each other"
    assert little.dense.rows < little.sparse.rows
    huge = estimate(config_of(tmp_path, "qwen2.5-1.5b", "rkv:100k+128", 8192))
    assert huge.pays_from is None
    dense = estimate(config_of(tmp_path, "qwen2.5-1.5b", "dense", 8192))
    assert dense.rollouts == dense.dense
    assert dense.pays_from == speed.pays_from, "compared with the example"


def test_ranks_share_the_work_and_settings_change_it(tmp_path):
    alone = estimate(config_of(tmp_path, "qwen2.5-1.5b", "rkv:512+128", 2048))
    four = estimate(config_of(tmp_path, "qwen2.5-1.5b", "rkv:512+128", 2048), ranks=4)
    assert four.update == pytest.approx(alone.update / 4)
    assert four.rollouts.seconds < alone.rollouts.seconds

    def score(*settings: str) -> float:
        return estimate(config_of(tmp_path, "qwen2.5-1.5b", "rkv:512+128", 2048, *settings)).score

    one = score("objective.skip_scoring=false")
    assert 0 < one < alone.update
    assert score("learner.updates=1") == 0, "the only update gives the scores"
    assert score("learner.updates=4") == pytest.approx(3 / 4 * one)
    assert score("objective.correction=strict") == one
    assert score("objective.kl=0.1", "objective.skip_scoring=false") == pytest.approx(2 * one)


def test_memory_for_kv_is_what_the_rest_of_the_run_leaves(tmp_path):
    config = config_of(tmp_path, "qwen2.5-1.5b", "rkv:512+128", 2048)
    plan = plan_memory(config)
    free = 100 << 30
    assert kv_memory(config, plan, free) == pytest.approx(0.9 * free - plan.beside_kv)
    assert kv_memory(config, plan, 1 << 30) < 0
    assert kv_memory(config_of(tmp_path, "qwen2.5-1.5b", "dense", 9, "engine.kv_memory=2GiB"), plan, free) == 2 << 30


def test_the_table_names_step_and_length(tmp_path):
    config = config_of(tmp_path, "qwen2.5-1.5b", "rkv:512+128", 8192)
    table = speed_table(config, estimate(config), "a GPU")
    cells = dict(zip(*(column._cells for column in table.columns)))
    assert "tokens/s" in cells["rollouts"]
    assert "all 50 steps" in cells["step"]
    assert "× dense with 8,192 tokens (rkv:512+128" in cells["sparse rollouts"]
    assert "answer tokens on" in cells["  pay from"]
