"""Options that several commands share: what of them reaches the model."""

import pytest
import torch

from alula.cli.main import app

SHAPE = "shape:tiny-llama"
SPARSE = ("--sparsity", "streaming:8+2,window=2,sinks=1")
COMMANDS = {
    "generate": (),
    "eval": ("--data", "task:copy-last"),
    "calibrate": ("--data", "task:copy-last", "--length", 64),
    "distill": ("--data", "task:copy-last", *SPARSE),
}


class Reached(Exception):
    """As far as a test goes: the work itself is not done."""


def alula_says(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        app([*map(str, words)])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_float32_residual_stream_is_asked_for(command, tmp_path, monkeypatch, capsys):
    def stop(model):
        raise Reached(model.dtype)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("alula.model.widen_residual", stop)
    prompt = ["a"] if command == "generate" else []
    words = [command, SHAPE, *prompt, *COMMANDS[command], "--device", "cpu", "--dtype", "bfloat16", "--residual"]
    with pytest.raises(Reached) as reached:
        app([*map(str, words), "float32"])
    assert reached.value.args == (torch.bfloat16,)
    assert "residual=float64: must be float32, or left out" in alula_says(capsys, *words, "float64")
