"""Chat messages to a prompt, by the tokenizer's chat template."""

import inspect
from collections.abc import Iterable
from typing import Any

from jinja2 import TemplateError

from alula.errors import SettingError, first_line, require


def apply_chat_template(tokenizer: Any, messages: Any, name: str, /, **options: Any) -> Any:
    """The prompt of `messages`, as text or token ids. `SettingError` begins with `name` if the template rejects them:
    roles or content that it does not know."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except (TemplateError, TypeError, ValueError) as error:
        raise SettingError(f"{name}: the model's chat template rejects it ({first_line(error)}).") from error


def check_variables(tokenizer: Any, names: Iterable[str], setting: str) -> None:
    """Raise for variables of `setting` that transformers sets itself: `messages`, and arguments such as `tokenize`."""
    arguments = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in names:
        require(name not in arguments, f"{setting}.{name}: not a variable of a chat template; leave it out.")
