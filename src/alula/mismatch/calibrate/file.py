"""The calibration file: which tail of acceptance each configuration has at each length, and how sure that is."""

import json
import os
from dataclasses import asdict, dataclass, field
from math import isnan
from pathlib import Path
from typing import Any, Literal

import numpy as np

from alula.errors import SettingError, require
from alula.mismatch.savings import Savings
from alula.mismatch.tail import Estimate, Tail
from alula.sparsity.policy import Budget, Evict, Select, Sparsity
from alula.sparsity.text import parse_sparsity

VERSION = 1
Kind = Literal["select", "evict"]


@dataclass(frozen=True)
class Configuration:
    """One point of the grid: a method, its fixed settings, and the budget that a schedule will vary."""

    kind: Kind
    method: str
    budget: int
    options: tuple[tuple[str, Any], ...] = ()
    """The other settings of `Select` (block, dense_layers) or `Evict` (buffer, window, sinks, ...). A selector may
    have an evictor of one budget beside it: `evict`, as a command line spells it (`alula.sparsity.text.spell`)."""

    def __post_init__(self) -> None:
        require(self.kind in ("select", "evict"), f"kind={self.kind!r}: must be 'select' or 'evict'.")
        object.__setattr__(self, "options", tuple(sorted((str(k), v) for k, v in self.options)))

    @property
    def family(self) -> tuple[Any, ...]:
        """What a schedule cannot change: configurations of one family differ in the budget only."""
        return (self.kind, self.method, self.options)

    @property
    def evicts(self) -> bool:
        return self.kind == "evict" or "evict" in dict(self.options)

    @property
    def block(self) -> int | None:
        """Tokens per page that a selector scores; None for an evictor."""
        return int(dict(self.options).get("block", 16)) if self.kind == "select" else None

    def sparsity(self, budget: Budget | None = None) -> Sparsity:
        """The policy of this configuration, or of its family under another budget or a schedule."""
        made = self.budget if budget is None else budget
        options = dict(self.options)
        if self.kind == "evict":
            return Sparsity(evict=Evict(self.method, made, **options))
        beside = options.pop("evict", None)
        return Sparsity(parse_sparsity(beside).evict if beside else None, Select(self.method, made, **options))

    def describe(self) -> str:
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.options)])


@dataclass(frozen=True)
class Measured:
    configuration: Configuration
    tail: Tail
    kv: Savings | None = None
    """None in a file from before this was measured."""


@dataclass(frozen=True)
class Forward:
    """A growing schedule of an evictor that holds `tau`: each bin was measured under the budgets before it."""

    configuration: Configuration
    """Its family, at the largest budget."""
    tau: float
    budgets: tuple[int, ...]
    tails: tuple[Estimate | None, ...]
    """None where a bin inherits its neighbour's budget."""


@dataclass(frozen=True)
class Calibration:
    """Tails of a grid of configurations on one model, and the floor that dense sampling itself has."""

    model: str
    floor: Tail
    """Tail of the engine's dense policy against the learner: a threshold means nothing without it."""
    measured: tuple[Measured, ...]
    temperature: float = 1.0
    notes: dict[str, Any] = field(default_factory=dict)
    """Prompts, seeds, versions: whatever says where the numbers come from."""
    forward: tuple[Forward, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", tuple(self.measured))
        for tail in [m.tail for m in self.measured]:
            require(
                (len(tail), tail.width, tail.quantile) == (len(self.floor), self.width, self.quantile),
                f"calibration: a tail has {len(tail)} bins of {tail.width} tokens at quantile {tail.quantile}, "
                f"the floor {len(self.floor)} of {self.width} at {self.quantile}; measure all on the same bins.",
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

    def families(self) -> dict[tuple[Any, ...], list[Measured]]:
        """Measured configurations by family, budgets ascending."""
        found: dict[tuple[Any, ...], list[Measured]] = {}
        for one in sorted(self.measured, key=lambda m: m.configuration.budget):
            found.setdefault(one.configuration.family, []).append(one)
        return found

    def save(self, path: str | Path) -> None:
        """Atomic: a killed calibration leaves the last whole file."""
        whole, part = Path(path), Path(f"{path}.part")
        part.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        os.replace(part, whole)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "model": self.model,
            "temperature": self.temperature,
            "notes": self.notes,
            "floor": tail_to_dict(self.floor),
            "measured": [
                {
                    "kind": m.configuration.kind,
                    "method": m.configuration.method,
                    "budget": m.configuration.budget,
                    "options": dict(m.configuration.options),
                    "tail": tail_to_dict(m.tail),
                    "kv": m.kv and asdict(m.kv),
                }
                for m in self.measured
            ],
            "forward": [
                {
                    "kind": f.configuration.kind,
                    "method": f.configuration.method,
                    "options": dict(f.configuration.options),
                    "tau": f.tau,
                    "budgets": list(f.budgets),
                    "tails": [None if tail is None else asdict(tail) for tail in f.tails],
                }
                for f in self.forward
            ],
        }

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise SettingError(f"calibration file {path}: there is none; make it with `alula calibrate`.") from None
        except json.JSONDecodeError as error:
            raise SettingError(f"calibration file {path}: not JSON ({error}).") from error
        return cls.from_dict(data, str(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "data") -> "Calibration":
        version = data.get("version")
        require(version == VERSION, f"calibration file {source}: version {version!r}, not {VERSION}; calibrate again.")
        try:
            measured = [
                Measured(
                    Configuration(m["kind"], m["method"], m["budget"], tuple(m["options"].items())),
                    tail_from_dict(m["tail"]),
                    savings_from_dict(m.get("kv")),
                )
                for m in data["measured"]
            ]
            floor = tail_from_dict(data["floor"])
            forward = tuple(forward_from_dict(f) for f in data["forward"])
            return cls(data["model"], floor, tuple(measured), data["temperature"], data["notes"], forward)
        except (KeyError, TypeError, AttributeError) as error:
            raise SettingError(f"calibration file {source}: not a calibration ({error!r}).") from error


def savings_from_dict(data: dict[str, Any] | None) -> Savings | None:
    return None if data is None else Savings(**data)


def forward_from_dict(data: dict[str, Any]) -> Forward:
    budgets = tuple(data["budgets"])
    family = Configuration(data["kind"], data["method"], max(budgets), tuple(data["options"].items()))
    tails = tuple(None if tail is None else Estimate(**tail) for tail in data["tails"])
    return Forward(family, data["tau"], budgets, tails)


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
