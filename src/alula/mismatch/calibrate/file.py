"""The calibration file: the tail of acceptance of every measured policy at every length, with confidence bounds."""

import json
from dataclasses import asdict, dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from alula.errors import SettingError, require
from alula.files import read_text, write_atomically
from alula.mismatch.savings import Savings
from alula.mismatch.tail import BinTail, Tail
from alula.sparsity.family import PolicyFamily, parse_families
from alula.sparsity.policy import Sparsity

VERSION = 1


@dataclass(frozen=True)
class MeasuredPolicy:
    """One measured policy: a family at one budget, with its tail and KV savings."""

    family: PolicyFamily
    budget: int
    tail: Tail
    kv: Savings

    @property
    def policy(self) -> Sparsity:
        return self.family.policy(self.budget)

    def to_dict(self) -> dict[str, Any]:
        return {
            "family": self.family.describe(full=True),
            "budget": self.budget,
            "tail": tail_to_dict(self.tail),
            "kv": asdict(self.kv),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "MeasuredPolicy":
        [family] = parse_families(data["family"])
        return cls(family, data["budget"], tail_from_dict(data["tail"]), Savings(**data["kv"]))


@dataclass(frozen=True)
class GrowingSchedule:
    """A growing schedule of an evictor that holds `tau`. Each bin was measured under the budgets of earlier bins."""

    family: PolicyFamily
    tau: float
    budgets: tuple[int, ...]
    tails: tuple[BinTail | None, ...]
    """None if a bin inherits its neighbour's budget."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "family": self.family.describe(full=True),
            "tau": self.tau,
            "budgets": list(self.budgets),
            "tails": [None if tail is None else asdict(tail) for tail in self.tails],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "GrowingSchedule":
        [family] = parse_families(data["family"])
        tails = tuple(None if tail is None else BinTail(**tail) for tail in data["tails"])
        return cls(family, data["tau"], tuple(data["budgets"]), tails)


@dataclass(frozen=True)
class Calibration:
    """Tails of the measured policies of one model, and the floor: the dense policy's own tail."""

    model: str
    floor: Tail
    """Tail of the engine's dense policy against the learner: a threshold means nothing without it."""
    measured: tuple[MeasuredPolicy, ...]
    temperature: float = 1.0
    notes: dict[str, Any] = field(default_factory=dict)
    """Settings that the numbers depend on: prompts, seeds, weights, versions."""
    growing: tuple[GrowingSchedule, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", tuple(self.measured))
        for tail in [m.tail for m in self.measured]:
            require(
                (len(tail), tail.width, tail.quantile) == (len(self.floor), self.width, self.quantile),
                f"calibration: a tail has {len(tail)} bins of {tail.width} tokens at quantile {tail.quantile}, the "
                f"floor has {len(self.floor)} of {self.width} at {self.quantile}; use the same bins for all.",
            )

    @property
    def width(self) -> int:
        return self.floor.width

    @property
    def quantile(self) -> float:
        return self.floor.quantile

    @property
    def bins(self) -> int:
        return len(self.floor)

    def families(self) -> dict[PolicyFamily, list[MeasuredPolicy]]:
        """Measured policies by family, budgets ascending."""
        families: dict[PolicyFamily, list[MeasuredPolicy]] = {}
        for one in sorted(self.measured, key=lambda m: m.budget):
            families.setdefault(one.family, []).append(one)
        return families

    def save(self, path: str | Path) -> None:
        write_atomically(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "model": self.model,
            "temperature": self.temperature,
            "notes": self.notes,
            "floor": tail_to_dict(self.floor),
            "measured": [one.to_dict() for one in self.measured],
            "forward": [one.to_dict() for one in self.growing],
        }

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        file = f"calibration file {path}"
        require(Path(path).exists(), f"{file}: does not exist; `alula calibrate` writes one.")
        try:
            data = json.loads(read_text(Path(path), file))
        except json.JSONDecodeError as error:
            raise SettingError(f"{file}: not JSON ({error}).") from error
        require(isinstance(data, dict), f"{file}: not a calibration; `alula calibrate` writes one.")
        return cls.from_dict(data, str(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "data") -> "Calibration":
        version = data.get("version")
        require(version == VERSION, f"calibration file {source}: version {version!r}, not {VERSION}; calibrate again.")
        try:
            measured = tuple(map(MeasuredPolicy.from_dict, data["measured"]))
            growing = tuple(map(GrowingSchedule.from_dict, data["forward"]))
            floor = tail_from_dict(data["floor"])
            return cls(data["model"], floor, measured, data["temperature"], data["notes"], growing)
        except (KeyError, TypeError, AttributeError) as error:
            raise SettingError(
                f"calibration file {source}: not a calibration ({error!r}); `alula calibrate` writes one."
            ) from error


_PER_BIN = ("value", "lower", "upper", "tokens", "prompts")
_SCALARS = ("overall", "width", "quantile", "confidence")


def tail_to_dict(tail: Tail) -> dict[str, Any]:
    """Empty bins are null: JSON has no NaN."""
    rows = {name: [_plain(x) for x in getattr(tail, name).tolist()] for name in _PER_BIN}
    return rows | {name: getattr(tail, name) for name in _SCALARS}


def tail_from_dict(data: dict[str, Any]) -> Tail:
    rows: dict[str, Any] = {
        name: np.array(
            [np.nan if x is None else x for x in data[name]],
            dtype=np.int64 if name in ("tokens", "prompts") else np.float64,
        )
        for name in _PER_BIN
    }
    return Tail(**rows, **{name: data[name] for name in _SCALARS})


def _plain(x: float) -> float | None:
    return None if isnan(x) else x
