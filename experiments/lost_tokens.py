"""Which tokens of the dense text the policies of a leaderboard file lose."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markdown import markdown

from alula.mismatch.leaderboard.row import NEVER


def lost_table(path: Path) -> str:
    """Dense rollouts with a token that a policy gives less than 1e-4 times the dense probability, and where the answer
    has that token from: the first such token of each rollout counts."""
    record, text = json.loads(path.read_text()), json.loads(path.with_suffix(".work.json").read_text())["text"]
    head = ["policy", "bytes of", "lost", "in the question", "and not among as many last tokens"]
    rows = [[policy_name(row), row["target"], *lost_counts(row, text)] for row in record["held"]]
    return markdown(head, [[*map(str, row)] for row in sorted(rows, key=lambda row: (row[1], row[2]))])


def policy_name(row: dict[str, Any]) -> str:
    return f"{row['policy']} in {row['kv_dtype']}" if row["kv_dtype"] else row["policy"]


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
