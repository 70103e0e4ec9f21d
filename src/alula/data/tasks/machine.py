"""Machine: a register program executed line by line, in two line formats."""

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from alula.data.tasks.task import Problem, Task
from alula.errors import require

Statement = tuple[str, str, str]
"""Register, `+` or `-`, and the register or digit that is added or subtracted."""


@dataclass(frozen=True)
class Machine(Task):
    """`a + b ; b - 3 ; | a 4 b 9 | 2 :` runs two statements for two rounds, modulo 10, and asks for all registers.

    The trace writes every line, in a format drawn anew: careful, with the operands (`a + b : 4 + 9 = 3 ;`), or terse
    (`a + b = 3 ;`). After each round it restates the rounds left and all registers:

        a + b : 4 + 9 = 3 ; b - 3 = 6 ; [ 1 a 3 b 6 ] a + b = 9 ; b - 3 : 6 - 3 = 3 ; [ 0 a 9 b 3 ] answer 9 3

    `marked=1` writes rounds as `#1`, so that a tiny model does not take them for values. A wrong value spoils all that
    depends on it. The shortcut answers with random digits. All answers of a task have nearly the same length, which
    suits timing.
    """

    name: ClassVar[str] = "machine"
    registers: int = 3
    statements: int = 4
    min_rounds: int = 6
    max_rounds: int = 7
    marked: int = 0

    def __post_init__(self) -> None:
        require(2 <= self.registers <= 12, f"task machine: registers={self.registers} must lie in 2 to 12.")
        require(self.marked in (0, 1), f"task machine: marked={self.marked} must be 0 or 1.")
        require(self.statements >= 1, f"task machine: statements={self.statements} must be 1 or above.")
        require(
            1 <= self.min_rounds <= self.max_rounds,
            f"task machine: min_rounds={self.min_rounds} must lie between 1 and max_rounds={self.max_rounds}.",
        )

    @property
    def alphabet(self) -> str:
        return string.ascii_lowercase[: self.registers]

    @property
    def words(self) -> list[str]:
        signs = ["+", "-", "=", ";", ":", "|", "[", "]", "answer"]
        counters = [self.counter(left) for left in range(self.max_rounds + 1)]
        numbers = map(str, range(10))
        words = [*numbers, *signs, *counters] if self.marked else [*numbers, *counters[10:], *signs]
        return [*self.alphabet, *words]

    @property
    def chance(self) -> float:
        return 10.0**-self.registers

    def problem(self, generator: random.Random) -> Problem:
        program = [self.statement(generator) for _ in range(self.statements)]
        values = {register: generator.randrange(10) for register in self.alphabet}
        rounds = generator.randint(self.min_rounds, self.max_rounds)
        lines = " ".join(f"{' '.join(statement)} ;" for statement in program)
        prompt = f"{lines} | {listed(values)} | {self.counter(rounds)} :"
        trace = self.trace(program, values, rounds, generator)
        guess = " ".join(str(generator.randrange(10)) for _ in values)
        return Problem(prompt, trace.rpartition("answer ")[2], trace, f"answer {guess}")

    def statement(self, generator: random.Random) -> Statement:
        target = generator.choice(self.alphabet)
        others = self.alphabet.replace(target, "")
        operand = generator.choice(others) if generator.random() < 0.7 else str(generator.randint(1, 9))
        return target, generator.choice("+-"), operand

    def trace(self, program: list[Statement], start: Mapping[str, int], rounds: int, generator: random.Random) -> str:
        values, lines = dict(start), []
        for left in range(rounds - 1, -1, -1):
            for target, sign, operand in program:
                first, second = values[target], values.get(operand)
                second = int(operand) if second is None else second
                values[target] = (first + second if sign == "+" else first - second) % 10
                work = f" : {first} {sign} {second}" if generator.random() < 0.5 else ""
                lines.append(f"{target} {sign} {operand}{work} = {values[target]} ;")
            lines.append(f"[ {self.counter(left)} {listed(values)} ]")
        return " ".join([*lines, "answer", *map(str, values.values())])

    def counter(self, rounds: int) -> str:
        return f"#{rounds}" if self.marked else str(rounds)

    @staticmethod
    def score(completion: str, example: Mapping[str, Any]) -> float:
        """1 if the completion ends with `answer` and all registers."""
        _, mark, values = completion.rpartition("answer ")
        return float(bool(mark) and values.split() == example["answer"].split())


def listed(values: Mapping[str, int]) -> str:
    return " ".join(f"{register} {value}" for register, value in values.items())
