"""Checkpoints that are whole or not there: written aside, flushed to disk, and renamed into place.

    checkpoints/step-00000040/   *.safetensors   trained weights (float32) and moments; one file per rank
                                 rank-0.json     JSON state and random generators of each rank
                                 COMPLETE        sizes and checksums of all the above, written last

Nothing is ever pickled. Under torchrun every rank writes its own shards through torch.distributed.checkpoint,
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
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from alula.distributed import World
from alula.errors import RunFailed, require
from alula.run.rng import rng_state, set_rng_state

MARKER = "COMPLETE"
PREFIX = "step-"
ASIDE = ".aside-"
"""Unfinished, discarded and broken folders: never read, deleted at the next save."""
PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".distcp", ".metadata"}


class CheckpointError(RunFailed):
    """A checkpoint that could not be written or read."""


class Checkpoints:
    """The checkpoints of one run in one folder: the last `keep`, and the best."""

    def __init__(
        self,
        folder: Path | str,
        keep: int = 2,
        world: World | None = None,
        say: Callable[[str], None] = lambda message: print(message, file=sys.stderr),
    ) -> None:
        self.folder = Path(folder)
        self.keep = max(1, keep)
        self.world = world or World()
        self.say = say
        self._whole: set[Path] = set()

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], score: float | None = None) -> Path:
        """Write the checkpoint of `step`: flat tensors (plain or sharded), this rank's JSON state, and the
        random generators. `score` (higher is better) decides which one is kept as the best.

        A checkpoint of the same step that is already there and whole stays, but for step 0, before which a run may
        have work to do. When anything fails, a full disk above all, CheckpointError says so and every earlier
        checkpoint is as it was.
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
                f"checkpoint {final} could not be written: {_reason(error)}. Earlier checkpoints are intact; "
                "free some space, or give the run another folder, and resume."
            ) from error
        self._on_first(self._prune)
        return final

    def shortage(self, tensors: dict[str, Tensor]) -> str | None:
        """What the disk lacks for a checkpoint of these, as a clause; None where there is room."""
        place = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        needed, free = sum(t.numel() * t.element_size() for t in tensors.values()), shutil.disk_usage(place).free
        return f"it needs {_size(needed)} and the disk has {_size(free)} left" if free < needed else None

    def begin(self, resume: bool) -> Path | None:
        """The checkpoint to go on from. A new run must find none: it would keep an old one as that of its own step."""
        if resume:
            return self.latest()
        require(
            not self.all(),
            f"run folder {self.folder.parent} already holds a run's checkpoints; continue it with --resume, or name "
            "another folder.",
        )
        return None

    def latest(self) -> Path | None:
        """The newest whole checkpoint. A broken one is passed over, and said so."""
        for path in reversed(self.all()):
            wrong = self._faults(path)
            if not wrong:
                return path
            if self.world.rank == 0:
                self.say(f"checkpoint {path} is damaged ({wrong}); using the one before it.")
        return None

    def best(self) -> Path | None:
        """The one with the highest score, the newest of several."""
        ranked = [(score, path) for path in self.all() if (score := _marker(path).get("score")) is not None]
        return max(ranked)[1] if ranked else None

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob(f"{PREFIX}*") if (p / MARKER).is_file())

    def load(self, path: Path, tensors: dict[str, Tensor], rng: bool = True) -> dict[str, Any]:
        """Read a checkpoint into the given live tensors, in place, set the random generators as they were, and
        return this rank's JSON state (the first rank's, where there were fewer ranks then)."""
        refuse_pickles(path)
        wrong = self._faults(path)
        if wrong:
            raise CheckpointError(f"checkpoint {path} is damaged: {wrong}.")
        reader = dcp.HuggingFaceStorageReader(str(path))
        try:
            with warnings.catch_warnings():  # one process is what is meant
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(dict(tensors), storage_reader=reader, no_dist=not self.world.is_distributed)
        except (RuntimeError, ValueError, KeyError, dcp.CheckpointException) as error:
            raise CheckpointError(
                f"checkpoint {path} does not fit this model: {_reason(error)}. Resume with the model, lora "
                "and distill settings it was written with."
            ) from error
        saved, own = self._saved(path)
        if rng and own:
            set_rng_state(saved["rng"])
        return saved["state"]

    def state(self, path: Path) -> dict[str, Any]:
        """What `load` returns, without loading anything."""
        return self._saved(path)[0]["state"]

    def _saved(self, path: Path) -> tuple[dict[str, Any], bool]:
        """This rank's JSON, or the first rank's, and whether it is its own."""
        own = path / f"rank-{self.world.rank}.json"
        return json.loads((own if own.exists() else path / "rank-0.json").read_text()), own.exists()

    def _make_room(self, aside: Path, final: Path, tensors: dict[str, Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{ASIDE}*"):
            shutil.rmtree(leftover)
        if shortage := self.shortage(tensors):
            raise OSError(shortage)
        aside.mkdir()

    def _write(self, aside: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        if self.world.is_distributed:
            writer = dcp.HuggingFaceStorageWriter(str(aside), save_distributed=True)
            dcp.save(dict(tensors), storage_writer=writer)
        else:
            save_file({name: t.contiguous() for name, t in tensors.items()}, aside / "tensors.safetensors")
        own = aside / f"rank-{self.world.rank}.json"
        problem = None
        try:
            own.write_text(json.dumps({"state": state, "rng": rng_state()}))
        except (OSError, TypeError, ValueError) as error:
            problem = error
        problems = [p for p in self.world.all_gather(problem and str(problem)) if p]
        if problems:
            raise OSError(problems[0])

    def _commit(self, aside: Path, final: Path, step: int, score: float | None) -> None:
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

    def _prune(self) -> None:
        """Renamed before it is deleted: a kill in between leaves no half of a checkpoint under its name."""
        kept = {*self.all()[-self.keep :], self.best()}
        for path in self.all():
            if path not in kept:
                aside = path.rename(self.folder / f"{ASIDE}old-{path.name}")
                shutil.rmtree(aside)

    def _on_first(self, action: Callable[[], None]) -> None:
        """Do it on the first rank; if it fails there, it fails everywhere."""
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
        """`faults`, looked for by the first rank, and once: a checkpoint does not change."""
        if path not in self._whole:
            wrong = self.world.all_gather(faults(path) if self.world.rank == 0 else None)[0]
            if wrong:
                return wrong
            self._whole.add(path)
        return None


def faults(path: Path) -> str | None:
    """What is wrong with a checkpoint: a missing, short or altered file. None where it is whole."""
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
        found = json.loads((path / MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def refuse_pickles(path: Path) -> None:
    found = [p.name for p in path.iterdir() if p.suffix in PICKLES or p.name in PICKLES] if path.is_dir() else []
    if found:
        raise CheckpointError(
            f"{path} holds {found[0]}, a pickle, which can run any code when it is read; Alula reads "
            "safetensors only. Convert it first."
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


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
