"""Atomic checkpoints: written to a temporary folder, flushed to disk, and renamed into place.

    checkpoints/step-00000040/   *.safetensors   trained weights (float32) and moments; one file per rank
                                 rank-0.json     JSON state of each rank
                                 COMPLETE        sizes and checksums of all files above, written last

Nothing is pickled. Under torchrun every rank writes its own shards through torch.distributed.checkpoint,
in the same safetensors format, and a run may continue with another number of ranks.
"""

import json
import os
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from alula.distributed import World
from alula.errors import RunFailed, SettingError, require
from alula.files import apply_umask, size_text

MARKER = "COMPLETE"
PREFIX = "step-"
ASIDE = ".aside-"
"""Prefix of unfinished, discarded and broken folders: never read, deleted at the next save."""
PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".distcp", ".metadata"}

Resume = bool | Literal["auto"]
"""Whether a run continues from its last checkpoint; "auto": if there is one."""


class CheckpointError(RunFailed):
    """A checkpoint that could not be written or read."""


class Misfit(CheckpointError):
    """A checkpoint of another model or adapter."""


class Checkpoints:
    """The checkpoints of one run in one folder: the last `keep`, and the best."""

    def __init__(
        self,
        folder: Path | str,
        keep: int = 2,
        world: World | None = None,
        report: Callable[[str], None] = lambda message: print(message, file=sys.stderr),
    ) -> None:
        self.folder = Path(folder)
        self.keep = max(1, keep)
        self.world = world or World()
        self.report = report
        self._intact: set[Path] = set()

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], score: float | None = None) -> Path:
        """Write the checkpoint of `step`: tensors (plain or sharded) and this rank's JSON state. The checkpoint with
        the highest `score` is kept as the best.

        An intact checkpoint of the same step is kept, except at step 0, which may be saved again after
        `distill.first`. Any failure, such as a full disk, raises CheckpointError and leaves earlier checkpoints
        unchanged.
        """
        final = self.folder / f"{PREFIX}{step:08d}"
        if step and self.world.all_gather(final.exists())[0] and not self._faults(final):
            return final
        aside = self.folder / f"{ASIDE}{final.name}"
        try:
            self._on_first(lambda: self._make_room(aside, final, tensors))
            self._write(aside, tensors, state)
            self._on_first(lambda: self._commit(aside, final, step, score))
        except (Exception, dcp.CheckpointException) as error:  # torch's is no Exception
            self.world.barrier()
            if self.world.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {final} could not be written: {_reason(error)}. Free some space; {self.resume_hint()}."
            ) from error
        self._on_first(lambda: self._prune(final))
        return final

    def rate(self, step: int, score: float) -> None:
        """Give the checkpoint of `step` its score: it was saved when its evaluation was interrupted."""
        path = self.folder / f"{PREFIX}{step:08d}"
        try:
            self._on_first(lambda: self._rate(path, score))
        except OSError as error:
            self.report(f"checkpoint {path} is intact, but its score could not be written: {_reason(error)}.")

    def shortage(self, tensors: dict[str, Tensor]) -> str | None:
        """Required and free disk space as a clause, or None if a checkpoint of `tensors` fits."""
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        needed, free = sum(t.numel() * t.element_size() for t in tensors.values()), shutil.disk_usage(existing).free
        return f"it needs {size_text(needed)} and the disk has {size_text(free)} left" if free < needed else None

    def begin(self, resume: Resume) -> Path | None:
        """The checkpoint to start from; None starts from the beginning. Raises before anything is written:

        - a new run (False) if there are checkpoints: it would keep an old one of the same step as its own;
        - a resumed run (True) without a checkpoint; "auto" starts from the beginning then, unless a model is there;
        - every resumed run if no checkpoint is intact.
        """
        run = self.folder.parent
        if not resume:
            require(
                not self.all(),
                f"run folder {run} already contains checkpoints; continue the run with --resume, or choose another "
                "folder.",
            )
            return None
        self.check_resume(resume)
        path = self.latest()
        if path is None and self._folders():
            raise CheckpointError(
                f"no checkpoint in {self.folder} is intact ({self._folders()[-1].name}: "
                f"{self._faults(self._folders()[-1])}); restore one from a copy, or start in another folder."
            )
        return path

    def check_resume(self, resume: Resume) -> None:
        """Raise if there is no checkpoint, intact or not, to resume from."""
        run = self.folder.parent
        if self._folders() or (resume == "auto" and not (run / "model").exists()):
            return
        require(run.exists(), f"--resume: run folder {run} does not exist; check the name, or start without --resume.")
        option = "--auto-resume" if resume == "auto" else "--resume"
        raise SettingError(
            f"{option}: {run} has no checkpoint; to start anew, choose another folder without {option}, or delete "
            "this one first."
        )

    def latest(self) -> Path | None:
        """The newest intact checkpoint. Damaged newer ones are reported."""
        damaged: list[str] = []
        for path in reversed(self.all()):
            wrong = self._faults(path)
            if not wrong:
                for message in damaged if self.world.rank == 0 else ():
                    self.report(message)
                return path
            damaged.append(f"checkpoint {path} is damaged ({wrong}); using the previous one.")
        return None

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return [path for path in self._folders() if (path / MARKER).is_file()]

    def resume_hint(self) -> str:
        """What `--resume` does after this process, as a clause."""
        last = self.all()[-1:]
        return f"--resume continues from {last[0].name}" if last else "--resume has no checkpoint to continue from"

    def _folders(self) -> list[Path]:
        """Checkpoints, complete or not, oldest first."""
        return sorted(self.folder.glob(f"{PREFIX}*"))

    def load(self, path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Read a checkpoint into the given live tensors, in place, and return this rank's JSON state (the first rank's,
        if the checkpoint was written by fewer ranks)."""
        reject_pickles(path)
        wrong = self._faults(path)
        if wrong:
            raise CheckpointError(f"checkpoint {path} is damaged: {wrong}.")
        reader = dcp.HuggingFaceStorageReader(str(path))
        try:
            with warnings.catch_warnings():  # one process is intended
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(dict(tensors), storage_reader=reader, no_dist=not self.world.is_distributed)
        except (RuntimeError, ValueError, KeyError, dcp.CheckpointException) as error:
            raise Misfit(
                f"checkpoint {path} does not fit this model: {_reason(error)}. Resume with the same model, lora and "
                "distill settings."
            ) from error
        return self.state(path)

    def state(self, path: Path) -> dict[str, Any]:
        """The JSON state that `load` returns, without the tensors."""
        file = path / f"rank-{self.world.rank}.json"
        return json.loads((file if file.exists() else path / "rank-0.json").read_text())

    def _make_room(self, aside: Path, final: Path, tensors: dict[str, Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{ASIDE}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if shortage := self.shortage(tensors):
            raise OSError(shortage)
        aside.mkdir()

    def _write(self, aside: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        if self.world.is_distributed:
            writer = dcp.HuggingFaceStorageWriter(str(aside), save_distributed=True)
            dcp.save(dict(tensors), storage_writer=writer)
        else:
            save_file({name: t.contiguous() for name, t in tensors.items()}, aside / "tensors.safetensors")
        problem = None
        try:
            (aside / f"rank-{self.world.rank}.json").write_text(json.dumps(state))
        except (OSError, TypeError, ValueError) as error:
            problem = error
        problems = [p for p in self.world.all_gather(problem and str(problem)) if p]
        if problems:
            raise OSError(problems[0])

    def _commit(self, aside: Path, final: Path, step: int, score: float | None) -> None:
        apply_umask(aside)
        files = {p.name: {"bytes": p.stat().st_size, "crc32": _checksum(p)} for p in sorted(aside.iterdir())}
        for name in files:
            _flush(aside / name)
        marker = aside / MARKER
        marker.write_text(json.dumps({"step": step, "score": score, "files": files}, indent=1))
        _flush(marker)
        _flush(aside)
        if final.exists():  # damaged, or of step 0
            final.rename(self.folder / f"{ASIDE}old-{final.name}")
        aside.rename(final)
        _flush(self.folder)

    def _rate(self, path: Path, score: float) -> None:
        new = path / f"{ASIDE}{MARKER}"
        new.write_text(json.dumps(_marker(path) | {"score": score}, indent=1))
        _flush(new)
        new.replace(path / MARKER)
        self._prune(path)

    def _prune(self, newest: Path) -> None:
        """Keep the last ones up to `newest`, and the best of them. Later ones are damaged: the run did not resume from
        them. Rename before deleting: a kill in between must not leave half a checkpoint under its name. What cannot be
        deleted, because another process reads it, is left to the next save."""
        known = [path for path in self.all() if path <= newest]
        kept = {*known[-self.keep :], best_of(known)}
        for path in self.all():
            if path not in kept:
                aside = path.rename(self.folder / f"{ASIDE}old-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)

    def _on_first(self, action: Callable[[], None]) -> None:
        """Run `action` on the first rank; if it fails there, raise on every rank."""
        problem = None
        if self.world.rank == 0:
            try:
                action()
            except (OSError, SafetensorError) as error:
                problem = _reason(error)
        problem = self.world.all_gather(problem)[0]
        if problem:
            raise OSError(problem)

    def _faults(self, path: Path) -> str | None:
        """`faults`, checked by the first rank, and only once: a checkpoint does not change."""
        if path not in self._intact:
            wrong = self.world.all_gather(faults(path) if self.world.rank == 0 else None)[0]
            if wrong:
                return wrong
            self._intact.add(path)
        return None


def best_of(paths: list[Path]) -> Path | None:
    """The checkpoint with the highest score; of several, the newest."""
    ranked = [(score, path) for path in paths if (score := _marker(path).get("score")) is not None]
    return max(ranked)[1] if ranked else None


def faults(path: Path) -> str | None:
    """The first missing, short or altered file of a checkpoint, as a clause; None if it is intact."""
    listed = _marker(path).get("files")
    if not isinstance(listed, dict):
        return f"its {MARKER} file cannot be read"

    def fault(item: tuple[str, dict[str, int]]) -> str | None:
        name, expected = item
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes and should have {expected['bytes']}"
        return None if _checksum(file) == expected["crc32"] else f"{name} does not match its checksum"

    with ThreadPoolExecutor(8) as pool:
        return next(filter(None, pool.map(fault, listed.items())), None)


def _marker(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def reject_pickles(path: Path) -> None:
    pickles = [p.name for p in path.iterdir() if p.suffix in PICKLES or p.name in PICKLES] if path.is_dir() else []
    if pickles:
        raise CheckpointError(
            f"{path} contains {pickles[0]}, a pickle, which can run arbitrary code when loaded. Alula reads only "
            "safetensors; convert it first."
        )


def _checksum(file: Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            total = zlib.crc32(block, total)
    return total


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[-1].rstrip(".") if text else type(error).__name__
