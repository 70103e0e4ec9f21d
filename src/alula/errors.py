"""The one way Alula says that an input is wrong: one sentence with the setting, the value and the way out."""

from collections.abc import Iterable
from difflib import get_close_matches


class SettingError(ValueError):
    """A setting or an input that cannot be used. The message is meant for the person who wrote it."""


def unknown(kind: str, name: str, known: Iterable[str]) -> SettingError:
    """An unknown name, with the nearest valid one."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}."
    return SettingError(f"unknown {kind} {name!r}; {hint}")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingError(message)
