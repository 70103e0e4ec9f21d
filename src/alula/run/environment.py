"""Versions, machine, commit and command line of a run, for its `environment.json`."""

import json
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import alula
from alula.cpus import available_cpus

PACKAGES = ("torch", "transformers", "triton", "safetensors", "datasets", "math-verify", "trl")


def environment() -> dict[str, Any]:
    """Versions, system, processors and the command line of this process; what is absent is left out."""
    found = {
        "alula": alula.__version__,
        "commit": commit(Path(alula.__file__).parent),
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "alula"), *sys.argv[1:]]),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: installed for name in PACKAGES if (installed := package_version(name))},
        "cpus": available_cpus(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": gpus(),
    }
    return {name: value for name, value in found.items() if value is not None}


def recorded_threads(run: Path) -> int | None:
    """The number of CPU threads that the run in this folder was started with."""
    try:
        threads = json.loads((run / "environment.json").read_text())["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return threads if isinstance(threads, int) and threads > 0 else None


def commit(folder: Path) -> str | None:
    """The git commit of `folder`, `-dirty` if tracked files were changed; None unless git tracks the folder's files."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # an installed copy may lie inside a foreign repository
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def gpus() -> list[str]:
    """Name, memory and compute capability of every visible GPU."""
    described = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        described.append(f"{card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}")
    return described
