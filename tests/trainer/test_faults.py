"""Faults in a run: rewards, disks, checkpoints, numbers and signals; each is reported and loses little work."""

import errno
import json
import os
import re
import shutil
import signal
import textwrap
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

import toy
from alula.objective import correction
from alula.run.checkpoint import CheckpointError, Checkpoints
from alula.run.run_dir import LINES, MetricsWriter
from alula.trainer import update
from alula.trainer.evaluation import EvalSummary
from alula.trainer.health import HealthMonitor
from alula.trainer.health_checks import HealthWarning
from alula.trainer.trainer import Trainer, TrainingFailed
from command_line import alula

FAULTY = """
    import os, time

    def grade(completion, example):
        letter = completion.split()[0] if completion.split() else ""
        if letter == "a":
            raise ValueError("an answer that starts with a")
        if letter == "b":
            time.sleep(60)
        if letter == "c":
            os.kill(os.getpid(), 9)
        return float(letter == "d")
"""


def events(out, kind):
    return [row for row in toy.rows(out, "events.jsonl") if row["kind"] == kind]


def weights(run):
    return {name: tensor.clone() for name, tensor in run.learner.full_parameters()}


def unchanged(run, before) -> bool:
    return all(torch.equal(value, before[name]) for name, value in run.learner.full_parameters())


# -- rewards ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reward_that_raises_hangs_or_kills_its_worker(tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(textwrap.dedent(FAULTY))
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "run"
    settings = ("steps=1", "eval.every=0", "rewards={use: ['faulty:grade'], timeout: 0.5, workers: 2}")
    run = toy.trainer(toy.quick(out, *settings))
    batches = []
    collect = run.collector.collect
    monkeypatch.setattr(run.collector, "collect", lambda *a: batches.append(collect(*a)) or batches[-1])
    assert run.run()

    [batch] = batches
    first = [(rollout.text or "").split()[:1] for rollout in batch.rollouts]
    reasons = " ".join(reason for why in batch.failures for reason in why)
    for letter, reason in (("a", "an answer that starts with a"), ("b", "no result within 0.5 s"), ("c", "signal 9")):
        assert [letter] in first, "the seed shows no such answer"
        assert reason in reasons
    assert [reward == 1.0 for reward in batch.rewards] == [start == ["d"] for start in first]
    bad = sum(start in (["a"], ["b"], ["c"]) for start in first)
    [row] = toy.rows(out, "metrics.jsonl")
    assert row["reward/failed"] == pytest.approx(bad / 16)
    assert row["reward/mean"] == pytest.approx(sum(start == ["d"] for start in first) / 16)
    [event] = events(out, "not-graded")
    assert event["message"].startswith(f"{bad} answers of step 1 could not be graded")


def test_a_reward_that_cannot_be_loaded_stops_the_run_before_the_first_rollout(tmp_path, capsys):
    assert alula("train", toy.RECIPE, f"out={tmp_path / 'run'}", "rewards.use=['no_such_module:f']") == 2
    assert "module 'no_such_module'" in capsys.readouterr().err
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert "module 'no_such_module'" in status["reason"]


BROKEN = """
    def raises(completion, example):
        return float(completion == example["solution"])

    def returns_nothing(completion, example):
        pass

    def not_a_number(completion, example):
        return float("nan")

    def one_argument(completion):
        return 1.0

    def odd(completion, example):
        return 1.0 / len(completion.replace("a", ""))
"""


@pytest.fixture
def broken(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(textwrap.dedent(BROKEN))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "answers", "evaluated"),
    [
        (["rewards.use=['broken:raises']"], "first evaluation's 8", 0),
        (["rewards.use=['broken:raises']", "eval.every=0"], "run's first 16", 0),
        (["rewards.use=['task:successor', 'broken:raises']"], "run's first 16", 2),
        (
            ["rewards.use=['task:successor', 'broken:raises']", "rewards.correct=broken:raises"],
            "first evaluation's 8",
            0,
        ),
    ],
)
@pytest.mark.slow
def test_a_reward_that_fails_on_every_answer_stops_the_run(tmp_path, broken, capsys, settings, answers, evaluated):
    """At the first evaluation if the reward grades it, otherwise at the first step."""
    out = tmp_path / "run"
    assert alula("train", toy.RECIPE, f"out={out}", *toy.QUICK, *settings) == 1
    message = capsys.readouterr().err
    assert re.search(f"broken:raises .* {answers} answers", message)
    assert "KeyError: 'solution'" in message
    assert "prompts" not in message
    assert json.loads((out / "status.json").read_text())["state"] == "failed"
    assert toy.rows(out, "metrics.jsonl") == toy.rows(out, "events.jsonl") == []
    assert len(toy.rows(out, "evals.jsonl")) == evaluated


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "KeyError: 'solution'"),
        ("returns_nothing", "NoneType instead of a number"),
        ("not_a_number", " nan"),
        ("one_argument", "(completion, example, **options)"),
        ("odd", ""),
    ],
)
def test_check_grades_examples_of_the_data(tmp_path, broken, capsys, function, message):
    """`odd` fails on some answers only, which a run tolerates."""
    reward = f"rewards.use=['broken:{function}']"
    assert alula("train", "--check", toy.RECIPE, f"out={tmp_path / 'run'}", reward) == (2 if message else 0)
    assert message in capsys.readouterr().err


# -- checkpoints --------------------------------------------------------------------------------------------


def test_a_full_disk_at_checkpoint_time_does_not_end_the_run(tmp_path, monkeypatch):
    out = tmp_path / "run"
    run = toy.trainer(toy.quick(out, "steps=5"))
    real, full = Checkpoints._write, [True]

    def write(self, *arguments):
        if full[0] and self.folder == out / "checkpoints":
            raise OSError(28, "No space left on device")
        real(self, *arguments)

    monkeypatch.setattr(Checkpoints, "_write", write)
    step = run.train_step
    monkeypatch.setattr(run, "train_step", lambda: (step(), full.__setitem__(0, run.step < 4)))
    assert run.run()
    assert toy.printed(run).count("No space left on device") == 1, (
        "it failed after steps 2 and 3, and was reported once"
    )
    assert "step-00000002" in toy.printed(run)
    assert "--resume has no checkpoint to continue from" in toy.printed(run)
    assert run.checkpoints.resume_hint() == "--resume continues from step-00000005"
    assert [path.name for path in run.checkpoints.all()][-2:] == ["step-00000004", "step-00000005"]
    assert len(toy.rows(out, "metrics.jsonl")) == 5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("checkpoint.every=2", "checkpoint.best=false"), [2, 3, 4, 6]),
        (("checkpoint.every=4", "checkpoint.best=true"), [2, 3, 4, 6]),
        (("checkpoint.every=0", "checkpoint.best=true"), [2, 3, 6]),
    ],
    ids=["regular", "best between regular ones", "best only"],
)
@pytest.mark.slow
def test_a_failed_checkpoint_is_tried_again_after_the_next_step(tmp_path, monkeypatch, settings, expected):
    """Independent of why it was due and of the age of the last one."""
    out = tmp_path / "run"
    run = toy.trainer(toy.quick(out, "steps=6", *settings))
    monkeypatch.setattr(
        "alula.trainer.evaluation.evaluate_policy",
        lambda *_: EvalSummary(float(run.step == 2), 0.0, n=8, length=2.0, kv_saved=0.0),
    )
    tried = []
    save = run.checkpoints.save

    def fail_at_two(step, *arguments):
        tried.append(step)
        if step == 2:
            raise CheckpointError("disk full")
        return save(step, *arguments)

    monkeypatch.setattr(run.checkpoints, "save", fail_at_two)
    run.run()
    assert tried == expected


def test_full_disk_prints_one_line_and_keeps_the_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert alula("train", toy.RECIPE, f"out={tmp_path / 'run'}", *toy.QUICK) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "run" / "model") in error
    assert "checkpoint" in error
    assert "--resume has no checkpoint" in error
    assert "Traceback" not in error
    assert len(toy.rows(tmp_path / "run", "metrics.jsonl")) == 4
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    first = toy.rows(tmp_path / "run", "events.jsonl")[0]
    assert (first["step"], first["kind"]) == (0, "disk-space")
    assert re.search(r" 1\.0 MiB .* 0\.0 MiB", first["message"])


def test_disk_too_full_for_the_model_prints_one_line(tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("alula.trainer.trainer.export", full)
    assert alula("train", toy.RECIPE, f"out={tmp_path / 'run'}", *toy.QUICK) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "run" / "model") in error
    assert "No space left on device" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_too_full_for_metrics_prints_one_line(tmp_path, monkeypatch, capsys, code):
    def full(self, name, row):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(MetricsWriter, "_append", full)
    assert alula("train", toy.RECIPE, f"out={tmp_path / 'run'}", *toy.QUICK) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(f"alula: .*{tmp_path / 'run'} .*--resume.*\n", error)


def test_a_damaged_checkpoint_is_skipped_and_reported(tmp_path):
    undamaged = tmp_path / "undamaged"
    toy.trainer(toy.quick(undamaged)).run()
    out = tmp_path / "run"
    toy.trainer(toy.quick(out)).run()
    victim = out / "checkpoints" / "step-00000004" / "tensors.safetensors"
    damaged = bytearray(victim.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    victim.write_bytes(damaged)
    run = toy.trainer(toy.quick(out), resume=True)
    assert run.step == 2
    assert re.search(r"step-00000004 .*tensors\.safetensors .*checksum", toy.printed(run))
    run.run()
    assert toy.files(out) == toy.files(undamaged)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resume_error(out: Path, option: str, code: int, capsys) -> str:
    """The message of a resume that must fail, with every file of the folder left as it was."""
    before = contents(out)
    assert alula("train", toy.RECIPE, f"out={out}", *toy.QUICK, option) == code
    assert contents(out) == before
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize("option", ["--resume", "--auto-resume"])
@pytest.mark.parametrize("damage", ["short", "no marker"])
def test_resume_without_an_intact_checkpoint_raises_and_changes_nothing(tmp_path, capsys, option, damage):
    out = tmp_path / "run"
    toy.trainer(toy.quick(out)).run()
    for path in (out / "checkpoints").iterdir():
        if damage == "short":
            os.truncate(path / "tensors.safetensors", 100)
        else:
            (path / "COMPLETE").unlink()
    message = resume_error(out, option, 1, capsys)
    assert f"no checkpoint in {out / 'checkpoints'} is intact (step-00000004: " in message
    assert ("tensors.safetensors has 100 bytes" if damage == "short" else "COMPLETE") in message


def test_resume_without_a_checkpoint_raises_and_auto_resume_starts(tmp_path, capsys):
    out = tmp_path / "run"
    assert f"run folder {out} does not exist" in resume_error(out, "--resume", 2, capsys)
    assert not out.exists()
    killed = toy.trainer(toy.quick(out), resume="auto")
    killed.train_step()
    killed.logger.writer.close("running")  # as the end of its process does
    assert f"{out} has no checkpoint; " in resume_error(out, "--resume", 2, capsys)
    restarted = toy.trainer(toy.quick(out), resume="auto")
    assert "starting from the beginning" in toy.printed(restarted)
    assert restarted.run()
    assert [row["step"] for row in toy.rows(out, "metrics.jsonl")] == [1, 2, 3, 4]
    continued = toy.trainer(toy.quick(out, "steps=6"), resume="auto")
    assert continued.step == 4
    shutil.rmtree(out / "checkpoints")
    message = resume_error(out, "--auto-resume", 2, capsys)
    assert f"--auto-resume: {out} has no checkpoint; " in message, "its model would be lost"
    assert "--resume" not in message


@pytest.mark.parametrize("part", ["alerts", "health", "evaluation"])
def test_a_state_of_another_version_is_rejected_in_one_sentence(tmp_path, capsys, monkeypatch, part):
    """Entries that are missing, and one with other fields."""
    out = tmp_path / "run"
    toy.trainer(toy.quick(out, "steps=2")).run()
    load = Checkpoints.load

    def other(*arguments):
        state = load(*arguments)
        if part == "alerts":
            del state["alerts"]["idle"]
        elif part == "health":
            state["health"]["evaluations"] = {"set": [{"accuracy": 0.5, "odd": 1}]}
        else:
            del state["evaluation"]["scores"]
        return state

    monkeypatch.setattr(Checkpoints, "load", other)
    assert alula("train", toy.RECIPE, f"out={out}", *toy.QUICK, "--resume") == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "step-00000002 was written by another version of Alula" in message
    assert {"alerts": "idle", "health": "odd", "evaluation": "scores"}[part] in message


# -- numbers ------------------------------------------------------------------------------------------------


def poison(monkeypatch, steps):
    """The loss of these optimizer steps (counted from 0) is not a number."""
    real, calls = update.policy_loss, []

    def poisoned(*arguments, **options):
        loss, metrics = real(*arguments, **options)
        calls.append(1)
        return (loss * float("nan"), metrics) if len(calls) - 1 in steps else (loss, metrics)

    monkeypatch.setattr(update, "policy_loss", poisoned)


def test_a_loss_that_is_not_a_number_skips_the_update(tmp_path, monkeypatch):
    run = toy.trainer(toy.quick(tmp_path / "run", "learner.updates=1"))
    poison(monkeypatch, {1})
    run.train_step()
    before = weights(run)
    run.train_step()
    assert unchanged(run, before)
    run.train_step()
    assert not unchanged(run, before)
    skipped = [row["policy/skipped"] for row in toy.rows(tmp_path / "run", "metrics.jsonl")]
    assert skipped == [0, 1, 0]
    assert toy.rows(tmp_path / "run", "metrics.jsonl")[1]["policy/grad_norm"] is None
    assert (run.learner.skipped, run.alerts.not_finite) == (1, 0)


def test_several_non_finite_updates_in_a_row_stop_the_run(tmp_path, monkeypatch):
    out = tmp_path / "run"
    settings = ("learner.updates=1", "learner.max_skipped=2", "steps=8", "checkpoint.every=1", "checkpoint.keep=9")
    run = toy.trainer(toy.quick(out, *settings))
    poison(monkeypatch, {1, 3, 4})
    with pytest.raises(TrainingFailed, match=r"step 5: .* 2 updates .*learner\.lr"):
        run.run()
    assert json.loads((out / "status.json").read_text())["state"] == "failed"
    assert run.checkpoints.latest().name == "step-00000004"
    monkeypatch.undo()
    again = toy.trainer(toy.quick(out, *settings), resume=True)
    assert (again.step, again.alerts.not_finite) == (4, 1), "the count is restored"
    assert again.run()


def test_non_finite_updates_in_a_row_count_inside_a_step(tmp_path, monkeypatch):
    run = toy.trainer(toy.quick(tmp_path / "run", "learner.updates=4", "learner.max_skipped=2"))
    poison(monkeypatch, {1, 2})
    with pytest.raises(TrainingFailed, match=r"step 1: .* 2 updates in a row"):
        run.train_step()
    assert "step 1: skipped 2 updates whose loss" in toy.printed(run)


@pytest.mark.parametrize("kl", [0, 0.1])
def test_a_step_with_all_rollouts_rejected_changes_nothing_and_is_reported(tmp_path, monkeypatch, kl):
    """With a KL too: it starts at the reference, where its gradient is 0."""
    toy.veto_everything(monkeypatch)
    out = tmp_path / "run"
    settings = ("steps=6", "eval.every=0", f"objective.kl={kl}")
    run = toy.trainer(toy.quick(out, *settings))
    before = weights(run)
    assert run.run()
    assert unchanged(run, before)
    rows = toy.rows(out, "metrics.jsonl")
    assert all(row["mismatch/veto_rate"] == 1 and row["policy/taught"] == 0 for row in rows)
    [event] = events(out, "nothing-learned")
    assert "every rollout was rejected" in event["message"]
    assert "KV budget" in event["advice"]
    assert events(out, "rejection"), "the health warning is reported too"


def test_a_mask_that_rejects_every_rollout_is_reported(tmp_path, monkeypatch):
    """No token is vetoed: `rejected` counts the rollouts that the mask dropped."""
    monkeypatch.setattr(correction, "_ratio", lambda log_ratio, *_: torch.full_like(log_ratio, 5.0))
    settings = ("objective.correction=geometric", "steps=6", "eval.every=0", "objective.kl=0")
    run = toy.trainer(toy.quick(tmp_path / "run", *settings))
    assert run.run()
    rows = toy.rows(tmp_path / "run", "metrics.jsonl")
    assert all((row["mismatch/veto_rate"], row["mismatch/rejected"]) == (0, 1) for row in rows)
    assert "every rollout was rejected" in events(tmp_path / "run", "nothing-learned")[0]["message"]
    [event] = events(tmp_path / "run", "rejection")
    assert re.search(r"100\.0% .* 5 steps .*rejected", event["message"])
    assert re.search(r"vetoed 0\.0%.* · rejected 100\.0%", toy.printed(run))


def test_vetoed_rollouts_that_the_correction_keeps_are_not_rejected(tmp_path):
    """The warning is still given: vetoes are the first sign of a collapse."""
    out = tmp_path / "run"
    run = toy.trainer(
        toy.quick(out, "objective.correction={preset: prefix-only, veto: 0.9}", "steps=5", "eval.every=0")
    )
    assert run.run()
    rows = toy.rows(out, "metrics.jsonl")
    vetoed, rejected = (fmean(row[f"mismatch/{name}"] for row in rows) for name in ("veto_rate", "rejected"))
    assert vetoed > 0.15 > rejected
    message = events(out, "rejection")[0]["message"]
    for part in (f"{vetoed:.1%} ", " 5 steps", "15%", f"{rejected:.1%} rejected"):
        assert part in message
    vetoed, rejected = (rows[0][f"mismatch/{name}"] for name in ("veto_rate", "rejected"))
    assert re.search(rf"vetoed {vetoed:.1%}.* · rejected {rejected:.1%}", toy.printed(run))


def test_a_step_of_equal_rewards_changes_nothing_and_is_reported(tmp_path, monkeypatch):
    (tmp_path / "constant.py").write_text("def one(completion, example):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "run"
    settings = (
        "rewards={use: ['constant:one'], workers: 1}",
        "objective.kl=0",
        "learner.weight_decay=0.1",
        "objective.correction.veto=0.9",
    )
    run = toy.trainer(toy.quick(out, *settings))
    before = weights(run)
    assert run.run()
    assert unchanged(run, before)
    rows = toy.rows(out, "metrics.jsonl")
    assert all(row["groups/no_signal"] == 1 for row in rows)
    assert 0 < rows[0]["mismatch/rejected"] < 1, "some were rejected, and that is not why"
    [event] = events(out, "nothing-learned")
    assert "different reward" in event["message"]
    assert events(out, "groups-equal")


def test_broken_rollouts_have_no_advantage(tmp_path, monkeypatch):
    """Log-probs that are not finite end a rollout with finish=error, possibly before its first token."""
    run = toy.trainer(toy.quick(tmp_path / "run"))
    collect = run.rollouts.collect

    def broken(*arguments, **options):
        rollouts = collect(*arguments, **options)
        rollouts[0].finish, rollouts[1].finish, rollouts[2].finish = "error", "error", "aborted"
        rollouts[0].token_ids, rollouts[0].logprobs, rollouts[0].text = [], torch.empty(0), ""
        return rollouts

    advantages, results = run.updater.advantages, []

    def remembered(batch, corrected):
        batch.rewards[:4] = [1.0, 1.0, 1.0, 0.0]  # rewards of the broken answers are ignored
        results.append(advantages(batch, corrected))
        return results[0]

    monkeypatch.setattr(run.rollouts, "collect", broken)
    monkeypatch.setattr(run.updater, "advantages", remembered)
    run.train_step()
    assert [advantage != 0 for advantage in results[0][:4].tolist()] == [False, False, False, True]
    [row] = toy.rows(tmp_path / "run", "metrics.jsonl")
    assert row["policy/skipped"] == 0
    assert row["policy/loss"] is not None


# -- users --------------------------------------------------------------------------------------------------


def test_a_used_folder_raises_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    toy.trainer(toy.quick(out)).run()
    before = (out / "metrics.jsonl").read_bytes()
    monkeypatch.setattr("alula.rollouts.build.load_model", None)
    assert alula("train", toy.RECIPE, f"out={out}", *toy.QUICK) == 2
    error = capsys.readouterr().err
    assert str(out) in error
    assert "--resume" in error
    assert (out / "metrics.jsonl").read_bytes() == before


def test_checkpoints_of_another_run_raise(tmp_path, capsys):
    """A new run would otherwise resume from their weights after a kill."""
    out = tmp_path / "run"
    toy.trainer(toy.quick(out)).run()
    for name in LINES:
        (out / name).unlink(missing_ok=True)
    assert alula("train", toy.RECIPE, f"out={out}", *toy.QUICK, "seed=5") == 2
    error = capsys.readouterr().err
    assert f"run folder {out}" in error
    assert "checkpoints" in error
    assert "--resume" in error
    assert not (out / "metrics.jsonl").exists()


def test_settings_that_changed_at_a_resume_are_named(tmp_path):
    out = tmp_path / "run"
    toy.trainer(toy.quick(out)).run()
    run = toy.trainer(toy.quick(out, "steps=6", "learner.lr=1e-3"), resume=True)
    assert "learner.lr, steps." in toy.printed(run)
    assert run.run()
    assert [row["step"] for row in toy.rows(out, "metrics.jsonl")] == list(range(1, 7))


def test_an_evaluation_after_the_checkpoint_is_not_logged_twice(tmp_path, monkeypatch):
    """Switched on at a resume, it follows the checkpoint of its step, and so does its warning."""
    warning = HealthWarning("dense-falling", "It fell.", "Look.")
    monkeypatch.setattr(HealthMonitor, "observe_eval", lambda *_, **numbers: [warning])
    uninterrupted, out = tmp_path / "uninterrupted", tmp_path / "run"
    aside = "eval.data={source: 'task:successor', seed: 1, size: 8, options: {symbols: 4, prefix: 2, length: 2}}"
    for folder, kills in ((uninterrupted, 0), (out, 2)):
        toy.trainer(toy.quick(folder, aside, "steps=2", "eval.every=0")).run()
        for _ in range(kills):
            killed = toy.trainer(toy.quick(folder, aside), resume=True)
            monkeypatch.setattr(killed, "train_step", exit)
            with pytest.raises(SystemExit):
                killed.run()
        toy.trainer(toy.quick(folder, aside), resume=True).run()
    assert [row["step"] for row in toy.rows(out, "evals.jsonl")] == [2, 2, 4, 4], "sparse and dense"
    assert len(events(out, "dense-falling")) == 4
    assert toy.files(out) == toy.files(uninterrupted)


@pytest.mark.parametrize("changed", ["data.seed=1", "eval.size=9"])
def test_other_data_at_a_resume_raises(tmp_path, capsys, changed):
    out = tmp_path / "run"
    toy.trainer(toy.quick(out)).run()
    assert alula("train", toy.RECIPE, f"out={out}", *toy.QUICK, changed, "--resume") == 2
    message = capsys.readouterr().err
    assert "training data differs" in message
    assert "eval.size" in message


@pytest.fixture
def interruptible():
    """A process started in the background may ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_second_signal_interrupts_at_once(tmp_path, interruptible):
    run = toy.trainer(toy.quick(tmp_path / "run"))
    with run.stop.listening():
        signal.raise_signal(signal.SIGINT)
        assert run.stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_the_run_unless_ignored(tmp_path, ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        run = toy.trainer(toy.quick(tmp_path / "run"))
        with run.stop.listening():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            assert run.stop.requested is not ignored
    finally:
        signal.signal(signal.SIGHUP, before)


def test_run_continues_when_its_output_pipe_closes(tmp_path):
    out = tmp_path / "run"
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        run = Trainer(toy.quick(out), stream=stream)
        os.close(reader)
        assert run.run()
        assert os.path.samestat(os.fstat(writer), os.stat(os.devnull)), "closing it does not fail either"
    assert json.loads((out / "status.json").read_text())["state"] == "finished"
    assert (out / "model").is_dir()
