"""`format`: does the answer have the required format?"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from alula.data.answers import last_boxed
from alula.errors import SettingError, require, unknown


def has_boxed(completion: str) -> bool:
    return last_boxed(completion) is not None


def has_thinking(completion: str) -> bool:
    """One closed thinking part, then an answer. The opening tag may be missing, since chat templates often add it."""
    thought, tag, answer = completion.partition("</think>")
    thought = thought.strip().removeprefix("<think>")
    once = "<think>" not in thought + answer and tag not in answer
    return bool(tag and thought.strip() and answer.strip()) and once


CHECKS: dict[str, Callable[[str], bool]] = {"boxed": has_boxed, "think": has_thinking}


def build(options: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], float]:
    """The grader: 1 if the completion has the format, else 0. Either `has` (boxed or think) or `pattern`, a regular
    expression to search for (`.` matches newlines; anchor with \\A and \\Z to match all of it)."""
    require(
        len(options) == 1 and set(options) <= {"has", "pattern"},
        f"reward format: give either has=boxed, has=think or pattern=<regular expression>, got {dict(options)}.",
    )
    if "has" in options:
        if options["has"] not in CHECKS:
            raise unknown("form (reward format, has)", str(options["has"]), CHECKS)
        check = CHECKS[options["has"]]
        return lambda completion, example: float(check(completion))
    try:
        pattern = re.compile(options["pattern"], re.DOTALL)
    except re.error as error:
        raise SettingError(f"reward format: pattern={options['pattern']!r} is not valid: {error}.") from error
    return lambda completion, example: float(pattern.search(completion) is not None)
