"""Groups of settings that pydantic checks: the class `Section`, the decorator `settings_type`, and their errors."""

import re
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from alula.errors import SettingError, unknown

CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
Settings = TypeVar("Settings")


class Section(BaseModel):
    """A group of settings. An invalid value raises a SettingError."""

    model_config = ConfigDict(**CONFIG, frozen=True)

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise first_error(error, type(self)) from error

        __init__.__pydantic_base_init__ = True  # validation of a whole tree keeps the path of an error

    @model_validator(mode="before")
    @classmethod
    def _null_is_empty(cls, given: Any) -> Any:
        """`null` means an empty list or mapping where that is the default."""
        if not isinstance(given, dict):
            return given
        empty = {name for name, field in cls.model_fields.items() if field.default in ({}, [], ())}
        return {name: value for name, value in given.items() if value is not None or name not in empty}


@dataclass_transform(frozen_default=True)
def settings_type(cls: type[Settings]) -> type[Settings]:
    """Decorator: a frozen, hashable dataclass that is checked and documented like a `Section`.

    For the types of the Python API that the tree contains (`Evict`, `Correction`, ...): they take values by position.
    """
    made: Any = dataclass(frozen=True, config=CONFIG)(cls)
    for base in made.__mro__[1:]:  # pydantic reads the docstrings of the class itself only
        for name, field in getattr(base, "__pydantic_fields__", {}).items():
            made.__pydantic_fields__[name].description = made.__pydantic_fields__[name].description or field.description
    validate = made.__init__

    @wraps(validate)
    def init(self: Any, *values: Any, **settings: Any) -> None:
        try:
            validate(self, *values, **settings)
        except ValidationError as error:
            raise first_error(error, made) from error

    made.__init__ = init
    return made


def is_section(annotation: Any) -> bool:
    """Whether a type is a `Section` or a `settings_type`."""
    return isinstance(annotation, type) and hasattr(annotation, "__pydantic_fields__")


def fields_of(section: Any) -> dict[str, FieldInfo]:
    """The settings of a `Section` or a `settings_type`, by name."""
    return section.__pydantic_fields__


UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def first_error(error: ValidationError, section: Any) -> SettingError:
    """The first error as one sentence: setting, value and hint."""
    first = min(error.errors(), key=lambda one: one["type"] not in UNKNOWN)  # a typo also leaves a gap
    location = list(first["loc"])
    if location and isinstance(location[0], int):  # a value by position
        location[0] = [*fields_of(section), "?"][min(location[0], len(fields_of(section)))]
    path = ".".join(str(part) for part in location)
    if first["type"] in UNKNOWN:
        return unknown(f"setting of {section.__name__}:", path, fields_of(section))
    if first["type"] in ("missing", "missing_argument"):
        if len(location) == 1 and is_section(absent := fields_of(section)[path].annotation):
            needed = [name for name, field in fields_of(absent).items() if field.is_required()]
            path = ".".join([path, *needed[:1]])
        return SettingError(f"setting {path!r} is missing; give it in the recipe or as {path}=value.")
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        if not path:
            return SettingError(message)
        return SettingError(f"{path}.{message}" if re.match(r"[\w.]+=", message) else f"{path}: {message}")
    expected = first["msg"].removeprefix("Input ").rstrip(".")
    if first["type"] == "string_type" and isinstance(first["input"], dict):
        expected += f'; write a text that begins with a brace in quotes, as {first["loc"][-1]}: "{{field}}"'
    return SettingError(f"setting {path}={first['input']!r}: {expected}.")
