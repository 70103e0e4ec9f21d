"""Sparse policies: which KV is evicted for good, and which part of the rest is read.

`Evict`, `Select` and `Sparsity` are the types of the Python API and the `sparsity` section of a recipe.
"""

from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, InstanceOf, PlainSerializer, model_validator
from pydantic_core import ArgsKwargs, PydanticCustomError

from alula.errors import SettingError, require, unknown
from alula.section import fields_of, settings_type
from alula.sparsity.schedule import Schedule
from alula.sparsity.text import budget as parse_budget
from alula.sparsity.text import part_text, settings_of

Budget = int | Schedule
Kind = Literal["select", "evict"]


def _as_budget(value: Any) -> Any:
    if isinstance(value, str):
        return parse_budget(value)
    if isinstance(value, dict):
        return Schedule.from_dict(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if not isinstance(value, Schedule):
        raise PydanticCustomError("budget", "should be a number of KV tokens (512, 2k), or a schedule's name or file")
    return value


def _budget_source(budget: Budget) -> Any:
    """A budget as written to a recipe; reading it gives the same budget."""
    return budget if isinstance(budget, int) else budget.source or budget.to_dict()


def _as_int(value: Any) -> Any:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _as_pairs(options: Any) -> Any:
    return tuple(sorted(options.items())) if isinstance(options, dict) else options or ()


BudgetField = Annotated[int | InstanceOf[Schedule], BeforeValidator(_as_budget), PlainSerializer(_budget_source)]
Count = Annotated[int, Field(strict=True, ge=1), BeforeValidator(_as_int)]
Natural = Annotated[int, Field(strict=True, ge=0), BeforeValidator(_as_int)]
Options = Annotated[tuple[tuple[str, Any], ...], BeforeValidator(_as_pairs), PlainSerializer(dict)]


@settings_type
class Evict:
    """Keep at most `budget` KV tokens per layer and head, dropping the rest for good.

    An eviction fires when a sequence holds budget + buffer tokens, before the next token's attention, and
    keeps the first `sinks`, the last `window` and the best-scored others: `budget` in all. The trigger depends
    on the sequence's length only. In Python, options of the method are further keyword arguments:
    `Evict("rkv", 512, buffer=128, mix=0.1)`.
    """

    method: str
    """`rkv`, `snapkv`, `streaming`, `h2o`, `tova`, `keydiff`, `knorm`, `vase`, `vase-dkv`,
    `triattention`, `random`, or `rkv-code` for comparison."""
    budget: BudgetField
    """KV tokens kept per layer and head, or a schedule: a file or a preset's name."""
    buffer: Count = 128
    """Tokens that accumulate before the next eviction."""
    window: Count = 8
    """Most recent tokens, always kept."""
    sinks: Natural = 4
    """First tokens, always kept; 0 is the papers' setting."""
    protect_prompt: bool = False
    """Keep the whole prompt, outside the budget, which then counts generated tokens."""
    options: Options = ()
    """Options of the method, such as `mix` of `rkv`."""

    if TYPE_CHECKING:

        def __init__(self, method: str, budget: Budget, **settings: Any) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, given: Any) -> Any:
        """In Python, keyword arguments that are not fields are options of the method."""
        if not isinstance(given, ArgsKwargs):
            return given
        settings = dict(given.kwargs or {})
        options = {name: settings.pop(name) for name in [*settings] if name not in fields_of(cls)}
        if options:
            from alula.sparsity.evict import check_settings

            check_settings(str(given.args[0] if given.args else settings.get("method")), options)
            settings["options"] = options
        return ArgsKwargs(given.args, settings)

    def __post_init__(self) -> None:
        if (least := smallest(self.budget)) < self.least_budget:
            check_planned_settings(self)
            raise SettingError(
                f"budget={least} is smaller than window + sinks = {self.window} + {self.sinks}, which are always kept; "
                "raise the budget or lower them."
            )
        from alula.sparsity.evict import build, check_settings  # imports torch, so only if something is evicted

        for name, value in self.options:
            require(name not in fields_of(Evict), f"options.{name}={value}: not an option; write {name}={value}.")
        check_settings(self.method, dict(self.options), common=(), kind="option")
        usual = type(build(self))  # an invalid option raises here, not at the first eviction
        changed = tuple((name, value) for name, value in self.options if value != getattr(usual, name))
        object.__setattr__(self, "options", changed)  # one with its default written out is the same policy

    @property
    def least_budget(self) -> int:
        return self.window + self.sinks

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but method and budget, by name; options at their defaults, too."""
        from alula.sparsity.evict import COMMON, build, option_names

        evictor = build(self)
        return {name: getattr(self, name) for name in COMMON} | {
            name: getattr(evictor, name) for name in option_names(self.method)
        }


@settings_type
class Select:
    """Keep all KV, read the best `budget` tokens of it, in blocks, chosen per layer and KV head at every step.

    The first block and the last two are always read and count in the budget. Prefill reads everything.
    """

    method: str
    """`block-topk` or `quest`."""
    budget: BudgetField
    """KV tokens read per layer and head, or a schedule: a file or a preset's name."""
    block: Count = 16
    """Tokens per block; also the engine's page size."""
    dense_layers: Natural = 2
    """Number of first layers that read everything."""

    def __post_init__(self) -> None:
        from alula.sparsity.select import METHODS

        if self.method not in METHODS:
            raise unknown("selector", self.method, METHODS)
        if (least := smallest(self.budget)) < self.least_budget:
            check_planned_settings(self)
            raise SettingError(
                f"budget={least} is smaller than the three blocks of {self.block} that are always read "
                f"(the first and the last two); use at least {self.least_budget}."
            )

    @property
    def least_budget(self) -> int:
        return 3 * self.block

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but method and budget, by name."""
        return {"block": self.block, "dense_layers": self.dense_layers}


@settings_type
class Sparsity:
    """A sparse policy: an evictor, a selector, both (evict to a large budget, read a small one), or neither."""

    evict: Evict | None = None
    """Drop KV for good during rollouts."""
    select: Select | None = None
    """Keep all KV and read a part of it during rollouts."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        """In a recipe: the text form, settings, or null for dense."""
        return sparsity_settings(given) if isinstance(given, str) else given or {}

    @classmethod
    def parse(cls, text: str) -> "Sparsity":
        """From text: `dense`, `rkv:512+128,window=16`, `block-topk:1024`, or two joined by `&`."""
        evict, select = settings_of(text)
        return cls(Evict(**evict) if evict else None, Select(**select) if select else None)

    @property
    def dense(self) -> bool:
        return self.evict is None and self.select is None

    def page(self, default: int = 16) -> int:
        """KV tokens per page of an engine with this policy: a selector's block size, or else `default`."""
        return self.select.block if self.select else default

    def describe(self, *, full: bool = False) -> str:
        """The text that `parse` reads back. Settings at their defaults are left out, unless `full`."""
        return " & ".join(describe(part, full=full) for part in (self.evict, self.select) if part) or "dense"

    def with_budget(self, kind: Kind, budget: Budget) -> "Sparsity":
        """The same policy with another budget of its evictor or its selector."""
        return replace(self, **{kind: replace(getattr(self, kind), budget=budget)})


DENSE = Sparsity()


def sparsity_settings(text: str) -> dict[str, Any]:
    """The text form as sections of a recipe."""
    evict, select = settings_of(text)
    if evict:
        evict["options"] = {name: evict.pop(name) for name in [*evict] if name not in fields_of(Evict)}
    return {name: part for name, part in (("evict", evict), ("select", select)) if part}


DEFAULTS = {
    kind: {
        name: field.default for name, field in fields_of(kind).items() if name not in ("method", "budget", "options")
    }
    for kind in (Evict, Select)
}


def describe(part: Evict | Select, *, full: bool = False) -> str:
    """The text of one part of a policy."""
    return part_text(part.method, part.budget, part.settings if full else changed_settings(part, "buffer"))


def changed_settings(part: Evict | Select, *always: str) -> dict[str, Any]:
    """The settings of a part that differ from their defaults, and those named in `always`."""
    usual = DEFAULTS[type(part)].items()
    changed = {name: getattr(part, name) for name, value in usual if name in always or getattr(part, name) != value}
    return changed | dict(getattr(part, "options", ()))  # none of them at its default


def check_planned_settings(part: Evict | Select) -> None:
    """Raise if a schedule file was planned with other settings, and say what to write instead."""
    schedule = part.budget
    if not isinstance(schedule, Schedule) or schedule.source is None:
        return
    schedule.check(method=part.method)
    planned = dict(schedule.notes.get("options", {}))
    if isinstance(part, Select) and schedule.block is not None:
        planned["block"] = schedule.block
    other = [f"{name}={value}" for name, value in planned.items() if part.settings.get(name) != value]
    if other:
        named = replace(schedule, name=schedule.source, source=None)
        text = describe(type(part)(part.method, named, **part.settings | planned))
        raise SettingError(f"{schedule.source} was planned with {', '.join(other)}; write {text}.")


def check_schedules(sparsity: Sparsity, model: str) -> None:
    """Raise if a schedule was planned for another model, method or setting."""
    parts = {"evict": sparsity.evict, "select": sparsity.select}
    for part in parts.values():
        if part is not None and isinstance(part.budget, Schedule):
            check_planned_settings(part)
            both = {kind: describe(one, full=True) if one else "none" for kind, one in parts.items()}
            settings = both | part.settings
            block = part.block if isinstance(part, Select) else None
            part.budget.check(method=part.method, block=block, model=model, settings=settings)


def smallest(budget: Budget) -> int:
    return min(budget.budgets) if isinstance(budget, Schedule) else budget


def budget_at(budget: Budget, length: int) -> int:
    """The budget for a sequence of `length` tokens: prompt and generated, evicted or not."""
    return budget.at(length) if isinstance(budget, Schedule) else budget
