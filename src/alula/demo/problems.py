"""Pointer chasing with a hint: the smallest task on which a sparse policy teaches a model to stop reasoning."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from alula.data.dataset import Dataset
from alula.data.tasks.pointer import Pointer
from alula.data.tasks.task import Problem
from alula.errors import require


@dataclass(frozen=True)
class HintedPointer(Pointer):
    """`b> c a> b c> a ; a 3 ? b :` is `pointer` with a hint after `?`, which is correct in a share `hint` of problems.

    The careful trace follows the map and is always correct, as long as the map is still in the KV cache. The shortcut
    is `=` and the hint: two tokens without a lookup, correct with probability `hint`.
    """

    hint: float = 0.45

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.hint <= 1, f"hint={self.hint}: a share of problems, between 0 and 1.")

    @property
    def words(self) -> list[str]:
        return [*super().words, "?"]

    def problem(self, generator: random.Random) -> Problem:
        plain = super().problem(generator)
        wrong = [letter for letter in self.alphabet if letter != plain.answer]
        hint = plain.answer if generator.random() < self.hint else generator.choice(wrong)
        return Problem(
            prompt=f"{plain.prompt.removesuffix(' :')} ? {hint} :",
            answer=plain.answer,
            trace=plain.trace,
            shortcut=f"= {hint}",
        )


def write_problems(problems: Dataset, path: Path) -> None:
    """Write one JSON object per line, for `alula train` and `alula eval`."""
    rows = ({"prompt": p.prompt, "answer": p.answer, "trace": p.fields["trace"]} for p in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
