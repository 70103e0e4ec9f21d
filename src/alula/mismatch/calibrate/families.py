"""What `alula calibrate --methods` names: families of configurations, whose budgets are then searched."""

from typing import Any

from alula.errors import require, unknown
from alula.mismatch.calibrate.file import Configuration
from alula.sparsity.evict import METHODS as EVICTORS
from alula.sparsity.policy import Evict, Select
from alula.sparsity.select import METHODS as SELECTORS
from alula.sparsity.text import setting_value, spell


def parse_methods(text: str, pages: tuple[int, ...]) -> list[Configuration]:
    """`block-topk,rkv:buffer=64:sinks=4` as families with all their settings; a selector once for every page size."""
    families = []
    for part in text.split(","):
        *beside, one = (named_method(word) for word in part.split("&"))
        require(len(beside) < 2, f"methods: {part.strip()!r} should join one evictor and one selector.")
        families += families_of(*one, pages, *beside)
    return families


def named_method(text: str) -> tuple[str, dict[str, Any]]:
    """METHOD[:setting=value...] as a name and settings."""
    method, *pairs = text.strip().split(":")
    if method not in SELECTORS and method not in EVICTORS:
        raise unknown("method", method, [*SELECTORS, *EVICTORS])
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        require(bool(equals), f"methods: {text.strip()!r} should be METHOD:setting=value.")
        settings[name] = setting_value(value)
    return method, settings


def families_of(
    method: str, settings: dict[str, Any], pages: tuple[int, ...], beside: tuple[str, dict[str, Any]] | None = None
) -> list[Configuration]:
    """A selector, with an evictor of one budget beside it or none, for every page size; or an evictor."""
    require("budget" not in settings, f"methods: {method}'s budget is what is searched; name --budgets.")
    if method in EVICTORS:
        require(beside is None, f"methods: {method} is an evictor; write it before the &, and after it a selector.")
        one = Evict(method, 1 << 30, **settings)
        named = {name: getattr(one, name) for name in ("buffer", "window", "sinks", "protect_prompt")}
        return [Configuration("evict", method, 0, (*named.items(), *one.options))]
    known: dict[str, Any] = {"dense_layers": Select.dense_layers, "block": 0}
    for name in settings:
        if name not in known:
            raise unknown(f"setting of selector {method!r}:", name, known)
    if beside is not None:
        evictor, fixed = beside
        require(
            evictor in EVICTORS, f"methods: {evictor} & {method} are both selectors; join an evictor and a selector."
        )
        require("budget" in fixed, f"methods: {evictor} beside {method} needs a budget of its own: {evictor}:budget=N.")
        known["evict"] = spell(Evict(evictor, **fixed))
    blocks = (settings["block"],) if "block" in settings else pages
    return [Configuration("select", method, 0, tuple((known | settings | {"block": b}).items())) for b in blocks]
