"""Metric sinks in addition to the run folder: TensorBoard, Weights & Biases, trackio."""

import secrets
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from alula.errors import SettingError, unknown


class Sink(Protocol):
    def log(self, step: int, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, run_dir: Path, resume_from: int | None, settings: Mapping[str, Any]) -> None:
        module = import_module("torch.utils.tensorboard")
        # Hide what an earlier process wrote after the checkpoint, as in the JSON lines.
        purge = None if resume_from is None else resume_from + 1
        self.writer = module.SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Hosted:
    """Weights & Biases or trackio, which have the same API. The project is `alula`, the run is named after its folder.

    A resumed run continues the same curves. Steps after its checkpoint may appear twice, since neither service can
    delete a step.
    """

    def __init__(self, module: str, run_dir: Path, resume_from: int | None, settings: Mapping[str, Any]) -> None:
        self.service = import_module(module)
        options: dict[str, Any] = {"project": "alula", "name": run_dir.name, "config": dict(settings)}
        if module == "wandb":
            id_file = run_dir / "wandb.id"
            if resume_from is None or not id_file.exists():
                id_file.write_text(secrets.token_hex(4))
            options |= {"dir": str(run_dir), "id": id_file.read_text(), "resume": "allow"}
        else:
            options |= {"resume": "never" if resume_from is None else "allow"}
        self.run = self.service.init(**options)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self.run.log(dict(row), step=step)

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, Callable[[Path, int | None, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": lambda *where: Hosted("wandb", *where),
    "trackio": lambda *where: Hosted("trackio", *where),
}


def check_sinks(names: Iterable[str]) -> None:
    """Raise for a sink whose package, which has the sink's name, is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise missing_package(name, f"no module named {name!r}")


def open_sink(name: str, run_dir: Path, resume_from: int | None, settings: Mapping[str, Any]) -> Sink:
    if name not in SINKS:
        raise unknown("metrics sink", name, SINKS)
    try:
        return SINKS[name](run_dir, resume_from, settings)
    except ImportError as error:
        raise missing_package(name, str(error)) from error


def missing_package(name: str, reason: str) -> SettingError:
    return SettingError(
        f"logging.sinks: {name!r} needs a package that is not installed ({reason}); install it with `pip install "
        f"'alula[{name}]'`, or leave {name!r} out."
    )
