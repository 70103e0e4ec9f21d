"""Options that several commands share reach the model and the prompts."""

import json
from pathlib import Path

import pytest
import torch

from alula.cli.main import app
from alula.data import prepare
from alula.data.load_tokenizer import attach_tokenizer
from alula.data.tasks import build
from alula.data.tasks.tokenizer import task_tokenizer
from alula.models.load import load_model
from alula.sparsity.schedule import Schedule
from command_line import alula, output_of

SHAPE = "shape:tiny-llama"
SPARSE = ("--sparsity", "streaming:8+2,window=2,sinks=1")
COMMANDS = {
    "generate": (),
    "eval": ("--data", "task:copy-last"),
    "calibrate": ("--data", "task:copy-last", "--length", 64, "--budgets", "48,56"),
    "distill": ("--data", "task:copy-last", *SPARSE),
}


class Reached(Exception):
    """Raised where a test stops the command."""


def error_of(capsys, *words):
    assert alula(*words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_residual_option_reaches_the_model(command, tmp_path, monkeypatch, capsys):
    def stop(model):
        raise Reached(model.dtype)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("alula.models.load.widen_residual", stop)
    prompt = ["a"] if command == "generate" else []
    words = [command, SHAPE, *prompt, *COMMANDS[command], "--device", "cpu", "--dtype", "bfloat16", "--residual"]
    with pytest.raises(Reached) as reached:
        app([*map(str, words), "float32"])
    assert reached.value.args == (torch.bfloat16,)
    assert "residual=float64: " in error_of(capsys, *words, "float64")


@pytest.mark.parametrize("command", ["calibrate", "eval", "serve"])
def test_the_sparse_adapter_has_one_name(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sparsity = [] if command == "calibrate" else SPARSE
    words = [command, SHAPE, *COMMANDS.get(command, ()), *sparsity, "--device", "cpu", "--kv-memory", "8MiB"]
    assert "sparse_adapter='nowhere': " in error_of(capsys, *words, "--sparse-adapter", "nowhere")


def test_distill_rejects_a_used_folder_before_it_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("alula.models.load.load_model", None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    error = error_of(capsys, "distill", SHAPE, *COMMANDS["distill"], "--out", tmp_path)
    assert str(tmp_path) in error
    assert "--resume" in error
    assert "--out FOLDER" in error


@pytest.fixture
def folder(tmp_path):
    """A tiny model whose tokenizer has a chat template, and prompts for it."""
    tokenizer = task_tokenizer(build("copy-last"))
    tokenizer.add_tokens(["user", "assistant"])
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %} {{ m['role'] }} {{ m['content'] }}{% endfor %} assistant"
    )
    loaded = attach_tokenizer(load_model(SHAPE), tokenizer, resize=True)
    loaded.model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a b"}) + "\n")
    return tmp_path


@pytest.mark.parametrize("command", ["generate", "eval"])
@pytest.mark.slow
def test_a_schedule_of_another_model_is_reported_once_per_model(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    Schedule((48, 64), 16, "planned", notes={"model": "who/tiny-qwen3"}).save("planned.json")
    where = ("--file", "prompts.jsonl") if command == "generate" else ("--data", "task:copy-last", "--limit", 1)
    twice = () if command == "generate" else ("--sparsity", "quest:planned.json")
    words = [command, "model", *where, "--max-new-tokens", 2, "--sparsity", "block-topk:planned.json", *twice]
    for origin, notes in (("tiny-qwen3", 1), ("tiny-llama", 0)):
        Path("planned.json").write_text(Path("planned.json").read_text().replace("tiny-qwen3", origin))
        code, out, error = output_of(capsys, *words)
        assert code == 0
        note = "who/tiny-qwen3 (model_type=qwen3, here llama)"
        assert error.count(note) == error.count("note: ") == notes
        assert "note: " not in out


@pytest.mark.parametrize("command", ["calibrate", "distill"])
def test_chat_template_is_applied_unless_no_chat(command, folder, monkeypatch):
    plain, chat = ["<bos>", "a", "b"], ["<bos>", "user", "a", "b", "assistant"]

    def stop(dataset, tokenizer, **options):
        (example,) = prepare(dataset, tokenizer, **options)
        raise Reached(tokenizer.convert_ids_to_tokens(list(example.prompt_ids)))

    monkeypatch.chdir(folder)
    monkeypatch.setattr("alula.data.prepare", stop)
    words = [command, "model", "--data", "prompts.jsonl", *COMMANDS[command][2:], "--device", "cpu"]
    for option, expected in (([], chat), (["--chat"], chat), (["--no-chat"], plain)):
        with pytest.raises(Reached) as reached:
            app([*map(str, words), *option])
        assert reached.value.args == (expected,), option


@pytest.mark.parametrize("command", ["calibrate", "distill"])
def test_the_prompts_of_all_data_sets_are_used(command, folder, monkeypatch):
    def stop(dataset, *_):
        raise Reached([example.prompt for example in dataset])

    monkeypatch.chdir(folder)
    Path("more.jsonl").write_text('{"prompt": "c"}\n{"prompt": "d"}\n')
    for method in ("take", "split"):
        monkeypatch.setattr(f"alula.data.Dataset.{method}", stop)
    sets = ["--data", "prompts.jsonl", "--data", "more.jsonl"]
    monkeypatch.setattr("alula.mismatch.tail.MIN_PROMPTS", 3)
    words = [command, "model", *sets, *COMMANDS[command][2:], "--prompts", 3, "--device", "cpu"]
    with pytest.raises(Reached) as reached:
        app([*map(str, words)])
    assert reached.value.args == (["a b", "c", "d"],)
