"""Small runs of the whole trainer: recipes/toy.yaml with settings on top."""

import io
import json
from pathlib import Path
from typing import Any

import torch

from alula.config.load import load_config
from alula.config.run import RunConfig
from alula.objective import correction, mismatch_metrics
from alula.run.run_dir import LINES
from alula.trainer import update
from alula.trainer.trainer import Trainer

RECIPE = Path(__file__).parents[2] / "recipes" / "toy.yaml"
DENSE = "sparsity={}"
QUICK = ("steps=4", "sampling.prompts=4", "sampling.n=4", "eval.every=2", "eval.size=8", "checkpoint.every=2")


def toy(out: Path, *overrides: str) -> RunConfig:
    return load_config(RECIPE, [f"out={out}", *overrides])


def quick(out: Path, *overrides: str) -> RunConfig:
    """Four steps of sixteen rollouts."""
    return toy(out, *QUICK, *overrides)


def trainer(config: RunConfig, resume: bool = False) -> Trainer:
    return Trainer(config, resume=resume, stream=io.StringIO())


def printed(run: Trainer) -> str:
    """The run's console output."""
    assert isinstance(run.logger.stream, io.StringIO)
    return run.logger.stream.getvalue()


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a run's file, which is created with the first."""
    return [json.loads(line) for line in (out / name).read_text().splitlines()] if (out / name).exists() else []


def without_clocks(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without the times, which differ from run to run."""
    return {name: value for name, value in row.items() if not name.startswith(("time/", "speed/"))}


def files(out: Path) -> dict[str, list[dict[str, Any]]]:
    """All lines that a run wrote, without the times."""
    return {name: [without_clocks(row) for row in rows(out, name)] for name in LINES}


def veto_everything(monkeypatch: Any) -> None:
    """Every token counts as below the veto."""
    for module in (correction, mismatch_metrics, update):
        monkeypatch.setattr(module, "below_veto", lambda log_ratio, veto: torch.ones_like(log_ratio, dtype=torch.bool))
