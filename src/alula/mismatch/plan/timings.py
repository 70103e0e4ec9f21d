"""Timings of decode steps as records in JSON, and the cost model fitted to those of one model."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from alula.errors import SettingError
from alula.mismatch.plan.cost import FittedCost, fit
from alula.models.geometry import Geometry
from alula.sparsity.footprint import footprint
from alula.sparsity.policy import Sparsity


def timing_record(geometry: Geometry, batch: int, context: int, sparsity: Sparsity, ms: float) -> dict[str, Any]:
    """What `fit` needs of one measured step: `batch` rows launched (with padding) that hold `context` tokens each.

    An evictor decides what is held, not what a step reads of it: evictions come between steps.
    """
    step = footprint(Sparsity(select=sparsity.select), context, 1, geometry.layers)
    return {
        "batch": batch,
        "context": context,
        "kv_read": float(step.read[0]),
        "pages_scored": float(step.scored[0]),
        "ms": ms,
        "shape": asdict(geometry),
    }


def load_cost(path: str | Path, geometry: Geometry) -> FittedCost:
    """The cost model for `geometry` from a file: one saved by `FittedCost.save`, or records of steps to fit one to.

    The records may lie anywhere in the file; those of models of another geometry are left out.
    """
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise SettingError(f"timings file {path}: there is none; make it with `alula bench`.") from None
    except json.JSONDecodeError as error:
        raise SettingError(f"timings file {path}: not JSON ({error}).") from error
    if isinstance(data, dict) and "constants" in data:
        return FittedCost.load(path, geometry)
    found = [record for record in records(data) if Geometry(**record["shape"]) == geometry]
    if not found:
        raise SettingError(
            f"timings file {path}: no decode step of a model with {geometry}; run `alula bench` on it (a bare shape "
            "that was calibrated on a task has that task's small vocabulary: bench a folder instead)."
        )
    return fit(found, geometry, source=str(path))


def records(data: Any) -> Iterator[dict[str, Any]]:
    """Every timing record inside a JSON value."""
    if isinstance(data, dict) and {"kv_read", "pages_scored", "ms", "shape"} <= set(data):
        yield data
    elif isinstance(data, dict | list):
        for part in data.values() if isinstance(data, dict) else data:
            yield from records(part)
