"""Small generated tasks with an exact verifier, for demonstrations and tests: no download, a tiny vocabulary."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alula.data.tasks.countdown import Countdown
from alula.data.tasks.pointer import Pointer
from alula.data.tasks.symbols import CopyLast, Successor
from alula.data.tasks.task import Task
from alula.errors import require, unknown

if TYPE_CHECKING:
    from alula.rewards.scoring import Answers

TASKS: dict[str, type[Task]] = {task.name: task for task in (CopyLast, Successor, Pointer, Countdown)}


def build(name: str, **options: Any) -> Task:
    kind = kind_of(name)
    allowed = inspect.signature(kind).parameters
    for option, value in options.items():
        if option not in allowed:
            raise unknown(f"option of task:{name}", option, allowed)
        whole = allowed[option].annotation is not int or type(value) is int  # a bool is an int, and no number
        require(whole, f"task {name}: {option}={value!r} must be a whole number.")
    return kind(**options)


def task_reward(name: str, partial: bool = False) -> Callable[["Answers"], Sequence[float]]:
    """`task:<name>`: 1 for a right answer, else 0; with `partial`, the share of it that is right."""
    kind = kind_of(name)

    def score(completion: str, example: Mapping[str, Any]) -> float:
        value = kind.score(completion, example)
        return value if partial else float(value == 1)

    return lambda answers: [score(c, e) for c, e in zip(answers.completions, answers.examples)]


def kind_of(name: str) -> type[Task]:
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]
