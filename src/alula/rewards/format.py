"""`format`: does the answer have the required format?"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from alula.data.answers import last_boxed
from alula.errors import SettingError, unknown


def has_boxed(completion: str) -> bool:
    return last_boxed(completion) is not None


def has_thinking(completion: str) -> bool:
    """One closed thinking part, then an answer. The opening tag may be missing, since chat templates often add it."""
    thought, tag, answer = completion.partition("</think>")
    thought = thought.strip().removeprefix("<think>")
    once = "<think>" not in thought + answer and tag not in answer
    return bool(tag and thought.strip() and answer.strip()) and once


CHECKS: dict[str, Callable[[str], bool]] = {"boxed": has_boxed, "think": has_thinking}


def build(has: str | None = None, pattern: str | None = None) -> Callable[[str, Mapping[str, Any]], float]:
    """The grader: 1 if the completion has the format, else 0. Either `has` (boxed or think) or `pattern`, a regular
    expression to search for (`.` matches newlines; anchor with \\A and \\Z to match all of it)."""
    if has is not None and pattern is None:
        if has not in CHECKS:
            raise unknown("form (reward format, has)", has, CHECKS)
        check = CHECKS[has]
        return lambda completion, example: float(check(completion))
    if pattern is None or has is not None:
        raise SettingError("reward format: give either has=boxed, has=think or pattern=<regular expression>.")
    try:
        expression = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise SettingError(f"reward format: pattern={pattern!r} is not valid: {error}.") from error
    return lambda completion, example: float(expression.search(completion) is not None)
