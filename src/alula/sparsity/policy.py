"""What a sparse policy is: which KV is evicted for good, which part of the rest is read."""

from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, Literal

from alula.errors import SettingError, named_settings, require, require_whole
from alula.sparsity.schedule import Schedule
from alula.sparsity.text import budget as parse_budget
from alula.sparsity.text import part_text, settings_of

Budget = int | Schedule
Kind = Literal["select", "evict"]


@dataclass(frozen=True, init=False)
class Evict:
    """Keep at most `budget` KV tokens per layer and head, dropping the rest for good.

    An eviction fires when a sequence holds budget + buffer tokens, before the next token's attention, and
    keeps the first `sinks`, the last `window` and the best-scored others: `budget` in all. The trigger looks
    at the sequence's own length only. `protect_prompt` takes the prompt out of the budget: the prompt stays
    whole and `budget` counts generated tokens. `sinks=0` gives the papers' own setting. Further keyword
    arguments go to the method (see `alula.sparsity.evict`).
    """

    method: str
    budget: Budget
    buffer: int
    window: int
    sinks: int
    protect_prompt: bool
    options: tuple[tuple[str, Any], ...]

    def __init__(
        self,
        method: str,
        budget: Budget,
        *,
        buffer: int = 128,
        window: int = 8,
        sinks: int = 4,
        protect_prompt: bool = False,
        **options: Any,
    ) -> None:
        require_whole(buffer=buffer, window=window, sinks=sinks)
        require(buffer >= 1, f"buffer={buffer}: at least one token must pile up between evictions.")
        require(window >= 1, f"window={window}: the newest token must be kept, so at least 1.")
        require(sinks >= 0, f"sinks={sinks}: must be 0 or above.")
        least = smallest(budget)
        require(
            least >= window + sinks,
            f"budget={least} is smaller than window + sinks = {window} + {sinks}, which are always kept; "
            "raise the budget or lower them.",
        )
        fields = {
            "method": method,
            "budget": budget,
            "buffer": buffer,
            "window": window,
            "sinks": sinks,
            "protect_prompt": protect_prompt,
            "options": tuple(sorted(options.items())),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        from alula.sparsity.evict import build

        build(self)  # an unknown method or option raises here, not at the first eviction

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but method and budget, by name."""
        common = {name: getattr(self, name) for name in ("buffer", "window", "sinks", "protect_prompt")}
        return common | dict(self.options)

    def with_budget(self, budget: Budget) -> "Evict":
        return Evict(self.method, budget, **self.settings)


@named_settings
@dataclass(frozen=True)
class Select:
    """Keep all KV, read the best `budget` tokens of it, in blocks, chosen per layer and KV head at every step.

    The first block and the last two are always read and count in the budget; the first `dense_layers` layers
    and the prompt's own forward pass read everything. `block` is the engine's page size.
    """

    method: str
    budget: Budget
    block: int = 16
    dense_layers: int = 2

    def __post_init__(self) -> None:
        from alula.sparsity.select import METHODS

        if self.method not in METHODS:
            from alula.errors import unknown

            raise unknown("selector", self.method, METHODS)
        require_whole(block=self.block, dense_layers=self.dense_layers)
        require(self.block >= 1, f"block={self.block}: must be a positive number of tokens.")
        require(self.dense_layers >= 0, f"dense_layers={self.dense_layers}: must be 0 or above.")
        least = smallest(self.budget)
        require(
            least >= 3 * self.block,
            f"budget={least} is smaller than the three blocks of {self.block} that are always read "
            f"(the first and the last two); use at least {3 * self.block}.",
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but method and budget, by name."""
        return {"block": self.block, "dense_layers": self.dense_layers}

    def with_budget(self, budget: Budget) -> "Select":
        return replace(self, budget=budget)


@named_settings
@dataclass(frozen=True)
class Sparsity:
    """A sparse policy: an evictor, a selector, both (evict to a large budget, read a small one), or neither."""

    evict: Evict | None = None
    select: Select | None = None

    def __post_init__(self) -> None:
        for name, kind, example in (("evict", Evict, "rkv"), ("select", Select, "block-topk")):
            value = getattr(self, name)
            require(
                value is None or isinstance(value, kind),
                f"{name}={value!r}: must be made by {kind.__name__}, as {kind.__name__}({example!r}, budget=512).",
            )

    @classmethod
    def parse(cls, text: str) -> "Sparsity":
        """From text: `dense`, `rkv:512+128,window=16`, `block-topk:1024`, or two joined by `&`."""
        evict, select = settings_of(text)
        return cls(
            Evict(**evict | {"budget": parse_budget(evict["budget"])}) if evict else None,
            Select(**select | {"budget": parse_budget(select["budget"])}) if select else None,
        )

    @property
    def dense(self) -> bool:
        return self.evict is None and self.select is None

    def describe(self, *, full: bool = False) -> str:
        """The text that `parse` reads back, without settings at their defaults; `full` prints those too."""
        return " & ".join(describe(part, full=full) for part in (self.evict, self.select) if part) or "dense"

    def with_budget(self, kind: Kind, budget: Budget) -> "Sparsity":
        """The same policy with another budget of its evictor or its selector."""
        part = getattr(self, kind)
        return replace(self, **{kind: part.with_budget(budget)})


DENSE = Sparsity()


DEFAULTS = {
    Evict: {name: one.default for name, one in signature(Evict.__init__).parameters.items()},
    Select: {one.name: one.default for one in fields(Select)},
}


def describe(part: Evict | Select, *, full: bool = False) -> str:
    """The text of one part of a policy."""
    return part_text(part.method, part.budget, part.settings if full else changed_settings(part, "buffer"))


def changed_settings(part: Evict | Select, *always: str) -> dict[str, Any]:
    """The settings of a part that differ from their defaults, and those named in `always`."""
    defaults = DEFAULTS[type(part)]
    return {k: v for k, v in part.settings.items() if k in always or k not in defaults or defaults[k] != v}


def check_schedules(sparsity: Sparsity, model: str) -> None:
    """Raise where a schedule was planned for another model, method or setting."""
    parts = (("evict", sparsity.evict), ("select", sparsity.select))
    both = {kind: describe(part, full=True) if part else "none" for kind, part in parts}
    for part in (sparsity.evict, sparsity.select):
        if part is not None and isinstance(part.budget, Schedule):
            settings = both | part.settings
            block = part.block if isinstance(part, Select) else None
            part.budget.check(method=part.method, block=block, model=model, settings=settings)


def smallest(budget: Budget) -> int:
    if isinstance(budget, Schedule):
        return min(budget.budgets)
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise SettingError(f"budget={budget!r}: must be a number of tokens or a Schedule.")
    return budget


def budget_at(budget: Budget, length: int) -> int:
    """The budget in force for a sequence of `length` tokens: prompt and generated, whether evicted or not."""
    return budget.at(length) if isinstance(budget, Schedule) else budget
