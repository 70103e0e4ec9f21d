"""Inputs that cannot work end with one sentence, before anything slow is done."""

import json
import os
import threading
import time

import huggingface_hub
import pytest

from alula import hub
from alula.data import load
from alula.engine.engine import Engine
from alula.errors import SettingError
from alula.rewards import Rewards, RewardTerm
from command_line import output_of


@pytest.mark.real
def test_truncated_gguf_file_is_reported(smollm2, recipe, tmp_path, capsys):
    part = tmp_path / "part.gguf"
    with smollm2.open("rb") as whole:
        part.write_bytes(whole.read(1_000_000))
    code, _, error = output_of(capsys, "generate", part, "hello")
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith(f"alula: model '{part}' cannot be loaded: ")
    assert error.endswith("; the file is probably incomplete, so fetch it again.\n")
    code, _, error = output_of(capsys, "train", "--check", recipe, f"model.source={part}")
    assert (code, error.count("\n")) == (2, 1)
    assert "probably incomplete" in error


def test_folders_that_hold_no_whole_model_are_reported(tmp_path, capsys):
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    for folder in (checkpoint, tmp_path / "model"):
        folder.mkdir(parents=True)
        (folder / "tensors.safetensors").write_bytes(b"")
    for folder, message in (
        (checkpoint, f"no config.json file; a run's model is in {tmp_path / 'model'}."),
        (tmp_path / "model", f"model '{tmp_path / 'model'}': the folder has no config.json"),
    ):
        assert message in output_of(capsys, "generate", folder, "hello")[2]
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model" / "tensors.safetensors").rename(tmp_path / "model" / "model.safetensors")
    assert "probably incomplete" in output_of(capsys, "generate", tmp_path / "model", "hello")[2]


@pytest.mark.parametrize("place", ["a/file/page.html", "a/folder"])
def test_report_into_an_impossible_place(tmp_path, capsys, place):
    (tmp_path / "a" / "folder").mkdir(parents=True)
    (tmp_path / "a" / "file").write_text("")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    code, _, error = output_of(capsys, "report", run, "-o", tmp_path / place)
    assert code == 2
    assert error.splitlines()[-1].startswith(f"alula: --out {tmp_path / place}: ")
    assert "Traceback" not in error


def test_check_reports_a_sink_that_is_not_installed(recipe, capsys, monkeypatch):
    monkeypatch.setattr("alula.run.sinks.find_spec", lambda name: None if name == "wandb" else object())
    code, _, error = output_of(capsys, "train", "--check", recipe, "logging.sinks=[tensorboard, wandb]")
    assert code == 2
    assert error.startswith("alula: logging.sinks: 'wandb' needs a package that is not installed")
    assert "pip install 'alula[wandb]'" in error
    assert output_of(capsys, "train", "--check", recipe, "logging.sinks=[tensorboard]")[0] == 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--prompts", 8, "--prompts 8: a tail needs at least 20"),
        ("--samples", 0, "--samples 0: "),
        ("--temperature", 0, "--temperature 0.0: "),
        ("--budgets", "32,", "--budgets '32,'"),
        ("--quantile", 5, "--quantile 5.0: "),
        ("--confidence", 95, "--confidence 95.0: "),
        ("--statistics", "/proc/none/queries", "--statistics /proc/none/queries: cannot be written"),
    ],
)
def test_calibrate_checks_its_numbers_before_it_loads_the_model(capsys, monkeypatch, option, value, message):
    monkeypatch.setattr("alula.cli.calibrate.load_model_and_prompts", None)
    code, _, error = output_of(capsys, "calibrate", "shape:tiny-llama", "--data", "task:copy-last", option, value)
    assert code == 2
    assert error.startswith(f"alula: {message}")


@pytest.mark.parametrize(
    ("command", "start"),
    [
        (["demo", "--seed", str(1 << 63)], "--seed 9223372036854775808: must fit into 64 bits."),
        (["train", "toy", f"seed={1 << 63}"], "setting seed=9223372036854775808: "),
        (["train", "toy", f"learner.lora.seed={-(1 << 63) - 1}"], "setting learner.lora.seed=-9223372036854775809: "),
    ],
)
def test_a_seed_beyond_64_bits(tmp_path, capsys, monkeypatch, command, start):
    monkeypatch.chdir(tmp_path)
    code, _, error = output_of(capsys, *command)
    assert code == 2
    assert error.startswith(f"alula: {start}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_prompts_are_read_from_a_pipe(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = '{"prompt": [1, 2, 3]}\n'
    writer = threading.Thread(target=lambda: pipe.write_text(text))
    writer.start()
    code, out, _ = output_of(capsys, "generate", "shape:tiny-llama", "--max-new-tokens", 2, "--file", pipe)
    writer.join()
    assert code == 0
    assert json.loads(out)["prompt_ids"] == [1, 2, 3]
    code, _, error = output_of(capsys, "generate", "shape:tiny-llama", "--file", tmp_path)
    assert (code, error) == (2, f"alula: --file {tmp_path}: is a folder.\n")


def test_unreachable_hub_takes_one_sentence_and_no_retries(capsys, monkeypatch):
    constants = huggingface_hub.constants
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    hub.offline_if_unreachable.cache_clear()
    began = time.monotonic()
    code, _, error = output_of(capsys, "generate", "someone/some-model", "hello")
    assert code == 2
    first, second = error.splitlines()
    assert first == "alula: no connection to http://127.0.0.1:9; using cached files only."
    assert second.startswith("alula: model 'someone/some-model' cannot be loaded: ")
    assert constants.HF_HUB_OFFLINE
    with pytest.raises(SettingError, match=r"data 'someone/data' .* cannot be loaded from the hub"):
        load("someone/data")
    assert time.monotonic() - began < 15, "retries alone would take 23 s for each"
    hub.offline_if_unreachable.cache_clear()


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        (
            "bad_import",
            "import nothing_here",
            "ModuleNotFoundError in a reward's module: No module named 'nothing_here'",
        ),
        ("bad_syntax", "def f(:", "SyntaxError in a reward's module: invalid syntax (bad_syntax.py, line 1)"),
    ],
)
def test_check_reports_a_reward_module_that_fails(recipe, tmp_path, capsys, monkeypatch, name, code, reason):
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    code, _, error = output_of(capsys, "train", "--check", recipe, f"rewards.use={name}:f")
    assert (code, error) == (2, f"alula: rewards.use: {reason}; correct it.\n")


@pytest.mark.parametrize("check", [["--check"], []], ids=["check", "run"])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rewards.use=nope", "rewards.use: unknown reward 'nope'; known: "),
        ("data.source=task:nope", "data.source='task:nope': unknown task 'nope'; known: "),
        ("eval.data={source: task:nope}", "eval.data.source='task:nope': unknown task 'nope'; known: "),
        ("model.source=shape:nope", "model.source='shape:nope': unknown shape 'nope'; known: "),
        ("model.tokenizer=task:nope", "model.tokenizer='task:nope': unknown task 'nope'; known: "),
        ("engine.kv_memory=1XB", "engine.kv_memory='1XB': write a size "),
        ("engine.kv_memory=inf", "engine.kv_memory='inf': write a size "),
        ("engine.swap_memory=1XB", "engine.swap_memory='1XB': write a size "),
        ("data.answer_form=nope", "data.answer_form=nope: unknown form 'nope'; known: "),
    ],
)
def test_errors_name_the_setting(tmp_path, capsys, setting, message, check):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a b", "answer": "c"}\n' * 8)
    data = [f"data={{source: {tmp_path / 'data.jsonl'}}}"] if "answer_form" in setting else []
    small = ["eval.size=1", "model.tokenizer=task:successor", *data, setting, f"out={tmp_path / 'run'}"]
    code, _, error = output_of(capsys, "train", *check, "toy", *small)
    assert code == 2
    assert error.splitlines()[-1].startswith(f"alula: {message}")


def test_errors_of_python_calls_name_their_arguments():
    for call, message in (
        (lambda: load("task:nope"), "unknown task 'nope'; "),
        (lambda: Rewards([RewardTerm(name="nope")]), "unknown reward 'nope'; "),
        (lambda: Engine.load("shape:nope"), "unknown shape 'nope'; "),
        (lambda: Engine.load("shape:tiny-llama", device="cpu", kv_memory="1XB"), "kv_memory='1XB': "),
        (lambda: Engine.load("shape:tiny-llama", device="cuda:9"), "device=cuda:9: "),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            call()


NOISE = bytes(range(128, 256))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("estimate", "toy", "--gpu", "b200"), "alula: --gpu b200: known: h200, h100, a100.\n"),
        (
            ("train", "broken", "--check"),
            "alula: recipe broken: not YAML (line 3, column 1: expected ',' or ']', but got '<stream end>' while "
            "parsing a flow sequence from line 1).\n",
        ),
        (("train", "noise", "--check"), "alula: recipe noise: not UTF-8 text (byte 0); name another file.\n"),
        (("plan", "noise"), "alula: calibration file noise: not UTF-8 text (byte 0); name another file.\n"),
        (("plan", "folder"), "alula: calibration file folder: cannot be read (Is a directory); name another file.\n"),
        (("plan", "list"), "alula: calibration file list: not a calibration; `alula calibrate` writes one.\n"),
        (("demo", "--out", "noise"), "alula: out=noise: is a file; choose a folder.\n"),
        (("demo", "--steps", "0"), "alula: --steps 0: must be at least 1.\n"),
        (("eval", "shape:tiny-llama", "--data", "task:copy-last", "--k", "0"), "alula: --k 0: must be at least 1.\n"),
        (
            ("eval", "shape:tiny-llama", "--data", "task:copy-last", "--limit", "0"),
            "alula: --limit 0: must be at least 1.\n",
        ),
    ],
)
def test_files_and_numbers_that_cannot_work(tmp_path, capsys, monkeypatch, arguments, message):
    (tmp_path / "noise").write_bytes(NOISE)
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "broken").write_text("steps: [1,\nseed: 2\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _, error = output_of(capsys, *arguments)
    assert (code, error) == (2, message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "folder", "list", "noise"]
    assert (tmp_path / "noise").read_bytes() == NOISE


def test_timings_that_are_not_text_are_reported(tmp_path):
    from alula.mismatch.plan.cost import load_cost

    (tmp_path / "noise").write_bytes(NOISE)
    with pytest.raises(SettingError, match=r"timings file .*noise: not UTF-8"):
        load_cost(tmp_path / "noise", None)


def test_gguf_without_its_packages_is_one_sentence(recipe, tmp_path, capsys, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("alula.models.load.find_spec", lambda name: None if name == "gguf" else object())
    for arguments in (
        ("generate", tmp_path / "model.gguf", "hello"),
        ("train", "--check", recipe, f"model.source={tmp_path / 'model.gguf'}"),
    ):
        code, _, error = output_of(capsys, *arguments)
        assert (code, error.count("\n")) == (2, 1)
        assert "GGUF files need gguf; install with `pip install 'alula[gguf]'`" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--n", 10**12), f"n={10**12}: ask for at most "),
        (("--kv-memory", "900000GiB"), "kv_memory=900000GiB: cpu has "),
    ],
)
def test_numbers_beyond_this_machine(tmp_path, capsys, options, message):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [1, 2, 3]}\n')
    code, _, error = output_of(
        capsys, "generate", "shape:tiny-llama", "--device", "cpu", "--file", tmp_path / "prompts.jsonl", *options
    )
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith(f"alula: {message}")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learner.lr=.inf", "setting learner.lr=inf: should be a finite number"),
        ("engine.kv_memory=1KiB", "kv_memory=1024 bytes holds 0 pages"),
        ("logging.sinks=nowhere", "setting logging.sinks.0='nowhere': should be 'tensorboard', 'wandb' or 'trackio'"),
    ],
)
def test_check_rejects_what_the_run_would(recipe, capsys, setting, message):
    code, _, error = output_of(capsys, "train", "--check", recipe, setting)
    assert (code, error.count("\n")) == (2, 1)
    assert message in error


def test_check_names_the_setting_of_a_reward_that_its_module_lacks(recipe, tmp_path, capsys, monkeypatch):
    (tmp_path / "some_rewards.py").write_text("def right(completion, example):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, _, error = output_of(capsys, "train", "--check", recipe, "rewards.use=some_rewards:rihgt")
    assert code == 2
    assert error.startswith("alula: rewards.use: reward some_rewards:rihgt: ")
    assert "did you mean 'right'?" in error


def test_unreadable_metrics_leave_an_existing_report_alone(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"not a line of metrics\n")
    page = tmp_path / "report.html"
    page.write_text("before")
    code, _, error = output_of(capsys, "report", tmp_path / "run", "-o", page)
    assert code == 2
    assert "no line of metrics.jsonl can be read" in error
    assert page.read_text() == "before"


def test_one_sink_needs_no_list():
    from alula.settings import LoggingSettings

    assert LoggingSettings(sinks="tensorboard").sinks == ["tensorboard"]
