"""The demonstration in miniature: everything it does, with too few steps to learn anything."""

import json
import random

import pytest

from alula.config.load import load_config
from alula.demo.problems import HintedPointer
from alula.demo.run import ARMS, Arm, run_demo
from alula.demo.tiny_model import WarmUp
from alula.errors import SettingError
from command_line import alula


def test_share_of_correct_hints():
    task = HintedPointer(symbols=6, min_hops=2, max_hops=4, hint=0.3)
    problems = [task.problem(random.Random(i)) for i in range(400)]
    right = sum(p.shortcut == f"= {p.answer}" for p in problems) / len(problems)
    assert right == pytest.approx(0.3, abs=0.08)
    assert all(p.trace.endswith(f"= {p.answer}") and p.prompt.endswith(":") for p in problems)


@pytest.mark.slow
def test_the_demo_runs_from_start_to_end(tmp_path, monkeypatch):
    smaller = ["sampling.prompts=4", "eval.size=16"]
    monkeypatch.setattr("alula.demo.run.load_config", lambda path, settings: load_config(path, [*settings, *smaller]))
    lines: list[str] = []
    warm = WarmUp(problems=64, batch=8, careful_steps=3, mixture_steps=2)
    arms = run_demo(tmp_path, steps=1, warm=warm, say=lines.append)
    assert [arm.name for arm in arms] == list(ARMS)
    assert all(0 <= arm.lowest <= arm.before <= 1 for arm in arms)
    assert arms[0].kv_saved == 0
    assert all(arm.kv_bytes_peak > 0 for arm in arms)
    assert arms[0].before == arms[1].before  # the same model, the same held-out problems
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in ARMS)
    assert json.loads((tmp_path / "summary.json").read_text())[2]["name"] == "3-sparse-rl"
    assert any("mixture" in line for line in lines)
    with pytest.raises(SettingError, match=f"--out {tmp_path}: "):
        run_demo(tmp_path)


def test_ctrl_c_ends_the_demo_not_only_its_present_run(tmp_path, monkeypatch):
    started = []

    class Stopped:
        def __init__(self, config):
            started.append(config.out)

        def run(self):
            return False  # as after Ctrl-C

    monkeypatch.setattr("alula.demo.run.Trainer", Stopped)
    monkeypatch.setattr("alula.demo.run.build_warm_model", lambda *_: tmp_path / "model")
    assert alula("demo", "--out", tmp_path) == 130
    assert len(started) == 1


def test_the_table_fits_80_columns(tmp_path, monkeypatch, capsys):
    arm = Arm("2-naive-sparse", 0.75, 1.0, 0.5, 0.98, 36.0, 0.33, 8 << 20, 0.51, 104.0)
    monkeypatch.setattr("alula.demo.run.run_demo", lambda *_, **__: [arm])
    monkeypatch.setenv("COLUMNS", "80")
    alula("demo", "--out", tmp_path)
    printed = capsys.readouterr().out
    assert all(cell in printed for cell in ("naive-sparse", "75% → 100%", "8.0 MiB", "104 s"))
    assert "…" not in printed
