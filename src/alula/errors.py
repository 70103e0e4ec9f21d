"""Errors meant for the user. A message names the setting and its value, and gives a hint."""

import errno
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from numbers import Integral
from os import PathLike
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar, get_args

Settings = TypeVar("Settings")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of writing to a full disk, or beyond a quota."""


class SettingError(ValueError):
    """An invalid setting or input. The message is written for the person who set it."""


class RunFailed(RuntimeError):
    """A failure after the work has started, with valid settings. The message gives the cause and what to try."""


def unknown(kind: str, name: str, known: Iterable[str]) -> SettingError:
    """The error for an unknown name: suggests the closest known name, or lists all."""
    names = sorted(known)
    matches = get_close_matches(name, names, n=1) or get_close_matches(name.lower(), names, n=1)
    listing = f"known: {', '.join(names)}." if names else "there are none."
    hint = f"did you mean {matches[0]!r}?" if matches else listing
    return SettingError(f"unknown {kind} {name!r}; {hint}")


def first_line(error: BaseException) -> str:
    """What another library's error says first, without colours and a final period; its type if it says nothing."""
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
    return next((line.strip().rstrip(".") for line in lines if line.strip()), type(error).__name__)


def with_place(error: BaseException) -> str:
    """An error of user code, with the file and line that raised it; of a `SettingError` only the message."""
    if isinstance(error, SettingError):
        return str(error).rstrip(".")
    folders = (Path(__file__).parent, *map(sysconfig.get_path, ("stdlib", "purelib")))
    others = (*(f"{folder}{os.sep}" for folder in folders), "<")
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    line = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:500] + line


def require(condition: bool, message: str) -> None:
    """Raise `SettingError(message)` unless `condition` is true."""
    if not condition:
        raise SettingError(message)


@contextmanager
def in_section(section: str, setting: str | None = None) -> Iterator[None]:
    """Errors of a Python call name settings as in a recipe: `device=cuda: …` becomes `model.device=cuda: …`. Messages
    that name no setting begin with `setting`, if it is given."""
    try:
        yield
    except SettingError as error:
        message = str(error)
        if re.match(r"\w+(\[\d+\])?=", message):
            error.args = (f"{section}.{message}",)
        elif setting and not message.startswith(section):
            error.args = (f"{setting}: {message}",)
        raise


def one_or_more(given: Any) -> list[Any]:
    """The items of a list; a text or a path alone is a list of one."""
    return [given] if isinstance(given, str | PathLike) else list(given)


def require_whole(**settings: Any) -> None:
    """Raise unless every setting is an integer (numpy integers count, booleans do not)."""
    for name, value in settings.items():
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        require(is_integer, f"{name}={value!r}: must be a whole number.")


def reject_unknown_arguments(target: Any, names: Iterable[str]) -> None:
    """Raise for keyword arguments that `target`, a class or a function, does not accept."""
    known = [name for name in signature(target).parameters if name != "options"]
    for name in names:
        if name not in known:
            raise unknown(f"setting of {target.__name__}:", name, known)


OPTION_TYPES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
"""The types of options that are checked, in words."""


def check_options(target: Callable[..., Any], options: Mapping[str, Any], what: str) -> None:
    """Raise for options of `what` that `target` does not accept, by their names or types. Positional-only parameters
    are no options."""
    accepted = {
        name: parameter.annotation
        for name, parameter in signature(target).parameters.items()
        if parameter.kind is not Parameter.POSITIONAL_ONLY
    }
    for name, value in options.items():
        if name not in accepted:
            raise unknown(f"option of {what}", name, accepted)
        types = set(get_args(accepted[name]) or [accepted[name]])
        allowed = types | {int} if float in types else types
        words = [OPTION_TYPES[kind] for kind in types if kind in OPTION_TYPES]
        # type(): a bool is no number
        require(not words or type(value) in allowed, f"{what}: {name}={value!r} must be {' or '.join(sorted(words))}.")


def named_settings(cls: type[Settings]) -> type[Settings]:
    """Class decorator: an unknown keyword argument raises `SettingError` with the closest known name."""
    plain_init = cls.__init__

    @wraps(plain_init)
    def init(self: Settings, *values: Any, **settings: Any) -> None:
        reject_unknown_arguments(cls, settings)
        plain_init(self, *values, **settings)

    cls.__init__ = init  # type: ignore[method-assign,misc,assignment]
    return cls
