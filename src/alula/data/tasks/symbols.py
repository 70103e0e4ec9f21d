"""Trivial tasks on letters with known chance level: does training work at all?"""

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from alula.data.tasks.task import Problem, Task
from alula.errors import require


@dataclass(frozen=True)
class SymbolTask(Task):
    symbols: int = 8
    """Size of the alphabet."""
    prefix: int = 4
    """Letters in the prompt."""

    def __post_init__(self) -> None:
        require(2 <= self.symbols <= 26, f"task {self.name}: symbols={self.symbols} must lie in 2 to 26.")
        require(self.prefix >= 1, f"task {self.name}: prefix={self.prefix} must be at least 1.")

    @property
    def alphabet(self) -> str:
        return string.ascii_lowercase[: self.symbols]

    @property
    def words(self) -> list[str]:
        return [*self.alphabet, ":"]

    def solved(self, generator: random.Random, step: int, length: int) -> Problem:
        """The letters that follow the prompt's last one, `step` apart, around the alphabet."""
        prompt = [generator.randrange(self.symbols) for _ in range(self.prefix)]
        answer = [self.alphabet[(prompt[-1] + step * k) % self.symbols] for k in range(1, length + 1)]
        guess = [generator.choice(self.alphabet) for _ in range(length)]
        text = " ".join(answer)
        return Problem(" ".join(self.alphabet[i] for i in prompt) + " :", text, text, " ".join(guess))

    @staticmethod
    def score(completion: str, example: Mapping[str, Any]) -> float:
        """Fraction of the answer's letters in the correct position; text after the answer does not count."""
        answer = example["answer"].split()
        return sum(given == right for given, right in zip(completion.split(), answer)) / len(answer)


@dataclass(frozen=True)
class CopyLast(SymbolTask):
    """`c a d b :` is answered by `b`."""

    name: ClassVar[str] = "copy-last"

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def problem(self, generator: random.Random) -> Problem:
        return self.solved(generator, step=0, length=1)


@dataclass(frozen=True)
class Successor(SymbolTask):
    """`c a d b :` is answered by `c`, or by the next `length` letters: `c d e`."""

    name: ClassVar[str] = "successor"
    length: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.length >= 1, f"task successor: length={self.length} must be at least 1.")

    @property
    def chance(self) -> float:
        return self.symbols**-self.length

    def problem(self, generator: random.Random) -> Problem:
        return self.solved(generator, step=1, length=self.length)
