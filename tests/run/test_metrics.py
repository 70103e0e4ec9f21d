"""The run folder: complete lines, and a resumed run's files equal to an uninterrupted one's."""

import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from alula.data import Dataset, Example
from alula.distributed import World
from alula.errors import SettingError
from alula.run.console import LiveLine, describe, duration
from alula.run.run_dir import LINES, MetricsWriter, drop_after, parse_line
from alula.run.run_log import RunLogger
from toy import toy, without_clocks


def train(run: Path, first: int, last: int, resume_from: int | None, clock: float = 0.0) -> None:
    """Log the steps of a deterministic run; only the clocks depend on when it runs."""
    writer = MetricsWriter(run, resume_from=resume_from, total_steps=last)
    for step in range(first, last + 1):
        noise = random.Random(step)
        writer.log(step, {"reward/mean": noise.random(), "time/step": clock, "speed/mfu": clock})
        if step % 3 == 0:
            writer.log_eval(step, "held", "dense", accuracy=noise.random(), n=10, stderr=0.1, length=7.5)
            writer.log_completions(step, [{"prompt": "é?\n", "completion": "42", "reward": 1.0}])
            writer.log_rollouts(step, {"prompt": ["é", "?"], "rollouts": [{"tokens": ["42"], "log_ratio": [-0.1]}]})
        if step % 4 == 0:
            writer.log_event(step, "rejection", "too much", "less")
    writer.close()


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("cut", [0, 1, 17, 60])
@pytest.mark.parametrize("checkpoint", [-1, 0, 3, 5, 11])
def test_resumed_files_equal_the_uninterrupted_ones(tmp_path, checkpoint, cut):
    train(tmp_path / "uninterrupted", 1, 12, None)
    train(tmp_path / "killed", 1, 12, None, clock=3.0)
    for name in LINES:  # a kill in the middle of a write leaves part of a line
        path = tmp_path / "killed" / name
        os.truncate(path, path.stat().st_size - cut)
    train(tmp_path / "killed", max(checkpoint, 0) + 1, 12, checkpoint, clock=5.0)
    for name in LINES:
        uninterrupted, killed = rows(tmp_path / "uninterrupted" / name), rows(tmp_path / "killed" / name)
        assert len(uninterrupted) > 2
        assert list(map(without_clocks, uninterrupted)) == list(map(without_clocks, killed))
        if name != "metrics.jsonl":
            assert (tmp_path / "uninterrupted" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


def test_every_line_is_on_disk_at_once_even_when_killed(tmp_path):
    script = (
        "import os, signal\nfrom alula.run.run_dir import MetricsWriter\n"
        f"writer = MetricsWriter({str(tmp_path / 'run')!r})\n"
        "writer.log(1, {'a': 1.5}); writer.log(2, {'a': 2.5})\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert rows(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "a": 1.5}, {"step": 2, "a": 2.5}]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "running"


def test_numbers_keep_every_bit_and_non_finite_ones_are_null(tmp_path):
    import torch

    value = 0.1 + 0.2
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"a": value, "b": torch.tensor(0.5), "c": 3, "d": float("nan"), "e": float("inf")})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "a": value, "b": 0.5, "c": 3, "d": None, "e": None}]


def test_a_used_folder_is_not_overwritten(tmp_path):
    train(tmp_path, 1, 3, None)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(SettingError, match=r"run folder .* --resume"):
        MetricsWriter(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_folder_has_one_process_at_a_time(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"a": 1.5})
        with pytest.raises(SettingError, match=rf"out={tmp_path}: another process is running"):
            MetricsWriter(tmp_path, resume_from=-1)
        writer.log(2, {"a": 2.5})
    assert len(rows(tmp_path / "metrics.jsonl")) == 2, "nothing was dropped"
    with MetricsWriter(tmp_path, resume_from=2) as writer:
        assert writer.lines["metrics.jsonl"] == 2


@pytest.mark.parametrize(
    ("error", "state"), [(None, "finished"), (KeyboardInterrupt, "stopped"), (ValueError, "failed")]
)
def test_status_shows_how_the_run_ended(tmp_path, error, state):
    with contextlib.suppress(KeyboardInterrupt, ValueError), MetricsWriter(tmp_path, total_steps=7):
        if error:
            raise error
    assert json.loads((tmp_path / "status.json").read_text()) == {"state": state, "total_steps": 7}


def test_drop_after_stops_at_the_first_broken_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a"\n{"step": 3}\n')
    assert drop_after(path, 9) == 1
    assert path.read_bytes() == b'{"step": 1}\n'
    assert drop_after(path, 9, most=0) == 0
    assert path.read_bytes() == b""
    assert parse_line(b'{"step": 1}') is None
    assert parse_line(b"[1]\n") is None


def test_tensorboard_holds_the_resumed_curve(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_from, first in ((None, 1), (3, 4)):
        with MetricsWriter(tmp_path, ["tensorboard"], resume_from=resume_from) as writer:
            for step in range(first, 6):
                writer.log(step, {"reward/mean": step / 10})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curve = [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")]
    assert curve == [(step, step / 10) for step in range(1, 6)]


def test_unknown_and_uninstalled_sinks_raise(tmp_path, monkeypatch):
    with pytest.raises(SettingError, match="did you mean 'wandb'"):
        MetricsWriter(tmp_path / "a", ["wandbb"])
    monkeypatch.setitem(sys.modules, "trackio", None)  # the import then fails, as for a missing package
    with pytest.raises(SettingError, match=r"pip install 'alula\[trackio\]'"):
        MetricsWriter(tmp_path / "b", ["trackio"])


@pytest.mark.parametrize("sink", ["wandb", "trackio"])
def test_hosted_sinks_run_without_a_server(tmp_path, monkeypatch, sink):
    pytest.importorskip(sink)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for resume_from, first in ((None, 1), (3, 4)):
        with MetricsWriter(tmp_path / "run", [sink], resume_from=resume_from, settings={"a": 1}) as writer:
            for step in range(first, 6):
                writer.log(step, {"reward/mean": step / 10, "nothing": float("nan")})
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]


STEP = {
    "reward/mean": 0.4567,
    "response/length_mean": 311.6,
    "mismatch/veto_rate": 0.071,
    "mismatch/rejected": 0.25,
    "kv/saved": 0.613,
    "speed/tokens_per_s": 12345.6,
}
WORDS = "reward 0.457 · length 312 · vetoed 7.1% · KV saved 61% · tok/s 12,346 · rejected 25.0%"


def test_piped_output_is_one_plain_line_per_step():
    now = iter([0.0, 10.0, 20.0, 30.0])
    stream = io.StringIO()
    with LiveLine(100, first_step=40, stream=stream, clock=lambda: next(now)) as live:
        live.phase("rollout")
        for step in (41, 42, 43):
            live.update(step, STEP)
        live.message("warning: [looks] like markup")
    lines = stream.getvalue().splitlines()
    assert lines[0] == f"step 41/100 · {WORDS} · 9 min 50 s left"
    assert lines[2:] == [f"step 43/100 · {WORDS} · 9 min 30 s left", "warning: [looks] like markup"]


def test_a_terminal_gets_two_live_lines():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    os.environ.pop("NO_COLOR", None)
    with LiveLine(4, stream=stream) as live:
        live.console.width = 160
        for step in (1, 2, 3, 4):
            live.update(step, STEP)
        live.message("a warning")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "step 4/4" in plain
    assert WORDS in plain
    assert "a warning" in plain
    assert [line.strip() for line in plain.splitlines()[-2:]] == ["step 4/4 · 0 s left · done", WORDS]
    assert plain.count("step 1/4") <= 1


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_live_lines_never_wrap_and_keep_the_step(width):
    live = LiveLine(1000, stream=io.StringIO(), clock=iter([0.0, 9.0]).__next__)
    live.console.width = width
    live.update(123, STEP)
    live.phase("rollouts")
    live.progress(37, 512, 41_234, 530_000)
    with live.console.capture() as captured:
        live.console.print(live._render())
    first, second = captured.get().splitlines()
    assert first.startswith("step 123/1000 · 2 h 11 min left · ")
    assert max(len(first), len(second)) <= width
    assert second.startswith("reward 0.457 · length 312")
    if width >= 80:
        assert "left · rollouts · 37 of 512 · 41,234 of abo" in first
        assert "KV saved 61% · tok/s 12,346" in second
    live.progress(38, 512, 42_000, 530_000)
    assert live._phase == "rollouts · 38 of 512 · 42,000 of about 530,000 tokens"
    live.phase("scoring")
    assert live._phase == "scoring"


def test_missing_metrics_are_left_out():
    assert describe({"reward/mean": 0.5}) == "reward 0.500"
    assert describe({"reward/mean": None, "kv/saved": 0.0}) == "KV saved 0%"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (97200, "1 d 03 h")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_rows_left_out_are_printed_for_every_data_set(tmp_path):
    stream = io.StringIO()
    examples = (Example("a"), Example("b"))
    training = Dataset(examples, "train", {"no answer": 2})
    held_out = [Dataset(examples, "first", {"no answer": 1000, "empty prompt": 1}), Dataset(examples, "second")]
    with RunLogger(toy(tmp_path / "run"), World(), stream) as logger:
        logger.start(training, held_out)
    lines = stream.getvalue().splitlines()
    assert lines[1:] == [
        "train: 2 prompts, 4 to evaluate on; left out: 2 (no answer).",
        "first: 2 to evaluate on; left out: 1,000 (no answer), 1 (empty prompt).",
    ]


def test_the_first_lines_of_a_run_count_in_the_singular(tmp_path):
    stream = io.StringIO()
    with RunLogger(toy(tmp_path / "run", "steps=1"), World(), stream) as logger:
        logger.start(Dataset((Example("a"),), "train"), [])
    lines = stream.getvalue().splitlines()
    assert ", 1 step of " in lines[0]
    assert lines[1] == "train: 1 prompt."


def test_an_accuracy_without_a_standard_error_is_printed_alone(tmp_path):
    stream = io.StringIO()
    with RunLogger(toy(tmp_path / "run"), World(), stream) as logger:
        logger.log_eval(1, "held", "dense", {"accuracy": 1.0, "stderr": 0.0, "n": 8})
        logger.log_eval(2, "held", "dense", {"accuracy": 0.5, "stderr": 0.1, "n": 8})
    assert stream.getvalue().splitlines() == [
        "step 1: dense accuracy on held 100.0%",
        "step 2: dense accuracy on held 50.0% ± 10.0%",
    ]
    (row, _) = rows(tmp_path / "run" / "evals.jsonl")
    assert row["stderr"] == 0.0, "as measured"


def test_importing_needs_no_torch():
    script = "import sys, alula.run.run_dir, alula.run.console, alula.trainer.health; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_glossary_lists_every_displayed_metric():
    from alula.report.charts import MAIN, MORE, REWARD
    from alula.trainer.health import WATCHED

    glossary = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    names = {chart.metric for chart in (REWARD, *MAIN, *MORE)} | set(WATCHED)
    assert [name for name in sorted(names) if f"`{name}`" not in glossary] == []


def test_glossary_lists_every_warning():
    from alula.trainer import health_checks

    source = Path(health_checks.__file__).read_text()
    kinds = set(re.findall(r'HealthWarning\(\s*"([a-z-]+)"', source))
    glossary = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert len(kinds) == 11
    assert [kind for kind in kinds if f"| `{kind}` |" not in glossary] == []
