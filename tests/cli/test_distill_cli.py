"""`alula distill`: its files, its table, and the settings that `--resume` compares."""

import json

import pytest
import torch

from alula import Schedule
from alula.models.lora import Adapter
from command_line import alula
from distill_runs import successor_model


@pytest.fixture(scope="module")
def successor():
    return successor_model()


@pytest.mark.slow
def test_command_writes_an_adapter_and_a_table(successor, tmp_path, capsys):
    loaded, train, _ = successor
    folder, out = tmp_path / "model", tmp_path / "distilled"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    texts = loaded.tokenizer.batch_decode([prompt[1:] for prompt in train[:60]])
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    arguments = [
        str(folder),
        "--data",
        str(data),
        "--sparsity",
        "snapkv:10+4,window=4,sinks=2",
        "--steps",
        "3",
        "--prompts",
        "12",
        "--samples",
        "1",
        "--held-out",
        "20",
        "--max-new-tokens",
        "10",
        "--rank",
        "4",
        "--lr",
        "4e-3",
        "--page",
        "4",
        "--kv-memory",
        "4MiB",
        "--out",
        str(out),
    ]
    assert alula("distill", *arguments) == 0
    written = {"adapter", "checkpoints", "metrics.jsonl", "status.json", "summary.json"}
    assert {path.name for path in out.iterdir()} == written, "no empty files"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["distill/kl"] > 0 and 0 < row["distill/acceptance_tail"] <= 1 for row in rows)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["after"]["acceptance_mean"] > summary["before"]["acceptance_mean"]
    shown = capsys.readouterr().out
    assert f"{summary['after']['acceptance_tail']:.4f}" in shown
    assert "--sparse-adapter in alula calibrate, eval and serve" in shown
    adapter = Adapter.load(out / "adapter")
    assert adapter.rank == 4
    assert any(b.abs().max() > 0 for _, b in adapter.weights.values())

    def again(*changes: str) -> int:
        return alula("distill", *arguments[:-1], tmp_path / "parts", "--save-every", 5, *changes)

    assert again("--steps", "2") == 0
    assert again("--steps", "3") == 2
    assert "--resume" in capsys.readouterr().err
    assert again("--resume", "--lr", "1e-3", "--prompts", "10") == 2
    assert "prompts=12, not prompts=10" in capsys.readouterr().err
    for changes, message in (
        (["--rank", "8"], "rank=4, not rank=8"),
        (["--alpha", "64"], "alpha=8.0, not alpha=64.0"),
        (["--targets", "q_proj"], "targets=all, not targets=q_proj"),
        (["--prompt", "{prompt}!"], "prompt=None, not prompt={prompt}!"),
        (["--no-chat"], "chat=None, not chat=False"),
        (["--residual", "float32"], "residual=None, not residual=float32"),
        (["--steps", "1"], "steps=1: "),
        (["--steps", "0"], "steps=0: "),
        (["--bin", "0"], "bin=0: "),
    ):
        assert again("--resume", *changes) == 2
        assert message in capsys.readouterr().err
    assert again("--resume") == 0
    resumed = Adapter.load(tmp_path / "parts" / "adapter")
    assert all(torch.equal(b, resumed.weights[name][1]) for name, (_, b) in adapter.weights.items())
    assert json.loads((tmp_path / "parts" / "summary.json").read_text()) == summary


COMMAND = [
    "distill",
    "shape:tiny-llama",
    "--data",
    "task:successor",
    "--option",
    "symbols=4",
    "--option",
    "prefix=2",
    "--option",
    "length=2",
    "--steps",
    "2",
    "--prompts",
    "8",
    "--held-out",
    "16",
    "--max-new-tokens",
    "6",
    "--save-every",
    "1",
]


def test_interrupted_command_has_status_stopped(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("alula.distill.standalone.distill_prompts", interrupted)
    alula(*COMMAND, "--sparsity", "snapkv:3+1,window=1,sinks=1", "--out", tmp_path)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "stopped"


@pytest.mark.slow
def test_a_finished_adapter_is_trained_further(tmp_path):
    """Whatever its number of steps and --save-every."""
    command = (*COMMAND, "--sparsity", "snapkv:3+1,window=1,sinks=1", "--out", tmp_path, "--save-every", "7")
    assert alula(*command) == 0
    assert alula(*command, "--steps", "3", "--resume") == 0
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2, 3]


@pytest.mark.slow
def test_resume_with_a_changed_schedule_file_raises(tmp_path, capsys):
    schedule, out = tmp_path / "schedule.json", str(tmp_path / "out")

    def run(*more: str) -> int:
        return alula(*COMMAND, "--sparsity", f"block-topk:{schedule},block=2", "--out", out, *more)

    Schedule((6,), block=2).save(schedule)
    assert run() == 0
    assert run("--resume") == 0
    Schedule((8,), block=2).save(schedule)
    assert run("--resume") == 2
    assert "schedules=[[[6], 2000]], not schedules=[[[8], 2000]]" in capsys.readouterr().err
