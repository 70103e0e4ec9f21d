"""What a sparse policy is: which KV is evicted for good, which part of the rest is read."""

from dataclasses import dataclass
from typing import Any

from alula.errors import SettingError, named_settings, require, require_whole
from alula.sparsity.schedule import Schedule
from alula.sparsity.text import parse_sparsity, spell

Budget = int | Schedule


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

        build(self)  # an unknown method or option is refused here, not at the first eviction


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
        """The command line's spelling: `dense`, `rkv:512+128,window=16`, `block-topk:1024`, or two joined by `&`."""
        return parse_sparsity(text)

    @property
    def dense(self) -> bool:
        return self.evict is None and self.select is None

    def describe(self) -> str:
        parts = []
        if self.evict:
            parts.append(f"{self.evict.method} {describe_budget(self.evict.budget)}+{self.evict.buffer}")
        if self.select:
            parts.append(f"{self.select.method} {describe_budget(self.select.budget)}/{self.select.block}")
        return " & ".join(parts) or "dense"


DENSE = Sparsity()


def check_schedules(sparsity: Sparsity, model: str) -> None:
    """Refuse schedules that were made for another use than theirs in this policy of `model`."""
    both = {"evict": spell(sparsity.evict), "select": spell(sparsity.select)}
    for part in (sparsity.evict, sparsity.select):
        if part is not None and isinstance(part.budget, Schedule):
            settings = both | vars(part) | dict(getattr(part, "options", ()))
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


def describe_budget(budget: Budget) -> str:
    return budget.name if isinstance(budget, Schedule) else str(budget)
