"""Countdown: combine all numbers with + - * to reach a target, by trial and error."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from alula.data.tasks.task import Problem, Task
from alula.errors import require

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


@dataclass(frozen=True)
class Countdown(Task):
    """`2 3 4 > 20 :` is answered by `2 + 3 = 5 ; 5 * 4 = 20`; every intermediate lies in 0 to `limit`.

    The careful trace contains up to `tries` failed attempts, each followed by `|`, before the correct one. The
    shortcut is a single random attempt. The last attempt counts.
    """

    name: ClassVar[str] = "countdown"
    numbers: int = 3
    largest: int = 9
    limit: int = 99
    tries: int = 4

    def __post_init__(self) -> None:
        require(2 <= self.numbers <= 6, f"task countdown: numbers={self.numbers} must lie in 2 to 6.")
        require(
            1 <= self.largest <= self.limit,
            f"task countdown: largest={self.largest} must lie between 1 and limit={self.limit}.",
        )
        require(self.tries >= 0, f"task countdown: tries={self.tries} must be 0 or above.")

    @property
    def words(self) -> list[str]:
        return [*map(str, range(self.limit + 1)), *OPERATIONS, "=", ";", ">", ":", "|"]

    @property
    def chance(self) -> float:
        """Accuracy of the shortcut, measured on problems of a fixed seed."""
        sample = self.dataset(500)
        return sum(self.score(e.fields["shortcut"], e.record()) for e in sample) / len(sample)

    def attempt(self, numbers: list[int], generator: random.Random) -> tuple[str, int]:
        """One random combination of all numbers, as words, and its result."""
        left, steps = list(numbers), []
        while len(left) > 1:
            a, b = generator.sample(left, 2)
            allowed = [op for op, apply in OPERATIONS.items() if 0 <= apply(a, b) <= self.limit]
            if not allowed:
                return self.attempt(numbers, generator)
            op = generator.choice(allowed)
            left.remove(a)
            left.remove(b)
            left.append(OPERATIONS[op](a, b))
            steps.append(f"{a} {op} {b} = {left[-1]}")
        return " ; ".join(steps), left[0]

    def problem(self, generator: random.Random) -> Problem:
        numbers = [generator.randint(1, self.largest) for _ in range(self.numbers)]
        solution, target = self.attempt(numbers, generator)
        failed = []
        for _ in range(generator.randint(0, self.tries)):
            steps, result = self.attempt(numbers, generator)
            if result != target:
                failed.append(steps + " |")
        return Problem(
            prompt=f"{' '.join(map(str, numbers))} > {target} :",
            answer=str(target),
            trace=" ".join([*failed, solution]),
            shortcut=self.attempt(numbers, generator)[0],
        )

    @staticmethod
    def score(completion: str, example: Mapping[str, Any]) -> float:
        """1 if the last attempt uses every number once, computes correctly and ends at the target."""
        left = example["prompt"].split(" > ")[0].split()
        for step in completion.rsplit("|", 1)[-1].split(";"):
            match step.split():
                case [a, op, b, "=", result] if op in OPERATIONS:
                    for used in (a, b):
                        if used not in left:
                            return 0.0
                        left.remove(used)
                    if str(OPERATIONS[op](int(a), int(b))) != result:
                        return 0.0
                    left.append(result)
                case _:
                    return 0.0
        return float(left == [example["answer"]])
