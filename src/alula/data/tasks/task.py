"""Generated tasks: problems in words, a careful solution, a shortcut, and a verifier."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from alula.data.dataset import Dataset, Example


@dataclass(frozen=True)
class Problem:
    """A problem and its solutions. All texts are words separated by single spaces."""

    prompt: str
    answer: str
    trace: str
    """A careful solution, for supervised warm-up. It is correct; only that of a search may end without an answer."""
    shortcut: str
    """A solution in the right format that skips the work and is mostly wrong."""


class Task(ABC):
    name: ClassVar[str]

    @property
    @abstractmethod
    def words(self) -> list[str]:
        """All words of prompts and solutions."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of a policy that knows the format and guesses the answer."""

    @abstractmethod
    def problem(self, generator: random.Random) -> Problem: ...

    @staticmethod
    @abstractmethod
    def score(completion: str, example: Mapping[str, Any]) -> float:
        """A score in [0, 1]; 1 only for a correct answer."""

    def dataset(self, size: int, seed: int = 0) -> Dataset:
        """`size` problems; the i-th depends only on (seed, i). Fields: task, trace, shortcut."""
        problems = [self.problem(random.Random(f"{self.name}/{seed}/{i}")) for i in range(size)]
        examples = (
            Example(p.prompt, p.answer, {"task": self.name, "trace": p.trace, "shortcut": p.shortcut}) for p in problems
        )
        return Dataset(tuple(examples), f"task:{self.name}")
