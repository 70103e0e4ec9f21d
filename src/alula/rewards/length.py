"""`length`: a penalty in [-1, 0] on the number of generated tokens."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from alula.errors import SettingError, require

if TYPE_CHECKING:
    from alula.rewards.scoring import Answers


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to max_tokens - buffer, then linear to -1 at
    max_tokens, and -1 beyond."""
    return -min(max((length - (max_tokens - buffer)) / buffer, 0.0), 1.0)


def target_penalty(length: int, target: int) -> float:
    """-|length - target| / target, at least -1."""
    return -min(abs(length - target) / target, 1.0)


def length_reward(
    max_tokens: int | None = None, buffer: int | None = None, target: int | None = None
) -> Callable[["Answers"], Sequence[float]]:
    """Either `target`, or `max_tokens` with `buffer`; a truncated answer then gets -1."""
    if target is not None and max_tokens is None and buffer is None:
        require(target >= 1, f"reward length: target={target} must be at least 1.")
        return lambda answers: [target_penalty(length, target) for length in known_lengths(answers)]
    if target is not None or max_tokens is None or buffer is None:
        raise SettingError("reward length: give max_tokens and buffer (soft limit as in DAPO), or target.")
    require(
        0 < buffer <= max_tokens,
        f"reward length: buffer={buffer} must lie between 1 and max_tokens={max_tokens}.",
    )

    def score(answers: "Answers") -> list[float]:
        lengths = known_lengths(answers)
        finishes = answers.finishes or [""] * len(lengths)
        return [
            -1.0 if finish == "length" else overlong_penalty(length, max_tokens, buffer)
            for length, finish in zip(lengths, finishes)
        ]

    return score


def known_lengths(answers: "Answers") -> Sequence[int]:
    if answers.lengths is None:
        raise SettingError("reward length: needs the number of tokens of each answer; pass lengths=.")
    return answers.lengths
