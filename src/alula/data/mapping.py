"""Maps a row of any data set to an example: templates for prompt and answer, and how the answer is extracted."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from alula.data.answers import last_boxed
from alula.data.dataset import Dataset, Example, prompt_text
from alula.errors import SettingError, require, unknown

_FIELD = re.compile(r"\{([A-Za-z_]\w*(?:\.\w+)*)\}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNIT = re.compile(r"^(.*\S)\s*\([^()]*\)$")


def after_hashes(value: Any) -> Any:
    return str(value).rsplit("####", 1)[-1].strip()


def before_unit(value: Any) -> Any:
    match = _UNIT.match(str(value))
    return match[1] if match else value


ANSWER_FORMS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda value: value,
    "####": after_hashes,
    "boxed": lambda value: last_boxed(str(value)),
    "unit": before_unit,
}
"""How to extract the answer from its field: as it is, after ####, from the last box of a solution, before a (unit)."""


@dataclass(frozen=True)
class FieldMapping:
    """`prompt` and `answer` are templates with {field}s, or {field.inner} for nested rows; other braces are kept. A
    template of a single field keeps the field's type, so chat messages and lists of answers pass through."""

    prompt: str = "{prompt}"
    answer: str | None = "{answer}"
    """None for data without answers, graded by a reward model."""
    answer_form: str = "plain"

    def __post_init__(self) -> None:
        if self.answer_form not in ANSWER_FORMS:
            raise SettingError(f"answer_form={self.answer_form}: {unknown('form', self.answer_form, ANSWER_FORMS)}")

    def example(self, row: Mapping[str, Any]) -> Example | None:
        """None for a row without an answer, which no verifier could grade."""
        answer, template = None, self.answer_template(row)
        if template is not None:
            answer = self.extract_answer(template, row)
            if empty(answer):
                return None
        prompt = fill(self.prompt, row, "prompt")
        check_prompt(prompt)
        return Example(prompt, answer, dict(row))

    def extract_answer(self, template: str, row: Mapping[str, Any]) -> Any:
        try:
            answer = fill(template, row, "answer")
        except NullField:
            return None
        return None if answer is None else ANSWER_FORMS[self.answer_form](answer)

    def answer_template(self, row: Mapping[str, Any]) -> str | None:
        """`answer`, or None for a coding task's row without one: its tests grade it."""
        by_tests = self.answer == FieldMapping.answer and "answer" not in row and row.get("tests")
        return None if by_tests else self.answer

    def apply(
        self, rows: Iterable[Mapping[str, Any]], name: str, source: str | None = None, section: str = "data"
    ) -> Dataset:
        """The examples of all rows. Rows without an answer are dropped and counted.

        `source` is the name of the data in errors, if it differs from `name`; `section` is that of its settings.
        """
        where = f"{section} {source or name}"
        examples: list[Example | None] = []
        for row in rows:
            try:
                examples.append(self.example(row))
            except NoField as error:
                if not examples:
                    raise SettingError(f"{where}: {error} {error.hint(section)}") from None
                raise SettingError(
                    f"{where}, row {len(examples) + 1}: {str(error).rstrip(';')}; the rows before have it, so "
                    "complete this one, or remove it."
                ) from None
            except SettingError as error:
                raise SettingError(
                    f"{where}, row {len(examples) + 1}: {error}; correct the row, or name another field with "
                    f"{section}.prompt."
                ) from None
        kept = [example for example in examples if example is not None]
        dropped = {"no answer": len(examples) - len(kept)} if len(kept) < len(examples) else {}
        require(len(examples) > 0, f"{where}: no usable rows (read 0): the data is empty.")
        require(
            len(kept) > 0,
            f"{where}: no usable rows (read {len(examples)}, all without answer); name its field in {section}.answer.",
        )
        return Dataset(tuple(kept), name, dropped)


def check_prompt(prompt: Any) -> None:
    """Raise for what no tokenizer could read. The message lacks the row, and a hint."""
    shown = f"prompt {prompt!a:.80}"
    require(isinstance(prompt, str) or is_chat(prompt), f"{shown} is neither text nor a list of chat messages")
    require(
        _SURROGATE.search(prompt_text(prompt)) is None, f"{shown} has half of a surrogate pair, which is no character"
    )


def is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(message, Mapping) for message in prompt)


class NullField(SettingError):
    """A field of a template of text is null in a row."""


class NoField(Exception):
    """A template names a field that a row does not have. The message lacks the name of the data, and its hint."""

    def __init__(self, message: str, setting: str, field: str) -> None:
        super().__init__(message)
        self.setting, self.field = setting, field

    def hint(self, section: str) -> str:
        option = ", --prompt on the command line" if self.setting == "prompt" and section == "data" else ""
        return f'name another with {section}.{self.setting}="{{{self.field}}}" in a recipe{option}.'


def fill(template: str, row: Mapping[str, Any], setting: str) -> Any:
    """The template with the row's fields filled in. A template of a single field returns its value, null included."""
    single = _FIELD.fullmatch(template)
    if single:
        return look_up(single[1], row, setting)
    return _FIELD.sub(lambda match: field_text(match[1], row, setting), template)


def field_text(field: str, row: Mapping[str, Any], setting: str) -> str:
    """A field's value as a part of a text."""
    value, shown = look_up(field, row, setting), f"field {field!r} of the {setting} template"
    if value is None:
        raise NullField(f"{shown} is null")
    require(
        not is_chat(value), f'{shown} is chat messages, which stay a conversation in the template "{{{field}}}" alone'
    )
    return str(value)


def look_up(path: str, row: Mapping[str, Any], setting: str) -> Any:
    value: Any = row
    names = path.split(".")
    for depth, name in enumerate(names):
        if not isinstance(value, Mapping) or name not in value:
            outer = names[:depth] if isinstance(value, Mapping) else []
            raise no_field(path, outer, value if isinstance(value, Mapping) else row, setting)
        value = value[name]
    return value


def no_field(path: str, outer: list[str], fields: Mapping[str, Any], setting: str) -> NoField:
    """The error for an unknown field; hints at the closest of `fields`, which are those inside `outer`."""
    other = "answer" if setting == "prompt" else "prompt"
    matches = get_close_matches(path.split(".")[-1], list(fields), n=1)
    guess = [*matches, *(name for name in fields if name != other), "field"][0]
    known = ", ".join(sorted(fields)) or "none"
    message = f"unknown field {path!r} of the {setting} template (known: {known});"
    return NoField(message, setting, ".".join([*outer, guess]))


def empty(answer: Any) -> bool:
    return answer is None or str(answer).strip(" $") == "" or answer == []
