"""Graders that run in worker processes, because their code may hang, raise or crash."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from alula.data.answers import after_thinking, last_boxed
from alula.errors import SettingError, check_options, require, unknown
from alula.imports import import_object
from alula.rewards import format as answer_format
from alula.rewards import math_answer

Grader = Callable[[str, Mapping[str, Any]], float]
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def is_function(name: str) -> bool:
    """Whether a reward's name has the form `package.module:function`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def build(name: str, options: Mapping[str, Any], timeout: float = 10.0) -> Grader:
    """The grader of a reward. `timeout` is the time limit of one answer, which the caller enforces."""
    if name == "math":
        check_options(math_answer.build, options, "reward math")
        return math_answer.build(**options)
    if name == "code":
        from alula.rewards.code.reward import build as build_code

        check_options(build_code, options, "reward code")
        return build_code(timeout, **options)
    if name == "format":
        check_options(answer_format.build, options, "reward format")
        return answer_format.build(**options)
    if name.startswith("reasoning-gym:"):
        require(not options, f"reward {name} takes no options, got {sorted(options)}.")
        return reasoning_gym_grader(name.removeprefix("reasoning-gym:"))
    return user_function(name, options)


def user_function(name: str, options: Mapping[str, Any]) -> Grader:
    """`package.module:function`, called as function(completion, example, **options)."""
    function = import_object(name, f"reward {name}", "function")
    check_signature(name, function, options)
    return lambda completion, example: function(completion, example, **options)


def check_signature(name: str, function: Any, options: Mapping[str, Any]) -> None:
    require(callable(function), f"reward {name}: it is a {type(function).__name__} and not a function.")
    try:
        accepted = inspect.signature(function)
    except ValueError:  # some C functions have no signature
        return
    try:
        accepted.bind("", {}, **options)
    except TypeError as error:
        raise SettingError(
            f"reward {name}: it is called as function(completion, example, **options), which does not fit {accepted}: "
            f"{error}."
        ) from error


def reasoning_gym_grader(task: str) -> Grader:
    """The task's score in [0, 1] for the text in <answer> tags, else in the last box, else for all text."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise unknown("reasoning-gym task", task, DATASETS)
    score = reasoning_gym.get_score_answer_fn(task)

    def grade(completion: str, example: Mapping[str, Any]) -> float:
        text = after_thinking(completion)
        tagged = _TAGGED.findall(text)
        answer = tagged[-1] if tagged else last_boxed(text) or text
        return score(answer=answer.strip(), entry=dict(example))

    return grade
