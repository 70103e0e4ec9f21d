"""What a decode step costs: fitted to timings of this machine, or Sparrow's analytic form without any."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alula.errors import SettingError, require, unknown
from alula.mismatch.plan.nnls import nnls
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
    """Times the vectors kept per page, which are two for Quest."""
    ms: float
    kv_moved: float = 0.0
    """KV tokens scored and copied by evictions, per row and step."""

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Timing":
        """A record of a benchmark; fields that the cost model does not use are left out."""
        if missing := {"batch", "context", "kv_read", "pages_scored", "ms"} - set(record):
            raise SettingError(f"timing record: {sorted(missing)[0]!r} is missing; record it with `alula bench`.")
        return cls(**{name: record[name] for name in cls.__dataclass_fields__ if name in record})


class Cost(Protocol):
    @property
    def geometry(self) -> Geometry: ...

    def step_ms(self, batch: ArrayLike, read: ArrayLike, scored: ArrayLike, moved: ArrayLike = 0.0) -> Array:
        """Milliseconds of a step for rows that read, score and move this much (see `Footprint`)."""
        ...


def features(
    geometry: Geometry, batch: ArrayLike, read: ArrayLike, scored: ArrayLike, moved: ArrayLike = 0.0
) -> dict[str, Array]:
    """What a step's time is linear in. The `row` terms are latencies: work of one row that no batch hides."""
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

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps({"version": 1, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, geometry: Geometry | None = None) -> "FittedCost":
        """A saved cost model; `geometry` is the model it is wanted for."""
        data = json.loads(Path(path).read_text())
        require(data.get("version") == 1, f"cost model {path}: version {data.get('version')!r}, not 1; fit it again.")
        found = cls(Geometry(**data["geometry"]), data["constants"], data["notes"])
        if geometry is not None and geometry != found.geometry:
            raise SettingError(
                f"cost model {path} was fitted for {found.geometry}, not {geometry}; run `alula bench` on it."
            )
        return found


def fit(timings: Iterable[Timing | Mapping[str, Any]], geometry: Geometry, **notes: Any) -> FittedCost:
    """The constants that minimise Σ (predicted/measured − 1)²: short steps count as much as long ones."""
    steps = [t if isinstance(t, Timing) else Timing.from_dict(t) for t in timings]
    require(len(steps) >= 5, f"{len(steps)} timings: a cost model needs at least 5, over several batches and lengths.")
    ms = np.array([t.ms for t in steps])
    require(bool((ms > 0).all()), "timings: every `ms` must be positive.")
    terms = features(geometry, *_columns(steps))
    constants = nnls(np.stack(list(terms.values()), 1) / ms[:, None], np.ones(len(ms)))
    fitted = FittedCost(geometry, dict(zip(terms, constants.tolist())))
    if not terms["moved_gb"].any():  # no eviction was timed: what it moves is read and written at the KV's rate
        fitted.constants["moved_gb"] = 2 * fitted.constants["kv_gb"]
    return FittedCost(
        geometry, fitted.constants, {"timings": len(ms), "median_error": median_error(fitted, steps), **notes}
    )


def median_error(cost: Cost, timings: Iterable[Timing]) -> float:
    """Median |predicted/measured − 1|."""
    steps = list(timings)
    predicted = cost.step_ms(*_columns(steps))
    return float(np.median(np.abs(predicted / np.array([t.ms for t in steps]) - 1)))


def _columns(steps: list[Timing]) -> tuple[Array, Array, Array, Array]:
    table = np.array([(t.batch, t.kv_read, t.pages_scored, t.kv_moved) for t in steps], dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


@dataclass(frozen=True)
class Hardware:
    """Peak dense bf16 rate and memory bandwidth. The presets are data-sheet values."""

    tflops: float
    terabytes_per_second: float

    @classmethod
    def named(cls, name: str) -> "Hardware":
        if name not in HARDWARE:
            raise unknown("hardware", name, HARDWARE)
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
    time = compute/peak + bytes/bandwidth, which is the paper's compute + I·memory with its intensity I
    spelled out as peak · value_bytes / bandwidth. Taken from appendix F: the weights' traffic P. Repaired: the
    prompt's scoring terms lack the division by the page size and the factor r in print. The prompt's KV is
    read by every row, as this engine does, not once per group. Evictions read and write what they move.
    """

    geometry: Geometry
    hardware: Hardware

    def step_ms(self, batch: ArrayLike, read: ArrayLike, scored: ArrayLike, moved: ArrayLike = 0.0) -> Array:
        b, t, s, m = (np.asarray(x, dtype=np.float64) for x in np.broadcast_arrays(batch, read, scored, moved))
        geometry = self.geometry
        width, group = geometry.layers * geometry.kv_heads * geometry.head_dim, geometry.query_heads / geometry.kv_heads
        flops = b * (2 * geometry.parameters + group * width * (2 * t + s))
        values = geometry.parameters + b * width * (2 * t + s + 4 * m)
        seconds = flops / (self.hardware.tflops * 1e12) + values * geometry.value_bytes / (
            self.hardware.terabytes_per_second * 1e12
        )
        return 1e3 * seconds


@dataclass(frozen=True)
class Generation:
    """Predicted cost of generating `new_tokens` for every row of a batch."""

    ms: float
    """All steps together."""
    batch: int
    tokens_per_second: float
    read_share: float
    """KV tokens read, of those that the dense policy reads."""
    peak_kv_bytes: float
    """Of the whole batch, page summaries included."""


def generation(cost: Cost, sparsity: Sparsity, *, batch: int, prompt: int, new_tokens: int) -> Generation:
    """Integrate the step time over the lengths prompt … prompt + new_tokens − 1, all rows in step."""
    per_step = footprint(sparsity, prompt, new_tokens, cost.geometry.layers)
    ms = float(cost.step_ms(batch, per_step.read, per_step.scored, per_step.moved).sum())
    dense_read = np.arange(prompt, prompt + new_tokens).sum()
    peak = float((per_step.held + per_step.summaries).max()) * cost.geometry.kv_token_bytes * batch
    return Generation(ms, batch, 1e3 * batch * new_tokens / ms, float(per_step.read.sum() / max(dense_read, 1)), peak)


def largest_batch(cost: Cost, sparsity: Sparsity, *, kv_bytes: float, prompt: int, new_tokens: int) -> int:
    """The most rows whose KV fits into `kv_bytes` at its peak."""
    one = generation(cost, sparsity, batch=1, prompt=prompt, new_tokens=new_tokens).peak_kv_bytes
    require(
        one <= kv_bytes, f"kv_memory={kv_bytes:.0f} bytes: one row of {prompt + new_tokens} tokens needs {one:.0f}."
    )
    return int(kv_bytes // one)
