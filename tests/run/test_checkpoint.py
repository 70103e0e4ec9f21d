import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from alula.learner.learner import Learner
from alula.models.load import load_model
from alula.run.checkpoint import MARKER, CheckpointError, Checkpoints, best_of
from alula.run.export import export
from alula.settings import LearnerSettings, LoRASettings


def learner(dtype="float32", **settings):
    model = load_model("shape:tiny-qwen3", dtype=dtype).model
    settings = {"lr": 1e-2, "token_budget": 50, "decay": "cosine", "warmup_steps": 2, **settings}
    return Learner(model, LearnerSettings(**settings), total_steps=9)


def draw(step):
    """Sequences and weights of a step: nothing in a run draws from a global generator."""
    rng = np.random.default_rng(step)
    rollouts = [
        SimpleNamespace(
            prompt_ids=rng.integers(0, 64, rng.integers(1, 10)).tolist(),
            token_ids=rng.integers(0, 64, rng.integers(1, 10)).tolist(),
        )
        for _ in range(5)
    ]
    weights = [torch.tensor(rng.normal(size=len(r.token_ids)), dtype=torch.float32) for r in rollouts]

    def loss(logprobs, entropy, batch):
        metrics = {"tokens": torch.tensor(len(logprobs)), "entropy": entropy.mean()}
        return -(batch.flat(weights) * logprobs).mean(), metrics

    return rollouts, loss


def train(learning, *steps):
    return [(u.loss, u.metrics, u.grad_norm, u.lr) for u in (learning.update(*draw(step)) for step in steps)]


def everything(learning):
    return {**learning.tensors(), **{f"parameter {n}": p for n, p in learning.model.named_parameters()}}


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"lora": LoRASettings(rank=2)}])
@pytest.mark.slow
def test_resume_continues_bit_for_bit(tmp_path, settings):
    straight = learner(**settings)
    history = train(straight, *range(6))

    first = learner(**settings)
    assert train(first, 0, 1, 2) == history[:3]
    Checkpoints(tmp_path).save(3, first.tensors(), {"learner": first.state(), "data": {"position": 7}})

    second, checkpoints = learner(**settings), Checkpoints(tmp_path)
    state = checkpoints.load(checkpoints.latest(), second.tensors())
    second.resume(state["learner"])
    assert state["data"] == {"position": 7}
    assert train(second, 3, 4, 5) == history[3:]
    expected = everything(straight)
    for name, tensor in everything(second).items():
        assert torch.equal(tensor, expected[name]), name


def small(value=0.0):
    return {"model.w": torch.full((64, 64), float(value)), "optimizer.w.step": torch.tensor(float(value))}


def read(checkpoints, path):
    tensors = small(-1)
    state = checkpoints.load(path, tensors)
    assert tensors["model.w"][3, 3] == tensors["optimizer.w.step"]
    return tensors["model.w"][0, 0].item(), state


def test_last_and_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, score in enumerate([0.1, 0.9, 0.3, None, 0.5]):
        checkpoints.save(step, small(step), {"step": step}, score=score)
    assert [p.name for p in checkpoints.all()] == ["step-00000001", "step-00000003", "step-00000004"]
    assert read(checkpoints, best_of(checkpoints.all())) == (1.0, {"step": 1})
    assert read(checkpoints, checkpoints.latest()) == (4.0, {"step": 4})
    assert sorted(p.name for p in tmp_path.iterdir()) == [p.name for p in checkpoints.all()]


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "marker"])
def test_a_damaged_checkpoint_is_skipped_and_reported(tmp_path, damage):
    reports = []
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2):
        checkpoints.save(step, small(step), {"step": step})
    victim = tmp_path / "step-00000002"
    file = victim / "tensors.safetensors"
    if damage == "flip":
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        os.truncate(file, 100)
    elif damage == "delete":
        (victim / "rank-0.json").unlink()
    else:
        (victim / MARKER).write_text("{")
    checkpoints = Checkpoints(tmp_path, keep=3, report=reports.append)
    assert read(checkpoints, checkpoints.latest()) == (1.0, {"step": 1})
    assert len(reports) == 1
    assert "step-00000002 is damaged" in reports[0]
    with pytest.raises(CheckpointError, match=r"step-00000002 .*damaged"):
        checkpoints.load(victim, small())
    # training goes on from step 1 and reaches step 2 again
    checkpoints.save(2, small(2), {"step": 2})
    assert read(checkpoints, checkpoints.latest()) == (2.0, {"step": 2})
    assert best_of(checkpoints.all()) is None


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_later_checkpoints_do_not_take_the_place_of_new_ones(tmp_path, keep):
    """The run went back to step 1 and is stopped before it reaches the damaged steps again."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step, score in ((1, 0.5), (3, 0.9), (4, 0.7)):
        checkpoints.save(step, small(step), {"step": step}, score=score)
    for step in (3, 4):
        os.truncate(tmp_path / f"step-0000000{step}" / "tensors.safetensors", 100)
    checkpoints = Checkpoints(tmp_path, keep=keep, report=lambda message: None)
    assert checkpoints.begin(resume=True).name == "step-00000001"
    checkpoints.save(2, small(2), {"step": 2}, score=0.4)
    again = Checkpoints(tmp_path, keep=keep)
    assert read(again, again.begin(resume=True)) == (2.0, {"step": 2})
    assert best_of(again.all()).name == "step-00000001"


def test_old_checkpoints_that_cannot_be_deleted_stop_nothing(tmp_path, monkeypatch):
    """As on a network file system while another process reads them. A later save deletes them."""

    def busy(*_, **__):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    checkpoints = Checkpoints(tmp_path, keep=1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", busy)
        for step in (1, 2, 3):
            checkpoints.save(step, small(step), {"step": step})
        assert [path.name for path in checkpoints.all()] == ["step-00000003"]
    checkpoints.save(4, small(4), {"step": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_latest_of_an_empty_folder_is_none(tmp_path):
    assert Checkpoints(tmp_path / "none").latest() is None


def test_the_same_step_twice_keeps_the_first(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {})
    checkpoints.save(1, small(2), {})
    assert read(checkpoints, checkpoints.latest())[0] == 1.0


FULL_DISK = """
    import resource, signal, sys, torch
    from alula.run.checkpoint import CheckpointError
    from alula.run.checkpoint import Checkpoints
    checkpoints = Checkpoints(sys.argv[1])
    checkpoints.save(1, {"model.w": torch.ones(1000)}, {"step": 1})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    try:
        checkpoints.save(2, {"model.w": torch.ones(100_000)}, {"step": 2})
    except CheckpointError as error:
        print(error)
        sys.exit(7)
"""


@pytest.mark.slow
def test_a_write_that_fails_leaves_the_previous_checkpoint(tmp_path):
    """The operating system rejects a write in the middle of the file, as on a full disk."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 7, result.stderr
    assert "step-00000002 " in result.stdout
    assert "too large" in result.stdout
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest().name == "step-00000001"
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_too_little_space_raises_before_anything_is_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {})
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"step-00000002 .* MiB .* 0\.0 MiB"):
        checkpoints.save(2, small(2), {})
    assert checkpoints.latest().name == "step-00000001"


def test_state_that_is_not_json_raises(tmp_path):
    with pytest.raises(CheckpointError, match="JSON"):
        Checkpoints(tmp_path).save(1, small(), {"what": object()})
    assert list(tmp_path.iterdir()) == []


WRITER = """
    import sys, torch
    from alula.run.checkpoint import Checkpoints
    checkpoints = Checkpoints(sys.argv[1], keep=2)
    step = int(checkpoints.latest().name[5:]) if checkpoints.latest() else 0
    print("ready", flush=True)
    while True:
        step += 1
        tensors = {f"model.{i}": torch.full((300_000,), float(step)) for i in range(4)}
        checkpoints.save(step, tensors, {"step": step})
"""


@pytest.mark.slow
def test_killed_in_the_middle_of_writing(tmp_path):
    """kill -9 at random moments of a loop that only writes: the latest checkpoint is complete and gets newer."""
    rng, newest, unfinished, kills = random.Random(0), 0, 0, 0
    while kills < 3 or not (newest and unfinished):
        kills += 1
        assert kills <= 12, "on a busy machine some kills miss the writing, but not all"
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)], stdout=subprocess.PIPE
        )
        writer.stdout.readline()
        while not list(tmp_path.glob(".aside-*")):
            time.sleep(0.001)
        time.sleep(rng.uniform(0.05, 0.2))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        unfinished += any(tmp_path.glob(".aside-*"))
        reports = []
        checkpoints = Checkpoints(tmp_path, report=reports.append)
        path = checkpoints.latest()
        assert reports == []
        if path is None:
            assert newest == 0
            continue
        tensors = {f"model.{i}": torch.empty(300_000) for i in range(4)}
        step = checkpoints.load(path, tensors)["step"]
        assert step >= newest
        assert all((t == step).all() for t in tensors.values())
        newest = step


def test_pickles_raise(tmp_path):
    path = Checkpoints(tmp_path).save(1, small(), {})
    torch.save({}, path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt.*pickle"):
        Checkpoints(tmp_path).load(path, small())


def test_a_checkpoint_of_another_model_raises(tmp_path):
    path = Checkpoints(tmp_path).save(1, small(), {})
    with pytest.raises(CheckpointError, match=r"step-00000001 .*model"):
        Checkpoints(tmp_path).load(path, {"model.w": torch.zeros(3, 3)})
    with pytest.raises(CheckpointError, match=r"step-00000001 .*model"):
        Checkpoints(tmp_path).load(path, {"model.other": torch.zeros(3)})


def test_export_shows_no_progress_bar_in_a_terminal(tmp_path, monkeypatch, capsys):
    """The live display is on that terminal."""
    model = load_model("shape:tiny-qwen3").model
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    export(tmp_path / "final", model, model.named_parameters())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"lora": LoRASettings(rank=2)}])
@pytest.mark.parametrize("shape", ["tiny-qwen3", "tiny-qwen2"])
def test_export_loads_in_transformers(tmp_path, settings, shape):
    settings = {"dtype": "float32", **settings}
    model = load_model(f"shape:{shape}", dtype=settings.pop("dtype")).model
    learning = Learner(model, LearnerSettings(lr=1e-2, **settings))
    train(learning, 0, 1)
    for _ in range(2):  # the second replaces the first
        export(tmp_path / "final", model, learning.full_parameters())
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert loaded.dtype == model.dtype
    assert loaded.config._attn_implementation != "alula-packed"
    expected = dict(learning.full_parameters())
    assert expected.keys() == dict(loaded.named_parameters()).keys()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    if learning.dtype == torch.float32:
        rollouts, _ = draw(0)
        for rollout, scores in zip(rollouts, learning.score(rollouts)):
            ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
            logp = loaded(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
            wanted = logp.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(scores, wanted, atol=1e-5, rtol=1e-5)
