"""A budget that depends on the sequence's length: a table of steps, the last one open-ended."""

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

    Length is the position (prompt + generated tokens), never the KV kept. The fields after `name` say what the
    schedule was made for; `check` refuses another use. None means 'any'.
    """

    budgets: tuple[int, ...]
    width: int = 2000
    name: str = "schedule"
    model: str | None = None
    method: str | None = None
    block: int | None = None
    notes: dict[str, Any] = field(default_factory=dict, compare=False)
    source: str | None = field(default=None, compare=False)
    """The file or preset that it was loaded from, as it was written."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budgets", tuple(int(b) for b in self.budgets))
        require(len(self.budgets) > 0, "budgets: a schedule needs at least one budget.")
        require(min(self.budgets) > 0, f"budgets={self.budgets}: every budget must be positive.")
        require(self.width > 0, f"width={self.width}: the bin width must be positive.")

    def __str__(self) -> str:
        return self.name

    def at(self, length: int) -> int:
        return self.budgets[min(length // self.width, len(self.budgets) - 1)]

    def check(
        self,
        *,
        method: str,
        block: int | None = None,
        model: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Refuse a use that the schedule was not made for.

        `settings` are the method's others, by name, and what runs beside it: `evict` beside a selector's schedule,
        `select` beside an evictor's.
        """
        uses = [("method", self.method, method), ("block", self.block, block), ("model", self.model, model)]
        fixed = self.notes.get("options", {}) | self.notes.get("beside", {})
        uses += [(name, value, (settings or {}).get(name)) for name, value in fixed.items()]
        for what, made_for, used in uses:
            if made_for is not None and used is not None and made_for != used:
                trained = ", or take `model` out of its file if this one was trained from that" * (what == "model")
                raise SettingError(
                    f"schedule {self.name!r} was made for {what}={made_for}, not {what}={used}; "
                    f"calibrate and plan again for this setting{trained}."
                )

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self) | {"budgets": list(self.budgets)}
        del data["source"]
        return data

    def save(self, path: str | Path) -> None:
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
    """What was most likely meant: a number of tokens, a file, or a preset."""
    if re.fullmatch(r"[-+.\d]*\d[-+.\deEkK]*", budget):
        return SettingError(f"budget {budget!r}: must be a whole number of at least 1, or the name of a schedule.")
    if budget.endswith(".json") or "/" in budget:
        return SettingError(f"schedule file {budget}: there is no such file; `alula plan` writes one.")
    return unknown("schedule file or preset", budget, [p.stem for p in PRESETS.glob("*.json")])
