"""A sparse policy as one short text, for command lines."""

import re
from typing import TYPE_CHECKING, Any

from alula.errors import require, unknown
from alula.sparsity.schedule import Schedule

if TYPE_CHECKING:
    from alula.sparsity.policy import Budget, Evict, Select, Sparsity

FORM = "dense, rkv:512+128,window=8,sinks=4, block-topk:1024,block=16, or an evictor & a selector"
WHOLE = ("buffer", "window", "sinks", "block", "dense_layers")
"""Settings that are numbers of tokens or layers; a method's own options check themselves."""


def parse_sparsity(text: str) -> "Sparsity":
    """The policy that `text` names.

    `dense`; `METHOD:BUDGET[+BUFFER][,setting=value ...]`; or an evictor and a selector joined by `&`. BUDGET is a
    number of tokens (`2k` is 2048), the name of a schedule preset or a schedule file. A setting without a value is
    switched on: `snapkv:64+16,protect_prompt`.
    """
    from alula.sparsity.policy import Evict, Select, Sparsity

    evict, select = settings_of(text)
    return Sparsity(
        Evict(**evict | {"budget": budget(evict["budget"])}) if evict else None,
        Select(**select | {"budget": budget(select["budget"])}) if select else None,
    )


def settings_of(text: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The settings of the evictor and of the selector that `text` names; their budgets as they are written."""
    if text.strip() == "dense":
        return None, None
    from alula.sparsity.evict import METHODS as EVICTORS
    from alula.sparsity.select import METHODS as SELECTORS

    evictors, selectors = [], []
    for part in text.split("&"):
        method, _, rest = (word.strip() for word in part.partition(":"))
        if method in EVICTORS:
            evictors.append(parse_evict(method, rest, part.strip()))
        elif method in SELECTORS:
            selectors.append(parse_select(method, rest, part.strip()))
        else:
            require(method != "dense", f"sparsity {text!r}: dense stands alone; drop it to keep the rest.")
            raise unknown("sparsity", method, ["dense", *EVICTORS, *SELECTORS])
    require(
        len(evictors) <= 1 and len(selectors) <= 1,
        f"sparsity {text!r}: & joins one evictor ({', '.join(EVICTORS)}) and one selector ({', '.join(SELECTORS)}).",
    )
    return evictors[0] if evictors else None, selectors[0] if selectors else None


def spell(part: "Evict | Select | None") -> str:
    """The text that names one part of a policy with all its settings; `none` where there is none."""
    if part is None:
        return "none"
    fixed = ("method", "budget", "options")
    settings = {name: value for name, value in vars(part).items() if name not in fixed}
    settings |= dict(getattr(part, "options", ()))
    size = part.budget.name if isinstance(part.budget, Schedule) else part.budget
    return ",".join([f"{part.method}:{size}", *(f"{name}={value}" for name, value in sorted(settings.items()))])


def parse_evict(method: str, rest: str, text: str) -> dict[str, Any]:
    from alula.sparsity.evict import check_settings

    size, settings = split(rest, text)
    require("budget" not in settings, f"sparsity {text!r} gives the budget twice, after : and by its name.")
    check_settings(method, settings)
    with_buffer = re.fullmatch(r"(.+)\+(\d+k?)", size)
    if with_buffer:
        require("buffer" not in settings, f"sparsity {text!r} gives the buffer twice, after + and by its name.")
        size, settings["buffer"] = with_buffer[1].strip(), tokens(with_buffer[2])
    require(
        re.fullmatch(r"[-.\dk]+\s*\+.*", size) is None,
        f"sparsity {text!r}: the buffer is one whole number after one +, as in 512+128.",
    )
    protect = settings.get("protect_prompt", False)
    require(isinstance(protect, bool), f"sparsity {text!r}: protect_prompt={protect} must be true or false.")
    return {"method": method, "budget": size, **settings}


def parse_select(method: str, rest: str, text: str) -> dict[str, Any]:
    size, settings = split(rest, text)
    for name in settings:
        if name not in ("block", "dense_layers"):
            raise unknown(f"setting of selector {method!r}:", name, ("block", "dense_layers"))
    require(
        re.fullmatch(r"\d+k?\+.*", size) is None,
        f"sparsity {text!r}: a selector keeps all KV, so it has no buffer; drop {size[size.find('+') :]!r}.",
    )
    return {"method": method, "budget": size, **settings}


def split(rest: str, text: str) -> tuple[str, dict[str, Any]]:
    """What follows the colon: the budget's text, and the settings by name."""
    size, *pairs = (word.strip() for word in rest.split(","))
    require(bool(size), f"sparsity {text!r} names no budget; the forms are: {FORM}.")
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = (word.strip() for word in pair.partition("="))
        require(bool(name), f"sparsity {text!r} has an empty setting; the forms are: {FORM}.")
        require(name not in settings, f"sparsity {text!r} gives {name} twice.")
        settings[name] = setting_value(value) if equals else True
        whole = isinstance(settings[name], int) and not isinstance(settings[name], bool)
        require(whole or name not in WHOLE, f"sparsity {text!r}: {name} must be a whole number, not {value!r}.")
    return size, settings


def setting_value(text: str) -> Any:
    words = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for number in (tokens, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def budget(text: str) -> "Budget":
    return tokens(text) if re.fullmatch(r"\d+k?", text) else Schedule.load(text)


def tokens(text: str) -> int:
    return 1024 * int(text[:-1]) if text.endswith("k") else int(text)
