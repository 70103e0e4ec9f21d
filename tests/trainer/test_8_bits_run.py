"""KV in 8 bits outside of the engine: a run measures and corrects it, the commands and the memory plan know it."""

import json

import pytest

from alula.bench.ceilings import Ceilings
from alula.bench.decode import decode_step, weight_bytes
from alula.engine.engine import Engine
from alula.errors import SettingError
from alula.mismatch.calibrate.verify import parse_target
from alula.report.runs import Run
from alula.report.verdict import is_dense
from alula.sparsity.policy import DENSE as DENSE_POLICY
from alula.sparsity.policy import Sparsity
from alula.trainer.check import print_plan
from alula.trainer.memory_plan import plan_memory
from command_line import output_of
from toy import DENSE, printed, quick, rows, toy, trainer

QUANTISED = "engine.kv_dtype=int8"
SHORT = ("steps=1", "eval.every=1", "checkpoint.every=0")


def test_a_dense_run_is_watched_and_corrected_as_a_mismatch(tmp_path):
    """Nothing is evicted, but the policy that samples is not the one that learns."""
    found = {}
    for name, setting in (("exact", "engine.kv_dtype=null"), ("int8", QUANTISED)):
        run = trainer(quick(tmp_path / name, DENSE, *SHORT, setting))
        run.run()
        [found[name]] = rows(tmp_path / name, "metrics.jsonl")
        assert len(rows(tmp_path / name, "evals.jsonl")) == 2
        assert ("int8 KV" in printed(run)) == (name == "int8")
    assert found["int8"]["mismatch/kl_k3"] > 100 * found["exact"]["mismatch/kl_k3"]
    assert "mismatch/alpha_p05" not in found["exact"]
    assert 0.5 < found["int8"]["mismatch/alpha_p05"] < 0.9999
    assert not any(metric.startswith("schedule/") for metric in found["int8"])


def test_rerolls_continue_with_quantised_kv(tmp_path):
    """Both halves have the log-probs of what sampled them."""
    config = quick(
        tmp_path, DENSE, *SHORT, QUANTISED, "objective.correction={preset: reroll, veto: 0.98}", "eval.every=0"
    )
    run = trainer(config)
    run.run()
    [row] = rows(tmp_path, "metrics.jsonl")
    assert row["mismatch/rerolled"] > 0


def test_the_memory_plan_counts_bytes_and_scales(tmp_path, capsys):
    sixteen, eight = (plan_memory(toy(tmp_path / "x", "model.dtype=bfloat16", *more)) for more in ((), (QUANTISED,)))
    width = sixteen.geometry.head_dim
    assert eight.kv_dense * 2 * width == sixteen.kv_dense * (width + 1)
    print_plan(toy(tmp_path / "x", QUANTISED))
    assert "int8" in capsys.readouterr().out
    with pytest.raises(SettingError, match=r"kv_dtype=int8.*bfloat16"):
        plan_memory(toy(tmp_path / "x", "model.dtype=float16", QUANTISED))
    with pytest.raises(SettingError, match=r"engine.kv_dtype='int4'"):
        toy(tmp_path, "engine.kv_dtype=int4")


def test_the_commands_take_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generate = ("generate", "shape:tiny-llama", "--file", "prompts.jsonl", "--max-new-tokens", 20, "--ignore-eos")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [1, 2, 3, 4]}\n')
    exact, eight = (json.loads(output_of(capsys, *generate, *more)[1]) for more in ((), ("--kv-dtype", "fp8")))
    width = exact["kv"]["peak_bytes"] // exact["kv"]["peak_tokens"]
    assert eight["kv"]["peak_bytes"] / eight["kv"]["peak_tokens"] < 0.3 * width
    assert eight["logprobs"] != exact["logprobs"]


def test_the_floor_of_a_decode_step_is_its_bytes():
    steps = []
    for dtype in (None, "fp8"):
        engine = Engine.load("shape:tiny-llama", kv_memory="4MiB", kv_dtype=dtype, max_rows=2)
        assert decode_step(engine, 2, 32, Sparsity.parse("quest:48"), Ceilings(1e9, 1e9))["kv_dtype"] == dtype
        steps.append(decode_step(engine, 2, 64, DENSE_POLICY, Ceilings(1e9, 1e9)))
        weights = weight_bytes(engine)
        assert steps[-1]["floor_ms"] == pytest.approx(1e-6 * (weights + steps[-1]["kv_bytes"]))
    width = engine.geometry.head_dim
    assert steps[1]["kv_bytes"] * 4 * width == steps[0]["kv_bytes"] * (width + 1)


def test_calibrate_measures_it_alone_and_with_a_policy(tmp_path, capsys):
    out = tmp_path / "verified.json"
    ask = ("calibrate", "shape:tiny-llama", "--data", "task:copy-last", "--length", 60, "--bin", 20, "--prompts", 20)
    policies = ("--verify", "dense", "--verify", "rkv:24+8")
    code, text, _ = output_of(capsys, *ask, *policies, "--kv-dtype", "fp8", "--kv-memory", "8MiB", "--out", out)
    alone, both = json.loads(out.read_text())
    assert code == 0
    assert "never sparse" not in text
    assert alone["kv_dtype"] == both["kv_dtype"] == "fp8"
    assert both["tail"]["overall"] < alone["tail"]["overall"] < 1
    assert alone["kv"]["saved"] == 0
    with pytest.raises(SettingError, match="verify=dense"):
        parse_target("dense", 20, 60)


def test_it_is_not_the_dense_baseline_of_a_report(tmp_path):
    settings = {"sampling.n": "8", "engine.kv_dtype": "null"}
    assert is_dense(Run("run", tmp_path, settings=settings))
    assert not is_dense(Run("run", tmp_path, settings=settings | {"engine.kv_dtype": "fp8"}))
