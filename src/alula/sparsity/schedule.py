"""A budget that depends on the sequence's length: one budget per length bin, the last bin open-ended."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from alula.errors import SettingError, require, unknown

PRESETS = Path(__file__).with_name("presets")


@dataclass(frozen=True)
class Schedule:
    """`budgets[i]` KV tokens for lengths in [i·width, (i+1)·width); the last one for all longer sequences.

    Length is the position (prompt + generated tokens), not the number of cached tokens. `model`, `method` and `block`
    are those that the schedule was planned for, None for any; `check` raises on any other use.
    """

    budgets: tuple[int, ...]
    width: int = 2000
    """Tokens per bin."""
    name: str = "schedule"
    model: str | None = None
    method: str | None = None
    block: int | None = None
    notes: dict[str, Any] = field(default_factory=dict, compare=False)
    """How it was planned, and the settings it is bound to."""
    source: str | None = field(default=None, compare=False)
    """The file or preset that it was loaded from, as written in the recipe or command."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budgets", tuple(int(b) for b in self.budgets))
        require(len(self.budgets) > 0, "budgets: a schedule needs at least one budget.")
        require(min(self.budgets) > 0, f"budgets={self.budgets}: every budget must be positive.")
        require(self.width > 0, f"width={self.width}: the bin width must be positive.")

    def __str__(self) -> str:
        return self.name

    def at(self, length: int) -> int:
        """The budget at a length."""
        return self.budgets[min(length // self.width, len(self.budgets) - 1)]

    def check(
        self,
        *,
        method: str,
        block: int | None = None,
        model: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise if the schedule was planned for another model, method, block size or setting.

        `settings` are the method's other settings by name, and the other part of the policy as text: `evict` for a
        selector's schedule, `select` for an evictor's.
        """
        uses = [("method", self.method, method), ("block", self.block, block), ("model", self.model, model)]
        fixed = self.notes.get("options", {}) | self.notes.get("beside", {})
        uses += [(name, value, (settings or {}).get(name)) for name, value in fixed.items()]
        for name, planned, used in uses:
            if planned is not None and used is not None and planned != used:
                trained = ", or delete `model` from its file if this model was trained from it" * (name == "model")
                raise SettingError(
                    f"schedule {self.name!r} was planned for {name}={planned}, not {name}={used}; "
                    f"calibrate and plan again for this setting{trained}."
                )

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self) | {"budgets": list(self.budgets)}
        del data["source"]
        return data

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for `load`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Schedule":
        known = set(cls.__dataclass_fields__) - {"source"}
        if extra := set(data) - known:
            raise SettingError(f"schedule: unknown field {sorted(extra)[0]!r}; known: {', '.join(sorted(known))}.")
        return cls(**(data | {"budgets": tuple(data["budgets"])}))

    @classmethod
    def load(cls, source: str | Path) -> "Schedule":
        """A schedule file, or the name of a preset such as `qwen3-4b-0.86`."""
        path = Path(source)
        if not path.exists():
            path = PRESETS / f"{Path(source).name.removesuffix('.json')}.json"
        if not path.exists():
            raise not_found(str(source))
        try:
            return replace(cls.from_dict(json.loads(path.read_text())), source=str(source))
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = str(error).removesuffix(".")
            raise SettingError(f"schedule file {path}: not a schedule ({why}); `alula plan` writes one.") from error


def not_found(budget: str) -> SettingError:
    """The error for an unreadable budget: as a number of tokens, a file, or a preset, whichever it resembles."""
    if re.fullmatch(r"[-+.\d]*\d[-+.\deEkK]*", budget):
        return SettingError(f"budget {budget!r}: must be a whole number of at least 1, or the name of a schedule.")
    if budget.endswith(".json") or "/" in budget:
        return SettingError(f"schedule file {budget}: does not exist; `alula plan` writes one.")
    return unknown("schedule file or preset", budget, [p.stem for p in PRESETS.glob("*.json")])
