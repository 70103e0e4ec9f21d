"""The text form of a sparse policy: parsed from command lines and recipes, printed in reports and files.

    policy = dense | PART | EVICTOR & SELECTOR
    PART   = METHOD:BUDGET[+BUFFER][,setting=value ...]

BUDGET is a number of tokens (`2k` is 2048), the name of a schedule preset or a schedule file. A setting without a value
is switched on: `snapkv:64+16,protect_prompt`. In a list of families (`alula.sparsity.family`), commas separate families
and colons separate settings: `rkv:buffer=64:sinks=4`.

This module returns names and values; `alula.sparsity.policy` builds policies from them.
"""

import re
from collections.abc import Mapping
from typing import Any

from alula.errors import require, unknown
from alula.sparsity.schedule import Schedule

FORMS = "dense, rkv:512+128,window=8,sinks=4, block-topk:1024,block=16, or an evictor & a selector"
SELECT_SETTINGS = ("block", "dense_layers")
INTEGERS = ("buffer", "window", "sinks", *SELECT_SETTINGS)
"""Settings that must be whole numbers. Each method checks its options itself."""


def methods() -> tuple[list[str], list[str]]:
    """The names of all evictors and of all selectors."""
    from alula.sparsity.evict import METHODS as EVICTORS  # lazy: loads torch
    from alula.sparsity.select import METHODS as SELECTORS

    return list(EVICTORS), list(SELECTORS)


def settings_of(text: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Keyword arguments of the evictor and of the selector in `text`; budgets stay text."""
    if text.strip() == "dense":
        return None, None
    evictor_names, selector_names = methods()
    evictors: list[dict[str, Any]] = []
    selectors: list[dict[str, Any]] = []
    for part in text.split("&"):
        method = part.partition(":")[0].strip()
        require(method != "dense", f"sparsity {text!r}: dense cannot be combined; drop it or the rest.")
        settings = parse_part(part.strip())
        require("budget" in settings, f"sparsity {part.strip()!r} has no budget; write one of: {FORMS}.")
        (evictors if method in evictor_names else selectors).append(settings)
    require(
        len(evictors) <= 1 and len(selectors) <= 1,
        f"sparsity {text!r}: & joins one evictor ({', '.join(evictor_names)}) and one selector "
        f"({', '.join(selector_names)}).",
    )
    return evictors[0] if evictors else None, selectors[0] if selectors else None


def parse_part(text: str, separator: str = ",") -> dict[str, Any]:
    """Keyword arguments of one evictor or selector; `budget` stays text and may be missing."""
    method, _, rest = (word.strip() for word in text.partition(":"))
    evictors, selectors = methods()
    if method not in evictors and method not in selectors:
        raise unknown("sparsity", method, ["dense", *evictors, *selectors])
    words = [word.strip() for word in rest.split(separator)] if rest else []
    settings: dict[str, Any] = {"method": method}
    if words and is_budget(words[0]):
        settings |= parse_budget(words.pop(0), text, buffer=method in evictors)
    for word in words:
        name, equals, value = (piece.strip() for piece in word.partition("="))
        require(bool(name), f"sparsity {text!r} has an empty setting; write one of: {FORMS}.")
        require(name not in settings, f"sparsity {text!r} sets {name} twice.")
        settings[name] = value if name == "budget" else setting_value(value) if equals else True
        is_integer = isinstance(settings[name], int) and not isinstance(settings[name], bool)
        require(is_integer or name not in INTEGERS, f"sparsity {text!r}: {name} must be a whole number, not {value!r}.")
    names = [name for name in settings if name not in ("method", "budget")]
    if method in evictors:
        from alula.sparsity.evict import check_settings

        check_settings(method, names)
    elif strange := [name for name in names if name not in SELECT_SETTINGS]:
        raise unknown(f"setting of selector {method!r}:", strange[0], SELECT_SETTINGS)
    protect = settings.get("protect_prompt", False)
    require(isinstance(protect, bool), f"sparsity {text!r}: protect_prompt={protect} must be true or false.")
    return settings


def is_budget(word: str) -> bool:
    """Whether a first word is a budget: a number, or the name or file of a schedule."""
    return bool(word) and ("=" not in word or "/" in word or word.endswith(".json")) and word != "protect_prompt"


def parse_budget(word: str, text: str, *, buffer: bool) -> dict[str, Any]:
    """BUDGET, or BUDGET+BUFFER if a `buffer` is allowed."""
    if not buffer:
        require(
            re.fullmatch(r"\d+k?\+.*", word) is None,
            f"sparsity {text!r}: a selector keeps all KV, so it has no buffer; remove {word[word.find('+') :]!r}.",
        )
        return {"budget": word}
    with_buffer = re.fullmatch(r"(.+)\+(\d+k?)", word)
    budget = with_buffer[1].strip() if with_buffer else word
    require(
        re.fullmatch(r"[-.\dk]+\s*\+.*", budget) is None,
        f"sparsity {text!r}: the buffer is one whole number after one +, as in 512+128.",
    )
    return {"budget": budget} | ({"buffer": tokens(with_buffer[2])} if with_buffer else {})


def setting_value(text: str) -> Any:
    switches = {"true": True, "false": False}
    if text.lower() in switches:
        return switches[text.lower()]
    for number in (tokens, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def budget(text: str) -> int | Schedule:
    return tokens(text) if re.fullmatch(r"\d+k?", text) else Schedule.load(text)


def tokens(text: str) -> int:
    return 1024 * int(text[:-1]) if text.endswith("k") else int(text)


def part_text(method: str, budget: int | Schedule | None, settings: Mapping[str, Any], separator: str = ",") -> str:
    """The text of one evictor or selector, or of a family if there is no budget."""
    settings = dict(settings)
    head = method
    if budget is not None:
        buffer = f"+{settings.pop('buffer')}" if "buffer" in settings else ""
        head = f"{method}:{budget}{buffer}"
    words = [f"{name}={value}" for name, value in settings.items()]
    if budget is None and words:
        head, words = f"{method}:{words[0]}", words[1:]
    return separator.join([head, *words])
