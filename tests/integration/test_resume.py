"""A run that is killed at any moment, or asked to stop, and continued, ends as if nothing had happened."""

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

KILLS = int(os.environ.get("ALULA_KILLS", "3"))
SETTINGS = (*toy.QUICK, "steps=8", "eval.sparse=true", "sampling.dynamic=true", "sampling.max_rounds=2")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def start(out: Path, resume: bool, before=lambda: None) -> int:
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


def end_of(child: int) -> int:
    """Exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody touches: its files, its exported weights, and how long it took."""
    out = tmp_path_factory.mktemp("whole") / "run"
    began = time.monotonic()
    assert end_of(start(out, resume=False)) == 0
    return toy.files(out), (out / "model" / "model.safetensors").read_bytes(), time.monotonic() - began


def same(out: Path, whole) -> None:
    files, weights, _ = whole
    for name, rows in toy.files(out).items():
        assert rows == files[name], name
    assert (out / "model" / "model.safetensors").read_bytes() == weights


def finish(out: Path) -> None:
    assert end_of(start(out, resume=True)) == 0


def test_the_untouched_run_is_worth_comparing(whole):
    files, _, _ = whole
    assert [row["step"] for row in files["metrics.jsonl"]] == list(range(1, 9))
    assert [(row["step"], row["policy"]) for row in files["evals.jsonl"]] == [
        (step, policy) for step in (0, 2, 4, 6, 8) for policy in ("sparse", "dense")
    ]
    assert len({row["reward/mean"] for row in files["metrics.jsonl"]}) > 2
    assert any(row["kv/saved"] > 0 for row in files["metrics.jsonl"])


def test_two_runs_of_one_seed_are_the_same(tmp_path, whole):
    assert end_of(start(tmp_path / "run", resume=False)) == 0
    same(tmp_path / "run", whole)


def test_killed_again_and_again(tmp_path, whole):
    """kill -9 at random moments, continued every time; where a run gets to its end, another one begins."""
    moments, kills, runs = random.Random(os.environ.get("ALULA_KILL_SEED", "0")), 0, 0
    while kills < KILLS:
        child = start(tmp_path / f"run-{runs}", resume=True)
        time.sleep(moments.uniform(0.02, 0.6) * whole[2])
        os.kill(child, signal.SIGKILL)
        if end_of(child) == 0:
            same(tmp_path / f"run-{runs}", whole)
            runs += 1
        else:
            kills += 1
    for run in range(runs + 1):
        finish(tmp_path / f"run-{run}")
        same(tmp_path / f"run-{run}", whole)


@pytest.mark.parametrize("place", ["half of the tensors", "before the marker", "before the rename", "while pruning"])
def test_killed_inside_a_checkpoint_write(tmp_path, whole, place):
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
        if place == "half of the tensors":
            checkpoint.save_file = counting(write, half)
        elif place == "before the marker":
            checkpoint.Checkpoints._commit = counting(checkpoint.Checkpoints._commit, nothing)
        elif place == "before the rename":
            aside = checkpoint._flush
            checkpoint._flush = lambda path: die(path) if path.name.startswith(".aside") else aside(path)
            die = counting(aside, nothing)
        else:
            checkpoint.Checkpoints._prune = counting(checkpoint.Checkpoints._prune, nothing)

    assert end_of(start(out, resume=False, before=die_at_the_second_checkpoint)) == -signal.SIGKILL
    whole_ones = [path.name for path in checkpoint.Checkpoints(out / "checkpoints").all()]
    assert whole_ones == ["step-00000002", "step-00000004"][: 2 if place == "while pruning" else 1]
    finish(out)
    same(out, whole)


PHASES = ("rollouts", "rewards", "scoring", "learning", "evaluation (sparse)", "checkpoint", "export")


@pytest.mark.parametrize("phase", PHASES)
def test_asked_to_stop(tmp_path, whole, phase):
    """Saves where it is, says so, and leaves: whatever it is doing, at the third time that it does it."""
    out = tmp_path / "run"
    asked = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[PHASES.index(phase) % 3]

    def ask_in_phase() -> None:
        times = []
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup

        def ask(record, name):
            times.append(name)
            if times.count(phase) == (1 if phase == "export" else 3) and name == phase:
                os.kill(os.getpid(), asked)

        RunLogger.phase = ask

    code = end_of(start(out, resume=False, before=ask_in_phase))
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
    same(out, whole)


def test_asked_to_stop_in_the_middle_of_an_evaluation(tmp_path, whole):
    """The step is done, its evaluation is not: it is made up for."""
    from alula.trainer import trainer as module

    out = tmp_path / "run"

    def ask_in_an_evaluation() -> None:
        calls = []
        right = module.evaluate_policy

        def evaluate(*arguments):
            calls.append(1)
            if len(calls) == 4:  # of step 2, dense; sparse is done
                os.kill(os.getpid(), signal.SIGTERM)
            return right(*arguments)

        module.evaluate_policy = evaluate

    assert end_of(start(out, resume=False, before=ask_in_an_evaluation)) == 130
    assert [row["step"] for row in toy.rows(out, "metrics.jsonl")] == [1, 2]
    assert {row["step"] for row in toy.rows(out, "evals.jsonl")} == {0}
    finish(out)
    same(out, whole)


def test_resume_without_a_checkpoint_starts_again(tmp_path, whole):
    out = tmp_path / "run"
    child = start(out, resume=False)
    while not (out / "evals.jsonl").exists() or not (out / "evals.jsonl").read_text():
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    end_of(child)
    finish(out)
    same(out, whole)


def test_resuming_a_finished_run_changes_nothing(tmp_path, whole):
    out = tmp_path / "run"
    assert end_of(start(out, resume=False)) == 0
    finish(out)
    same(out, whole)
