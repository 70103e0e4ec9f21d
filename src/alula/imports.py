"""Objects of other packages, named in settings as `package.module:name`."""

from importlib import import_module
from typing import Any

from alula.errors import SettingError, unknown


def import_object(name: str, setting: str, kind: str) -> Any:
    """The object that `package.module:name` names. Errors begin with `setting`; `kind` is what it should be."""
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise SettingError(
            f"{setting}: module {error.name!r} not found; install it, or run from its folder."
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        known = (each for each in vars(module) if each[0] != "_")
        raise SettingError(f"{setting}: {unknown(f'{kind} of {module_name}', attribute, known)}")
    return found
