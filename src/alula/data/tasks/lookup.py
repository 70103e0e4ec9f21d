"""Lookup: a chain of letters in a table that only the environment `lookup` can read."""

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from alula.data.dataset import Dataset
from alula.data.tasks.task import Problem, Task
from alula.errors import require


@dataclass(frozen=True)
class Lookup(Task):
    """`c :` asks for the number at the end of the chain that starts at c. The table (`c f` `f 3`) is not in the prompt:
    the environment answers `c` with `f`, and `f` with `3`, which is the answer after `hops` lookups.

    The rows' field `table` holds the chain, for the environment.
    """

    name: ClassVar[str] = "lookup"
    symbols: int = 8
    """Letters, and as many numbers."""
    hops: int = 2

    def __post_init__(self) -> None:
        require(2 <= self.symbols <= 26, f"task lookup: symbols={self.symbols} must lie in 2 to 26.")
        require(
            1 <= self.hops <= self.symbols, f"task lookup: hops={self.hops} must lie in 1 to symbols={self.symbols}."
        )

    @property
    def alphabet(self) -> str:
        return string.ascii_lowercase[: self.symbols]

    @property
    def words(self) -> list[str]:
        return [*self.alphabet, *map(str, range(self.symbols)), ":", ">", "?", "!"]

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def problem(self, generator: random.Random) -> Problem:
        chain = [*generator.sample(self.alphabet, self.hops), str(generator.randrange(self.symbols))]
        guess = str(generator.randrange(self.symbols))
        return Problem(f"{chain[0]} :", chain[-1], " ".join(chain), guess)

    def dataset(self, size: int, seed: int = 0) -> Dataset:
        plain = super().dataset(size, seed)
        examples = tuple(
            replace(example, fields={**example.fields, "table": table(example.fields["trace"])}) for example in plain
        )
        return replace(plain, examples=examples)

    @staticmethod
    def score(completion: str, example: Mapping[str, Any]) -> float:
        """1 if the completion ends with the answer."""
        return float(completion.split()[-1:] == [example["answer"]])


def table(trace: str) -> dict[str, str]:
    """What each letter of a chain leads to."""
    return dict(pairwise(trace.split()))
