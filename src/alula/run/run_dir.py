"""Files of a run folder: JSON lines that people, the report and a resumed run read.

    metrics.jsonl      one object per training step: `step` and flat numbers (docs/metrics.md explains each)
    evals.jsonl        one object per held-out evaluation: step, name, policy (dense | sparse), n, accuracy, …
    completions.jsonl  sampled completions: step, prompt, completion, reward, finish, vetoed
    rollouts.jsonl     all rollouts of one prompt, token by token: texts, log-ratios, evictions; not at every step
    events.jsonl       health warnings and other notes: step, kind, message, advice
    status.json        state of the run (running, finished, stopped, failed) and its total number of steps
    config.yaml        all settings; environment.json: versions, machine and command line of the last start
    learner.json       on a GPU: the learner's settings that were chosen by what fits

A line is written in one call. metrics.jsonl is there from the start, the other files of lines from their first line on.
A run that resumes from the checkpoint of step k first drops all lines after step k, and all lines that were written
after that checkpoint: an evaluation of step k that came later is repeated. Its files then end like those of an
uninterrupted run, except for clocks: the keys under `time/` and `speed/`.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from alula.errors import SettingError, require
from alula.files import write_atomically
from alula.run.sinks import Sink, open_sink

LINES = ("metrics.jsonl", "evals.jsonl", "completions.jsonl", "rollouts.jsonl", "events.jsonl")
State = Literal["running", "finished", "stopped", "failed"]


def check_folder(run_dir: Path, *, new: bool, option: str = "out=FOLDER") -> None:
    """Raise if the run folder cannot be created or, for a new run, already contains a run."""
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.exists(path))
    require(existing.is_dir() or existing != run_dir, f"out={run_dir}: is a file; choose a folder.")
    require(existing.is_dir(), f"out={run_dir}: cannot be created, since {existing} is a file; choose another folder.")
    require(
        os.access(existing, os.W_OK | os.X_OK),
        f"out={run_dir}: cannot be written, since {existing} is read-only; choose another folder.",
    )
    if new and any(os.path.exists(path) and path.stat().st_size for path in (run_dir / name for name in LINES)):
        raise SettingError(
            f"run folder {run_dir} already contains a run; continue it with --resume, or choose another: {option}."
        )


class MetricsWriter:
    """Writes the files of a run folder, and the same numbers to `sinks`: any of tensorboard, wandb, trackio.

    `resume_from` is the step of the checkpoint that the run resumes from; -1 starts again in a folder without a
    checkpoint; None is a new run, which raises if the folder already contains one. `lines` is the value of
    `MetricsWriter.lines` at that checkpoint. The files of a resumed run stay as they were until `start`, `with` or a
    first line: something may still reject the resume.
    """

    def __init__(
        self,
        run_dir: str | Path,
        sinks: Sequence[str] = (),
        *,
        resume_from: int | None = None,
        lines: Mapping[str, int] | None = None,
        settings: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        check_folder(self.run_dir, new=resume_from is None)
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"out={run_dir}: cannot be created ({error.strerror}); choose another one.") from error
        self._files = {LINES[0]: (self.run_dir / LINES[0]).open("ab")}
        """Open files: the first, which is locked, and those with a line of this process."""
        self._lock()
        self._resume_from, self._lines_then = -1 if resume_from is None else resume_from, lines or {}
        self.lines: dict[str, int] = {}
        """Number of lines in each file."""
        self.sinks: list[Sink] = [open_sink(name, self.run_dir, resume_from, settings or {}) for name in sinks]
        self._total_steps = total_steps
        if resume_from is None:
            self.start()

    def start(self) -> None:
        """Drop what a resumed run will write again, and say that the run goes on."""
        if not self.lines:
            last, most = self._resume_from, self._lines_then
            self.lines = {name: drop_after(self.run_dir / name, last, most.get(name)) for name in LINES}
            self._write_status("running")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log one training step. Values are numbers or 0-d tensors; non-finite ones are written as null."""
        row = {name: _number(value) for name, value in metrics.items() if name != "step"}
        self._append("metrics.jsonl", {"step": step} | row)
        self._send(step, row)

    def log_eval(
        self,
        step: int,
        name: str,
        policy: Literal["dense", "sparse"],
        *,
        accuracy: float,
        n: int,
        stderr: float,
        **numbers: float,
    ) -> None:
        """Log one held-out evaluation under one policy. `numbers` are further results, such as `length`."""
        measured = {"accuracy": accuracy, "stderr": stderr} | numbers
        row = {key: _number(value) for key, value in measured.items()}
        self._append("evals.jsonl", {"step": step, "name": name, "policy": policy, "n": n} | row)
        self._send(step, {f"eval/{name}/{policy}/{key}": value for key, value in row.items()})

    def log_completions(self, step: int, completions: Iterable[Mapping[str, Any]]) -> None:
        """Log sampled completions: prompt, completion, reward, finish, vetoed."""
        for completion in completions:
            self._append("completions.jsonl", {"step": step} | dict(completion))

    def log_rollouts(self, step: int, group: Mapping[str, Any]) -> None:
        """Log all rollouts of one prompt, token by token."""
        self._append("rollouts.jsonl", {"step": step} | dict(group))

    def log_event(self, step: int, kind: str, message: str, advice: str = "") -> None:
        self._append("events.jsonl", {"step": step, "kind": kind, "message": message, "advice": advice})

    def close(self, state: State = "finished", reason: str | None = None) -> None:
        """`reason`: why the run failed."""
        if self.lines:
            self._write_status(state, reason)
        for file in self._files.values():
            file.close()
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> "MetricsWriter":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self.close("stopped" if stopped else "failed" if kind else "finished")

    def _lock(self) -> None:
        """Raise if another process writes this run; the lock ends with the process, however it ends."""
        try:
            fcntl.flock(self._files[LINES[0]], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingError(
                f"out={self.run_dir}: another process is running in this folder; wait for it or stop it, or choose "
                "another folder."
            ) from error
        except OSError:  # a file system without locks
            return

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        self.start()
        if name not in self._files:
            self._files[name] = (self.run_dir / name).open("ab")
        self._files[name].write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._files[name].flush()
        self.lines[name] += 1

    def _send(self, step: int, row: Mapping[str, float | int | None]) -> None:
        finite = {name: value for name, value in row.items() if value is not None}
        for sink in self.sinks:
            sink.log(step, finite)

    def _write_status(self, state: State, reason: str | None = None) -> None:
        status = {"state": state, "total_steps": self._total_steps} | ({"reason": reason} if reason else {})
        write_atomically(self.run_dir / "status.json", json.dumps(status) + "\n")


def drop_after(path: Path, step: int, most: int | None = None) -> int:
    """Truncate a file of JSON lines before its first line that is later than `step` or incomplete, and after `most`
    lines. Returns the number of lines left."""
    if not path.exists():
        return 0
    lines = size = 0
    with path.open("rb") as file:
        for line in islice(file, most):
            row = parse_line(line)
            if row is None or row["step"] > step:
                break
            lines, size = lines + 1, size + len(line)
    os.truncate(path, size)
    return lines


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object of a line, or None for a line that a kill cut off."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool | int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
