"""Generated tasks with an exact verifier and a tiny vocabulary, for demos and tests; nothing is downloaded."""

from typing import Any

from alula.data.tasks.countdown import Countdown
from alula.data.tasks.lookup import Lookup
from alula.data.tasks.machine import Machine
from alula.data.tasks.pointer import Pointer
from alula.data.tasks.search import Search
from alula.data.tasks.symbols import CopyLast, Successor
from alula.data.tasks.task import Task
from alula.errors import check_options, unknown

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (CopyLast, Successor, Pointer, Countdown, Search, Machine, Lookup)
}


def build(name: str, **options: Any) -> Task:
    cls = task_class(name)
    check_options(cls, options, f"task {name}")
    return cls(**options)


def task_class(name: str) -> type[Task]:
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]
