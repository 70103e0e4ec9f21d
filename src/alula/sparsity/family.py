"""Families of policies that differ in one budget only. A calibration searches this budget, a schedule varies it."""

from dataclasses import dataclass
from typing import Any

from alula.errors import require
from alula.sparsity.evict import METHODS as EVICTORS
from alula.sparsity.policy import Budget, Evict, Kind, Select, Sparsity, changed_settings
from alula.sparsity.select import METHODS as SELECTORS
from alula.sparsity.text import budget as parse_budget
from alula.sparsity.text import parse_part, part_text

OPEN = 1 << 30
"""Placeholder for the budget that varies, in a family's template."""


@dataclass(frozen=True)
class PolicyFamily:
    """Policies that differ in one budget: the selector's, or the evictor's if there is no selector."""

    template: Sparsity
    """One policy of the family; the budget that varies is `OPEN`."""

    def __post_init__(self) -> None:
        require(not self.template.dense, "family: the dense policy has no budget to vary.")
        object.__setattr__(self, "template", self.policy(OPEN))

    def policy(self, budget: Budget) -> Sparsity:
        return self.template.with_budget(self.kind, budget)

    @property
    def kind(self) -> Kind:
        """The part whose budget varies."""
        return "select" if self.template.select else "evict"

    @property
    def part(self) -> Evict | Select:
        part = self.template.select or self.template.evict
        assert part is not None
        return part

    @property
    def method(self) -> str:
        return self.part.method

    @property
    def block(self) -> int | None:
        """Tokens per page that a selector scores; None for an evictor."""
        return self.template.select.block if self.template.select else None

    @property
    def evicts(self) -> bool:
        return self.template.evict is not None

    def describe(self, *, full: bool = False) -> str:
        """`rkv:buffer=64`, `snapkv:48+8&block-topk`: the text that `parse_families` reads back.

        Settings at their defaults are left out, unless `full`.
        """
        words = []
        for part in (self.template.evict, self.template.select):
            if part is not None:
                varies = part is self.part
                settings = part.settings if full else changed_settings(part, *([] if varies else ["buffer"]))
                words.append(part_text(part.method, None if varies else part.budget, settings, ":"))
        return "&".join(words)


def parse_families(text: str, pages: tuple[int, ...] = (16,)) -> list[PolicyFamily]:
    """The families in `block-topk,rkv:buffer=64:sinks=4`; a selector without `block` gives one family per page size."""
    families = []
    for one in text.split(","):
        name, setting, _ = one.strip().partition("=")
        require(
            not setting or ":" in name,
            f"methods: {one.strip()!r} is no method; separate settings by colons, as in rkv:buffer=64:sinks=4.",
        )
        *before, last = (parse_part(part.strip(), ":") for part in one.split("&"))
        require(len(before) < 2, f"methods: {one.strip()!r} must join one evictor and one selector.")
        families += _with_pages(last, before[0] if before else None, pages)
    return list(dict.fromkeys(families))


def _with_pages(part: dict[str, Any], evict: dict[str, Any] | None, pages: tuple[int, ...]) -> list[PolicyFamily]:
    method = part["method"]
    require(
        "budget" not in part,
        f"methods: {method} has a budget, but budgets are searched; set --budgets.",
    )
    if method in EVICTORS:
        require(evict is None, f"methods: {method} is an evictor; write it before the &, and a selector after it.")
        return [PolicyFamily(Sparsity(evict=Evict(budget=OPEN, **part)))]
    evictor = None
    if evict is not None:
        name = evict["method"]
        require(
            name not in SELECTORS, f"methods: {name} & {method} are both selectors; & joins an evictor and a selector."
        )
        require("budget" in evict, f"methods: {name} & {method}: the evictor needs a budget, as in {name}:512+128.")
        evictor = Evict(**evict | {"budget": parse_budget(evict["budget"])})
    blocks = (part["block"],) if "block" in part else pages
    return [PolicyFamily(Sparsity(evictor, Select(budget=OPEN, **part | {"block": block}))) for block in blocks]
