"""The built-in example: a table that the policy must ask for, one entry per turn."""

from typing import Any

from alula.environments.environment import Answer


class Lookup:
    """The environment of `task:lookup`. The first word of a turn counts: a letter is a lookup, a number the answer.

    `c :` → `c` → `c > f` → `f` → `f > 3` → `3` → done. A letter that is not in the table is answered with `?`.
    Each correct step of the chain, taken in order, gives 1/(hops + 1), so that a whole chain gives 1.
    """

    replayable = True

    def reset(self, example: dict[str, Any], seed: int) -> str:
        self.table: dict[str, str] = example["table"]
        self.chain = list(self.table)
        self.answer: str = example["answer"]
        return example["prompt"]

    def step(self, completion: str) -> Answer:
        word = next(iter(completion.split()), "")
        share = 1 / (len(self.table) + 1)
        if word.isdigit() or word == "":
            return "", share * (word == self.answer and not self.chain), True
        correct = self.chain[:1] == [word]
        if correct:
            self.chain.pop(0)
        return f"{word} > {self.table.get(word, '?')}", share * correct, False
