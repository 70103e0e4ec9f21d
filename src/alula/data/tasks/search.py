"""Search: Countdown with the whole search written out, failed branches and returns included."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, ClassVar

from alula.data.tasks.countdown import OPERATIONS, Countdown
from alula.data.tasks.task import Problem, Task
from alula.errors import require

State = tuple[int, ...]
"""Numbers that are left: those of the problem, largest first, then results in the order they were computed."""
Move = tuple[int, str, int, int]
"""Larger number, operation, smaller number, result."""
DESCENTS = 64
"""Random ones; the target is their rarest result. A frequent one would be found by the first attempts."""


@dataclass(frozen=True)
class Search(Task):
    """`4 3 2 > 20 :` asks for 20 from all three numbers; every result lies in 1 to `limit`.

    The trace counts its attempts down from `tries`. An attempt restates the numbers of the node it starts from, writes
    moves down to a single number, and compares it with the target:

        #3 4 3 2 : 4 + 3 = 7 , 2 7 : 7 * 2 = 14 ? 20 x #2 2 7 : 7 + 2 = 9 ? 20 x
        #1 4 3 2 : 3 + 2 = 5 , 4 5 : 5 * 4 = 20 ? 20 ! answer 3 + 2 = 5 ; 5 * 4 = 20

    It ends with the moves that lead to the target, or with `none`. Each trace draws a heuristic: how often it takes the
    move whose result is nearest to the target, how often it stays at the last node instead of returning to one nearer
    the root, and whether it gives up after all attempts or after a third of them. No move is tried twice at a node. The
    shortcut is one random attempt as the answer.
    """

    name: ClassVar[str] = "search"
    numbers: int = 3
    largest: int = 9
    limit: int = 40
    tries: int = 12

    def __post_init__(self) -> None:
        require(3 <= self.numbers <= 6, f"task search: numbers={self.numbers} must lie in 3 to 6.")
        require(
            self.numbers <= self.largest <= self.limit,
            f"task search: largest={self.largest} must lie between numbers={self.numbers} and limit={self.limit}.",
        )
        require(self.tries >= 1, f"task search: tries={self.tries} must be 1 or above.")

    @property
    def words(self) -> list[str]:
        counts = [f"#{left}" for left in range(1, self.tries + 1)]
        signs = ["=", ">", ":", ",", ";", "?", "x", "!", "answer", "none"]
        return [*map(str, range(1, self.limit + 1)), *counts, *OPERATIONS, *signs]

    @property
    def chance(self) -> float:
        """Accuracy of the shortcut, measured on problems of a fixed seed."""
        sample = self.dataset(500)
        return sum(self.score(e.fields["shortcut"], e.record()) for e in sample) / len(sample)

    def moves(self, state: State) -> tuple[Move, ...]:
        return moves_within(state, self.limit)

    def descent(self, root: State, generator: random.Random) -> list[Move]:
        """Random moves from all numbers to a single one."""
        state, path = root, []
        while len(state) > 1:
            moves = self.moves(state)
            if not moves:  # two equal numbers, sum and product above the limit
                return self.descent(root, generator)
            path.append(generator.choice(moves))
            state = after(state, path[-1])
        return path

    def root(self, generator: random.Random) -> State:
        return tuple(sorted(generator.sample(range(1, self.largest + 1), self.numbers), reverse=True))

    def problem(self, generator: random.Random) -> Problem:
        root = self.root(generator)
        results = Counter(self.descent(root, generator)[-1][3] for _ in range(DESCENTS))
        target = min(results, key=lambda result: (results[result], result))
        return Problem(
            prompt=f"{listed(root)} > {target} :",
            answer=str(target),
            trace=self.trace(root, target, generator),
            shortcut=f"answer {solution(self.descent(root, generator))}",
        )

    def trace(self, root: State, target: int, generator: random.Random) -> str:
        greed, patience = generator.choice((0.0, 0.3, 0.6)), generator.choice((0.3, 0.6, 0.9))
        attempts = generator.choice((max(1, self.tries // 3), self.tries))
        untried: dict[State, list[Move]] = {}
        path: list[tuple[State, Move]] = []
        lines: list[str] = []
        for left in range(self.tries, self.tries - attempts, -1):
            path = self.returned(path, untried, patience, generator)
            state = after(*path[-1]) if path else root
            steps: list[str] = []
            while len(state) > 1:
                moves = untried.setdefault(state, list(self.moves(state)))
                if not moves:
                    break
                move = nearest(moves, target) if generator.random() < greed else generator.choice(moves)
                moves.remove(move)
                steps.append(f"{listed(state)} : {written(move)}")
                path.append((state, move))
                state = after(state, move)
            if not steps:
                break
            solved = state == (target,)
            verdict = f"? {target} {'!' if solved else 'x'}"
            lines.append(f"#{left} {' , '.join(steps)} {verdict if len(state) == 1 else 'x'}")
            if solved:
                return " ".join([*lines, "answer", solution([move for _, move in path])])
        return " ".join([*lines, "answer none"])

    def returned(
        self,
        path: list[tuple[State, Move]],
        untried: Mapping[State, list[Move]],
        patience: float,
        generator: random.Random,
    ) -> list[tuple[State, Move]]:
        """The path to the node from which the next attempt starts: the last one with something left to try, or, with
        probability 1 - `patience` at each, one nearer the root."""
        open_nodes = [depth for depth, (state, _) in enumerate(path) if untried[state]]
        while len(open_nodes) > 1 and generator.random() >= patience:
            open_nodes.pop()
        return path[: open_nodes[-1]] if open_nodes else []

    @staticmethod
    def score(completion: str, example: Mapping[str, Any]) -> float:
        """1 if the moves after the last `answer` use every number once, are correct and end at the target."""
        _, mark, moves = completion.rpartition("answer ")
        return Countdown.score(moves, example) if mark else 0.0


@lru_cache(maxsize=1 << 16)
def moves_within(state: State, limit: int) -> tuple[Move, ...]:
    """All moves whose results lie in 1 to `limit`. Descents from one root meet the same states again."""
    pairs = {(max(a, b), min(a, b)) for a, b in combinations(state, 2)}
    results = ((a, op, b, apply(a, b)) for a, b in sorted(pairs) for op, apply in OPERATIONS.items())
    return tuple(move for move in results if 1 <= move[3] <= limit)


def after(state: State, move: Move) -> State:
    left = list(state)
    left.remove(move[0])
    left.remove(move[2])
    return (*left, move[3])


def nearest(moves: list[Move], target: int) -> Move:
    return min(moves, key=lambda move: abs(move[3] - target))


def listed(state: State) -> str:
    return " ".join(map(str, state))


def written(move: Move) -> str:
    a, op, b, result = move
    return f"{a} {op} {b} = {result}"


def solution(path: list[Move]) -> str:
    return " ; ".join(map(written, path))
