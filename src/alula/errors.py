"""The one way Alula says that an input is wrong: one sentence with the setting, the value and the way out."""

from collections.abc import Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from numbers import Integral
from typing import Any, TypeVar

Settings = TypeVar("Settings")


class SettingError(ValueError):
    """A setting or an input that cannot be used. The message is meant for the person who wrote it."""


class RunFailed(RuntimeError):
    """Work that had begun and cannot go on, through no fault of a setting. The message says why and what to try."""


def unknown(kind: str, name: str, known: Iterable[str]) -> SettingError:
    """An unknown name, with the nearest valid one."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    listed = f"known: {', '.join(names)}." if names else "there are none."
    hint = f"did you mean {near[0]!r}?" if near else listed
    return SettingError(f"unknown {kind} {name!r}; {hint}")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingError(message)


def require_whole(**settings: Any) -> None:
    for name, value in settings.items():
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        require(whole, f"{name}={value!r}: must be a whole number.")


def refuse_unknown(owner: Any, names: Iterable[str]) -> None:
    """Refuse keyword arguments that `owner`, a class or a function, does not take."""
    known = [name for name in signature(owner).parameters if name != "options"]
    for name in names:
        if name not in known:
            raise unknown(f"setting of {owner.__name__}:", name, known)


def named_settings(cls: type[Settings]) -> type[Settings]:
    """Makes a dataclass answer an unknown setting with the nearest one that it has."""
    plain = cls.__init__

    @wraps(plain)
    def init(self: Settings, *values: Any, **settings: Any) -> None:
        refuse_unknown(cls, settings)
        plain(self, *values, **settings)

    cls.__init__ = init  # type: ignore[method-assign,misc,assignment]
    return cls
