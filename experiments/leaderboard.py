"""Tables of a leaderboard file: the rows of equal bytes held, and which tokens of the dense text a policy loses."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markdown import markdown

from alula.mismatch.leaderboard.row import NEVER, Row
from alula.mismatch.leaderboard.table import table_of


def held_table(path: Path) -> str:
    """Equal bytes held, at all targets of the file."""
    record = json.loads(path.read_text())
    held, dense = ([Row.from_dict(row) for row in record[name]] for name in ("held", "dense"))
    return table_of(held, dense, record["settings"]["samples"], record["settings"]["lengths"])


def lost_table(path: Path) -> str:
    """Dense rollouts with a token that a policy gives less than 1e-4 times the dense probability, and where the answer
    has that token from: the first such token of each rollout counts."""
    record, text = json.loads(path.read_text()), json.loads(path.with_suffix(".work.json").read_text())["text"]
    head = ["policy", "lost", "in the question", "and not among the last tokens"]
    rows = sorted(record["held"], key=lambda row: sum(at != NEVER for at in row["text"]["vetoed"]))
    return markdown(head, [[row["policy"], *map(str, lost_counts(row, text))] for row in rows])


def lost_counts(row: dict[str, Any], text: Sequence[Sequence[Any]]) -> tuple[int, int, int]:
    """Rollouts that lose a token; those whose token occurs in the prompt; and of these, those where it does not occur
    among as many last tokens as the target allows."""
    lost = asked = far = 0
    for (_, _, prompt, answer), at in zip(text, row["text"]["vetoed"]):
        if at != NEVER:
            before = [*prompt, *answer[:at]]
            copied = answer[at] in prompt
            lost, asked, far = lost + 1, asked + copied, far + (copied and answer[at] not in before[-row["target"] :])
    return lost, asked, far
