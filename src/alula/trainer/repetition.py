"""Endless repetition: answers that reach the token limit in a loop, a sign of failure that Sparse-RL's authors name."""

from collections.abc import Sequence

import numpy as np

from alula.engine.rollout import Rollout

LONGEST_PHRASE = 64
SHORTEST_LOOP = 64
"""Tokens that a loop must repeat, and at least three times its phrase: a list or a table is not a loop."""


def repeats_endlessly(rollout: Rollout) -> bool:
    """Whether the answer was cut off at the token limit while it repeated a phrase."""
    return rollout.finish == "length" and ends_in_a_loop(rollout.token_ids)


def ends_in_a_loop(tokens: Sequence[int]) -> bool:
    """Whether the text ends with one phrase over and over, of at most `LONGEST_PHRASE` tokens."""
    tail = np.asarray(tokens[-4 * max(LONGEST_PHRASE, SHORTEST_LOOP) :])
    for period in range(1, min(LONGEST_PHRASE, len(tail) - 1) + 1):
        differs = np.flatnonzero(tail[period:] != tail[:-period])
        repeated = len(tail) - period - (differs[-1] + 1 if len(differs) else 0)
        if repeated >= max(SHORTEST_LOOP, 3 * period):
            return True
    return False
