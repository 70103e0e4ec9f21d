"""Pointer chasing: every step of the chain reads something far back, which eviction can destroy."""

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from alula.data.tasks.task import Problem, Task
from alula.errors import require


@dataclass(frozen=True)
class Pointer(Task):
    """`b> c a> b c> a ; a 3 :` asks for the letter 3 hops after a. The careful trace is `3 a> b 2 b> c 1 c> a = a`.

    Three tokens per hop, counted down, then `=` and the answer: 8 to 10 hops take 26 to 32 tokens, 200 hops 602. The
    map is one cycle through all letters in random order, so the answer requires the hops. The shortcut is `=` and a
    random letter.
    """

    name: ClassVar[str] = "pointer"
    symbols: int = 12
    min_hops: int = 8
    max_hops: int = 10

    def __post_init__(self) -> None:
        require(2 <= self.symbols <= 26, f"task pointer: symbols={self.symbols} must lie in 2 to 26.")
        require(
            1 <= self.min_hops <= self.max_hops,
            f"task pointer: min_hops={self.min_hops} must lie between 1 and max_hops={self.max_hops}.",
        )

    @property
    def alphabet(self) -> str:
        return string.ascii_lowercase[: self.symbols]

    @property
    def words(self) -> list[str]:
        counts = [str(count) for count in range(1, self.max_hops + 1)]
        return [*self.alphabet, *(letter + ">" for letter in self.alphabet), *counts, ";", ":", "="]

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def problem(self, generator: random.Random) -> Problem:
        cycle = generator.sample(self.alphabet, self.symbols)
        leads_to = {letter: cycle[(i + 1) % self.symbols] for i, letter in enumerate(cycle)}
        listed = generator.sample(self.alphabet, self.symbols)
        start, hops = generator.choice(self.alphabet), generator.randint(self.min_hops, self.max_hops)
        chain, here = [], start
        for left in range(hops, 0, -1):
            chain += [str(left), here + ">", leads_to[here]]
            here = leads_to[here]
        pairs = " ".join(f"{letter}> {leads_to[letter]}" for letter in listed)
        return Problem(
            prompt=f"{pairs} ; {start} {hops} :",
            answer=here,
            trace=" ".join([*chain, "=", here]),
            shortcut=f"= {generator.choice(self.alphabet)}",
        )

    @staticmethod
    def score(completion: str, example: Mapping[str, Any]) -> float:
        """1 if the completion ends with `=` and the answer."""
        return float(completion.split()[-2:] == ["=", example["answer"]])
