"""What a generated task is: problems in words, the careful way to write the answer, a lossy one, a verifier."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from alula.data.dataset import Dataset, Example


@dataclass(frozen=True)
class Problem:
    """All texts are words with single spaces between them."""

    prompt: str
    answer: str
    trace: str
    """A careful, right solution, to warm a model up on."""
    shortcut: str
    """A solution in the right form that saves the work and is mostly wrong."""


class Task(ABC):
    name: ClassVar[str]

    @property
    @abstractmethod
    def words(self) -> list[str]:
        """Every word that prompts and solutions use."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """How often a policy is right that knows the form and guesses the answer."""

    @abstractmethod
    def problem(self, generator: random.Random) -> Problem: ...

    @staticmethod
    @abstractmethod
    def score(completion: str, example: Mapping[str, Any]) -> float:
        """In [0, 1]; 1 only for a right answer."""

    def dataset(self, size: int, seed: int = 0) -> Dataset:
        """`size` problems; the i-th depends on (seed, i) only. Fields: task, trace, shortcut."""
        problems = [self.problem(random.Random(f"{self.name}/{seed}/{i}")) for i in range(size)]
        examples = (
            Example(p.prompt, p.answer, {"task": self.name, "trace": p.trace, "shortcut": p.shortcut}) for p in problems
        )
        return Dataset(tuple(examples), f"task:{self.name}")
