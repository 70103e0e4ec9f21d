"""Environments by name: built-in ones, classes of other packages, those of `verifiers`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from alula.environments.environment import Environment
from alula.errors import SettingError, require, unknown
from alula.imports import import_object

Build = Callable[[], Environment]
VERIFIERS = "verifiers:"


def load_environment(use: str, options: Mapping[str, Any]) -> Build:
    """What builds one episode's environment, by name. Raises for an unknown name and for options that do not fit."""
    if use.startswith(VERIFIERS):
        from alula.environments.verifiers import load_verifiers

        return load_verifiers(use.removeprefix(VERIFIERS), options)
    cls = environment_class(use)
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        raise SettingError(f"environment.options of {use}: {error}.") from error
    return lambda: cls(**options)


def environment_class(use: str) -> Any:
    from alula.environments.lookup import Lookup

    built_in = {"lookup": Lookup}
    if use in built_in:
        return built_in[use]
    if not use.partition(":")[2]:
        raise unknown("environment:", use, [*built_in, "verifiers:<environment>", "package.module:Class"])
    cls = import_object(use, f"environment.use={use!r}", "class")
    missing = [name for name in ("reset", "step") if not callable(getattr(cls, name, None))]
    require(not missing, f"environment.use={use!r}: it has no {' and no '.join(missing)}(); see docs/environments.md.")
    return cls


def is_replayable(use: str) -> bool:
    """Whether the environment says that it can be replayed."""
    return not use.startswith(VERIFIERS) and bool(getattr(environment_class(use), "replayable", False))
