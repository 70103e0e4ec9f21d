"""Cost model of a decode step: fitted to timings of this machine, or Sparrow's analytic form without timings."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alula.errors import SettingError, require
from alula.files import read_text
from alula.models.geometry import Geometry
from alula.sparsity.footprint import footprint
from alula.sparsity.policy import Sparsity

Array = NDArray[Any]


@dataclass(frozen=True)
class Timing:
    """One measured decode step: `batch` rows launched (with padding), the rest per row, averaged over layers."""

    batch: int
    context: int
    kv_read: float
    pages_scored: float
    """Pages times summary vectors per page (two for Quest)."""
    ms: float
    kv_moved: float = 0.0
    """KV tokens scored and copied by evictions, per row and step."""

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Timing":
        """From a benchmark's record; ignores fields that the cost model does not use."""
        if missing := {"batch", "context", "kv_read", "pages_scored", "ms"} - set(record):
            raise SettingError(f"timing record: {sorted(missing)[0]!r} is missing; record it with `alula bench`.")
        return cls(**{name: record[name] for name in cls.__dataclass_fields__ if name in record})


def timing_record(geometry: Geometry, batch: int, context: int, sparsity: Sparsity, ms: float) -> dict[str, Any]:
    """The record of one measured step, for `fit`: `batch` rows launched (with padding) of `context` tokens each.

    An evictor changes what is held, not how a step reads it: evictions run between steps.
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


class CostModel(Protocol):
    @property
    def geometry(self) -> Geometry: ...

    def step_ms(self, batch: ArrayLike, read: ArrayLike, scored: ArrayLike, moved: ArrayLike = 0.0) -> Array:
        """Milliseconds of a step; `read`, `scored` and `moved` are per row (see `Footprint`)."""
        ...


def features(
    geometry: Geometry, batch: ArrayLike, read: ArrayLike, scored: ArrayLike, moved: ArrayLike = 0.0
) -> dict[str, Array]:
    """Features of a step; its time is linear in them. The `row` terms are latencies: independent of the batch size."""
    b, r, s, m = (np.asarray(x, dtype=np.float64) for x in np.broadcast_arrays(batch, read, scored, moved))
    selecting = (s > 0).astype(np.float64)
    heads = geometry.layers * geometry.kv_heads
    return {
        "fixed": np.ones_like(b),
        "weights_gb": np.full_like(b, geometry.parameters * geometry.value_bytes / 1e9),
        "rows_tflop": b * 2 * geometry.parameters / 1e12,
        "kv_gb": b * r * geometry.kv_token_bytes / 1e9,
        "kv_row_mtokens": r * geometry.layers / 1e6,
        "select": selecting * geometry.layers,
        "select_rows_mheads": selecting * b * heads / 1e6,
        "scored_mpages": b * s * heads / 1e6,
        "scored_row_mpages": s * geometry.layers / 1e6,
        "moved_gb": b * m * geometry.kv_token_bytes / 1e9,
    }


@dataclass(frozen=True)
class FittedCost:
    """Σ constant · feature, with constants ≥ 0 in milliseconds per unit of the feature's name."""

    geometry: Geometry
    constants: dict[str, float]
    notes: dict[str, Any] = field(default_factory=dict, compare=False)

    def step_ms(self, batch: ArrayLike, read: ArrayLike, scored: ArrayLike, moved: ArrayLike = 0.0) -> Array:
        terms = features(self.geometry, batch, read, scored, moved)
        return np.sum([self.constants[name] * value for name, value in terms.items()], axis=0)


def fit(timings: Iterable[Timing | Mapping[str, Any]], geometry: Geometry, **notes: Any) -> FittedCost:
    """The constants that minimise Σ (predicted/measured − 1)²: short steps count as much as long ones."""
    steps = [t if isinstance(t, Timing) else Timing.from_dict(t) for t in timings]
    require(len(steps) >= 5, f"timings: {len(steps)} steps; a fit needs at least 5, of several batches and lengths.")
    ms = np.array([t.ms for t in steps])
    require(bool((ms > 0).all()), "timings: every `ms` must be positive.")
    terms = features(geometry, *_columns(steps))
    constants = nnls(np.stack(list(terms.values()), 1) / ms[:, None], np.ones(len(ms)))
    fitted = FittedCost(geometry, dict(zip(terms, constants.tolist())))
    if not terms["moved_gb"].any():  # no eviction was timed: assume reads and writes at the KV's rate
        fitted.constants["moved_gb"] = 2 * fitted.constants["kv_gb"]
    return FittedCost(
        geometry, fitted.constants, {"timings": len(ms), "median_error": median_error(fitted, steps), **notes}
    )


def median_error(cost: CostModel, timings: Iterable[Timing]) -> float:
    """Median |predicted/measured − 1|."""
    steps = list(timings)
    predicted = cost.step_ms(*_columns(steps))
    return float(np.median(np.abs(predicted / np.array([t.ms for t in steps]) - 1)))


def _columns(steps: list[Timing]) -> tuple[Array, Array, Array, Array]:
    table = np.array([(t.batch, t.kv_read, t.pages_scored, t.kv_moved) for t in steps], dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def nnls(a: Array, b: Array, tolerance: float = 1e-10) -> Array:
    """argmin_x ‖a x − b‖² subject to x ≥ 0: the active-set method of Lawson and Hanson (1974, chapter 23).

    Columns are scaled to unit length first, so that features may come in any unit.
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x, passive = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    threshold = tolerance * max(float(np.linalg.norm(b)), 1e-300)
    for _ in range(10 * a.shape[1]):  # converges much earlier; the limit stops columns that swap due to rounding
        gradient = np.where(passive, -np.inf, a.T @ (b - a @ x))
        if gradient.max() <= threshold:
            break
        passive[gradient.argmax()] = True
        x = _least_squares_inside(a, b, x, passive)
    return x / scale


def _least_squares_inside(a: Array, b: Array, x: Array, passive: Array) -> Array:
    """Move from x towards the least-squares solution on `passive`, dropping columns that turn negative."""
    while True:
        target = np.zeros_like(x)
        target[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
        falling = passive & (target <= 0)
        if not falling.any():
            return target
        gap = np.where(falling, x - target, 1.0)
        share = np.where(falling, np.divide(x, gap, out=np.zeros_like(x), where=gap > 0), np.inf)
        x = x + share.min() * (target - x)
        passive[share.argmin()] = False
        x[~passive] = 0


def load_cost(path: str | Path, geometry: Geometry) -> FittedCost:
    """The cost model for `geometry`, fitted to the timing records in a file.

    The records may be anywhere in the JSON; records of another geometry are ignored.
    """
    file = f"timings file {path}"
    require(Path(path).exists(), f"{file}: does not exist; `alula bench` writes one.")
    try:
        data = json.loads(read_text(Path(path), file))
    except json.JSONDecodeError as error:
        raise SettingError(f"{file}: not JSON ({error}).") from error
    timings = [record for record in records(data) if Geometry(**record["shape"]) == geometry]
    if not timings:
        raise SettingError(
            f"timings file {path}: no decode step of a model with {geometry}; run `alula bench` on that model (if it "
            "was a `shape:` model calibrated on a task, save it to a folder first: the task sets its vocabulary)."
        )
    return fit(timings, geometry, source=str(path))


def records(data: Any) -> Iterator[dict[str, Any]]:
    """Every timing record inside a JSON value."""
    if isinstance(data, dict) and {"kv_read", "pages_scored", "ms", "shape"} <= set(data):
        yield data
    elif isinstance(data, dict | list):
        for part in data.values() if isinstance(data, dict) else data:
            yield from records(part)


@dataclass(frozen=True)
class Hardware:
    """Peak dense bf16 rate and memory bandwidth. The presets are data-sheet values."""

    tflops: float
    terabytes_per_second: float

    @classmethod
    def named(cls, name: str) -> "Hardware":
        require(name in HARDWARE, f"hardware={name}: known: {', '.join(HARDWARE)}.")
        return HARDWARE[name]


HARDWARE = {
    "h200": Hardware(989, 4.8),
    "h100": Hardware(989, 3.35),
    "a100": Hardware(312, 2.04),
}


@dataclass(frozen=True)
class AnalyticCost:
    """Sparrow's cost model (arXiv 2606.08446, section 3.3 and appendix F), per step and in seconds.

    For N rows, P parameters, KV dimension D over all layers, r query heads per KV head, t tokens read and
    s pages scored:  compute = 2PN + 2rND·t + rND·s,  memory = P + 2ND·t + ND·s (in values),
    time = compute/peak + bytes/bandwidth, which is the paper's compute + I·memory with its intensity
    I = peak · value_bytes / bandwidth. The weights' traffic P is from appendix F. One correction: in print, the
    prompt's scoring terms lack the division by the page size and the factor r. Every row reads the prompt's KV,
    as in this engine, not once per group. Evictions read and write what they move. A quantised KV cache counts
    with its share of the bytes. The two latencies are not in the paper.
    """

    geometry: Geometry
    hardware: Hardware
    layer_ms: float = 0.0
    """Latency of a layer in every step."""
    eviction_layer_ms: float = 0.0
    """Latency of a layer in a step that evicts."""

    def step_ms(self, batch: ArrayLike, read: ArrayLike, scored: ArrayLike, moved: ArrayLike = 0.0) -> Array:
        b, t, s, m = (np.asarray(x, dtype=np.float64) for x in np.broadcast_arrays(batch, read, scored, moved))
        geometry = self.geometry
        width, group = geometry.layers * geometry.kv_heads * geometry.head_dim, geometry.query_heads / geometry.kv_heads
        flops = b * (2 * geometry.parameters + group * width * (2 * t + s))
        values = geometry.parameters + b * width * (2 * t * geometry.kv_share + s + 4 * m * geometry.kv_share)
        seconds = flops / (self.hardware.tflops * 1e12) + values * geometry.value_bytes / (
            self.hardware.terabytes_per_second * 1e12
        )
        return 1e3 * seconds + geometry.layers * (self.layer_ms + self.eviction_layer_ms * (m > 0))


@dataclass(frozen=True)
class GenerationCost:
    """Predicted cost of generating `new_tokens` for every row of a batch."""

    ms: float
    """All steps together."""
    batch: int
    tokens_per_second: float
    read_share: float
    """KV tokens read, as a share of what the dense policy reads."""
    peak_kv_bytes: float
    """KV of all rows, page summaries included."""


def generation_cost(cost: CostModel, sparsity: Sparsity, *, batch: int, prompt: int, new_tokens: int) -> GenerationCost:
    """Sum of the step times over the lengths prompt … prompt + new_tokens − 1; all rows have equal length."""
    per_step = footprint(sparsity, prompt, new_tokens, cost.geometry.layers)
    ms = float(cost.step_ms(batch, per_step.read, per_step.scored, per_step.moved).sum())
    dense_read = np.arange(prompt, prompt + new_tokens).sum()
    tokens = per_step.held + per_step.summaries / cost.geometry.kv_share  # summaries are never quantised
    peak = float(tokens.max()) * cost.geometry.kv_token_bytes * batch
    return GenerationCost(
        ms, batch, 1e3 * batch * new_tokens / ms, float(per_step.read.sum() / max(dense_read, 1)), peak
    )


def largest_batch(cost: CostModel, sparsity: Sparsity, *, kv_bytes: float, prompt: int, new_tokens: int) -> int:
    """The largest number of rows whose peak KV fits into `kv_bytes`."""
    row = generation_cost(cost, sparsity, batch=1, prompt=prompt, new_tokens=new_tokens).peak_kv_bytes
    require(
        row <= kv_bytes, f"kv_memory={kv_bytes:.0f} bytes: one row of {prompt + new_tokens} tokens needs {row:.0f}."
    )
    return int(kv_bytes // row)
