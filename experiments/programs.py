"""A generated coding task: put statements in order so that they compute a value; hidden tests run the program.

The prompt lists assignments in random order and names the wanted variable. The careful program writes those that lead
from the argument x to it, in order; every statement is looked up in the prompt. The shortcut calls `old`, an earlier
version of the function that is right in a share `hint` of the problems.
"""

import json
import random
import string
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from alula.data.dataset import Dataset, Example
from alula.rewards import Rewards, RewardTerm

OPERATIONS = ("+1", "+2", "+3", "+4", "+5", "-1", "-2", "-3", "-4", "-5", "*2", "*3")
TESTS = 4
SHORTCUT = "def f(x): return old(x)"


@dataclass(frozen=True)
class Programs:
    """With three variables, `b= k *2 c= b -1 k= x +3 ; b :` asks for `def f(x): k= x +3 ; b= k *2 ; return b`."""

    name: ClassVar[str] = "programs"
    variables: int = 11
    min_lines: int = 8
    max_lines: int = 10
    hint: float = 0.5

    @property
    def alphabet(self) -> list[str]:
        return [letter for letter in string.ascii_lowercase if letter not in "flx"][: self.variables]

    @property
    def words(self) -> list[str]:
        names = [*self.alphabet, "x"]
        fixed = [";", ":", "def", "f(x):", "return", "old(x)"]
        return [*names, *(f"{name}=" for name in self.alphabet), *OPERATIONS, *fixed]

    def dataset(self, size: int, seed: int = 0) -> Dataset:
        """The i-th problem depends only on (seed, i). Fields: trace, shortcut, prelude, tests."""
        problems = (self.problem(random.Random(f"{self.name}/{seed}/{i}")) for i in range(size))
        return Dataset(tuple(problems), f"task:{self.name}")

    def problem(self, generator: random.Random) -> Example:
        path = ["x", *generator.sample(self.alphabet, self.variables)]
        steps = [(here, there, generator.choice(OPERATIONS)) for here, there in pairwise(path)]
        lines = generator.randint(self.min_lines, self.max_lines)
        wanted = path[lines]
        used = [operation for _, _, operation in steps[:lines]]
        listed = generator.sample(steps, len(steps))
        fields = {
            "trace": " ".join(["def f(x):", *(f"{t}= {h} {o} ;" for h, t, o in steps[:lines]), f"return {wanted}"]),
            "shortcut": SHORTCUT,
            "prelude": f"def old(x): return {nested(old(used, self.hint, generator))}",
            "tests": [
                {"call": f"f({value})", "expected": str(apply(used, value))}
                for value in generator.sample(range(-20, 21), TESTS)
            ],
        }
        prompt = " ".join(f"{there}= {here} {operation}" for here, there, operation in listed)
        return Example(f"{prompt} ; {wanted} :", fields["trace"], fields)


def old(operations: list[str], hint: float, generator: random.Random) -> list[str]:
    """The right operations in a share `hint` of the problems, else with one constant changed."""
    if generator.random() < hint:
        return operations
    place = generator.randrange(len(operations))
    others = [o for o in OPERATIONS if o[0] == operations[place][0] and o != operations[place]]
    return [*operations[:place], generator.choice(others), *operations[place + 1 :]]


def apply(operations: list[str], value: int) -> int:
    for operation in operations:
        number = int(operation[1:])
        value = {"+": value + number, "-": value - number, "*": value * number}[operation[0]]
    return value


def nested(operations: list[str]) -> str:
    text = "x"
    for operation in operations:
        text = f"({text} {operation})"
    return text


def write_programs(problems: Dataset, path: Path) -> None:
    """One JSON object per line, with the tests that the `code` reward reads."""
    rows = ({"prompt": p.prompt, "answer": p.answer, **p.fields} for p in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def grade(texts: list[str], examples: list[dict[str, Any]]) -> list[float]:
    with Rewards([RewardTerm(name="code", options={"seconds": 2})]) as rewards:
        graded = rewards.score(texts, examples)
    assert not graded.failures, graded.failures[0]
    return graded.total
