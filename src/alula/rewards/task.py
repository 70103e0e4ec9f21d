"""`task:<name>`: the verifier of a generated task."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alula.data.tasks import task_class

if TYPE_CHECKING:
    from alula.rewards.scoring import Answers


def task_reward(name: str, /, partial: bool = False) -> Callable[["Answers"], Sequence[float]]:
    """1 for a correct answer, else 0; with `partial`, the fraction of the answer that is correct."""
    task = task_class(name)

    def score(completion: str, example: Mapping[str, Any]) -> float:
        value = task.score(completion, example)
        return value if partial else float(value == 1)

    return lambda answers: [score(c, e) for c, e in zip(answers.completions, answers.examples)]
