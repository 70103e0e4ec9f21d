"""A run that is killed at any moment, or stopped by a signal, and resumed equals an uninterrupted run."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

import toy
from alula.run import checkpoint
from alula.run.run_log import RunLogger
from alula.trainer.trainer import train
from processes import end_of

KILLS = int(os.environ.get("ALULA_KILLS", "3"))
SETTINGS = (*toy.QUICK, "steps=8", "eval.sparse=true", "sampling.dynamic=true", "sampling.max_rounds=2")

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.xdist_group("resume"),
]


def start(out: Path, resume: checkpoint.Resume, before=lambda: None) -> int:
    """A run in a child process, whose id is returned. Forked: a fresh interpreter would spend its time importing."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        before()
        with open(os.devnull, "w") as silent:
            status = 0 if train(toy.toy(out, *SETTINGS), resume=resume, stream=silent) else 130
    finally:
        os._exit(status)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The uninterrupted run: its files, its exported weights and its duration."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    began = time.monotonic()
    assert end_of(start(out, resume=False)) == 0
    return toy.files(out), (out / "model" / "model.safetensors").read_bytes(), time.monotonic() - began


def check_equal(out: Path, uninterrupted) -> None:
    files, weights, _ = uninterrupted
    for name, rows in toy.files(out).items():
        assert rows == files[name], name
    assert (out / "model" / "model.safetensors").read_bytes() == weights


def finish(out: Path) -> None:
    assert end_of(start(out, resume="auto")) == 0


def test_uninterrupted_run_has_varied_metrics(uninterrupted):
    files, _, _ = uninterrupted
    assert [row["step"] for row in files["metrics.jsonl"]] == list(range(1, 9))
    assert [(row["step"], row["policy"]) for row in files["evals.jsonl"]] == [
        (step, policy) for step in (0, 2, 4, 6, 8) for policy in ("sparse", "dense")
    ]
    assert len({row["reward/mean"] for row in files["metrics.jsonl"]}) > 2
    assert any(row["kv/saved"] > 0 for row in files["metrics.jsonl"])


def test_two_runs_of_one_seed_are_the_same(tmp_path, uninterrupted):
    assert end_of(start(tmp_path / "run", resume=False)) == 0
    check_equal(tmp_path / "run", uninterrupted)


def test_killed_again_and_again(tmp_path, uninterrupted):
    """kill -9 at random moments, resumed every time; after a run finishes, another one starts."""
    moments, kills, runs = random.Random(os.environ.get("ALULA_KILL_SEED", "0")), 0, 0
    while kills < KILLS:
        child = start(tmp_path / f"run-{runs}", resume="auto")
        time.sleep(moments.uniform(0.02, 0.6) * uninterrupted[2])
        os.kill(child, signal.SIGKILL)
        if end_of(child) == 0:
            check_equal(tmp_path / f"run-{runs}", uninterrupted)
            runs += 1
        else:
            kills += 1
    for run in range(runs + 1):
        finish(tmp_path / f"run-{run}")
        check_equal(tmp_path / f"run-{run}", uninterrupted)


@pytest.mark.parametrize("moment", ["half of the tensors", "before the marker", "before the rename", "while pruning"])
def test_killed_inside_a_checkpoint_write(tmp_path, uninterrupted, moment):
    out = tmp_path / "run"

    def die_at_the_second_checkpoint() -> None:
        seen = []

        def counting(function, happens):
            def replaced(*arguments, **options):
                seen.append(1)
                if len(seen) == 2:
                    happens(*arguments)
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return replaced

        def half(tensors, path):
            some = dict(list(tensors.items())[: len(tensors) // 2])
            write(some, path)
            os.truncate(path, path.stat().st_size // 2)

        write, nothing = checkpoint.save_file, lambda *_: None
        if moment == "half of the tensors":
            checkpoint.save_file = counting(write, half)
        elif moment == "before the marker":
            checkpoint.Checkpoints._commit = counting(checkpoint.Checkpoints._commit, nothing)
        elif moment == "before the rename":
            aside = checkpoint._flush
            checkpoint._flush = lambda path: die(path) if path.name.startswith(".aside") else aside(path)
            die = counting(aside, nothing)
        else:
            checkpoint.Checkpoints._prune = counting(checkpoint.Checkpoints._prune, nothing)

    assert end_of(start(out, resume=False, before=die_at_the_second_checkpoint)) == -signal.SIGKILL
    complete = [path.name for path in checkpoint.Checkpoints(out / "checkpoints").all()]
    assert complete == ["step-00000002", "step-00000004"][: 2 if moment == "while pruning" else 1]
    finish(out)
    check_equal(out, uninterrupted)


PHASES = (
    "rollouts",
    "rewards",
    "scoring",
    "learning",
    "evaluation (task:successor held out, sparse)",
    "checkpoint",
    "export",
)


@pytest.mark.parametrize("phase", PHASES)
def test_signal_in_every_phase(tmp_path, uninterrupted, phase):
    """The run saves a checkpoint and its status, then exits: at the third occurrence of every phase."""
    out = tmp_path / "run"
    sent = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[PHASES.index(phase) % 3]

    def signal_in_phase() -> None:
        times = []
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup

        def phase_with_signal(record, name):
            times.append(name)
            if times.count(phase) == (1 if phase == "export" else 3) and name == phase:
                os.kill(os.getpid(), sent)

        RunLogger.phase = phase_with_signal

    code = end_of(start(out, resume=False, before=signal_in_phase))
    steps = [row["step"] for row in toy.rows(out, "metrics.jsonl")]
    latest = checkpoint.Checkpoints(out / "checkpoints").latest()
    assert latest is not None
    assert latest.name == f"step-{steps[-1]:08d}", "everything done is in the checkpoint"
    if phase == "export":
        assert code == 0, "there is nothing left to stop"
    else:
        assert code == 130
        assert steps[-1] < 8
        assert '"stopped"' in (out / "status.json").read_text()
    finish(out)
    check_equal(out, uninterrupted)


def test_signal_during_an_evaluation(tmp_path, uninterrupted):
    """The step is done but its evaluation is not: the resumed run evaluates it."""
    from alula.trainer import evaluation as module

    out = tmp_path / "run"

    def signal_in_an_evaluation() -> None:
        calls = []
        right = module.evaluate_policy

        def evaluate(*arguments):
            calls.append(1)
            if len(calls) == 4:  # of step 2, dense; sparse is done
                os.kill(os.getpid(), signal.SIGTERM)
            return right(*arguments)

        module.evaluate_policy = evaluate

    assert end_of(start(out, resume=False, before=signal_in_an_evaluation)) == 130
    assert [row["step"] for row in toy.rows(out, "metrics.jsonl")] == [1, 2]
    assert {row["step"] for row in toy.rows(out, "evals.jsonl")} == {0}
    finish(out)
    check_equal(out, uninterrupted)


def test_resume_without_a_checkpoint_starts_again(tmp_path, uninterrupted):
    out = tmp_path / "run"
    child = start(out, resume=False)
    while not (out / "evals.jsonl").exists() or not (out / "evals.jsonl").read_text():
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    end_of(child)
    finish(out)
    check_equal(out, uninterrupted)


def test_resuming_a_finished_run_changes_nothing(tmp_path, uninterrupted):
    out = tmp_path / "run"
    assert end_of(start(out, resume=False)) == 0
    finish(out)
    check_equal(out, uninterrupted)
