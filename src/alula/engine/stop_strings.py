"""Stop strings: an answer ends where its decoded text first contains one of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alula.errors import SettingError


@dataclass(frozen=True)
class StopStrings:
    """Finds the token that completes a stop string. Only the answer is searched, never the prompt."""

    strings: tuple[str, ...]
    tokenizer: Any
    before: tuple[int, ...] = ()
    """Tokens of the answer that precede the sequence's own, for a rollout that is continued."""

    def end(self, tokens: Sequence[int], new: Sequence[int], start: int = 0) -> int | None:
        """How many of the `new` tokens belong to the answer, counting the one that completes a stop string.

        None if no string is complete. `tokens` are the answer's tokens so far; the first `start` are not searched.
        """
        # Every token that is not skipped stands for at least one byte; a few more tokens complete the first character.
        window = max(len(text.encode()) for text in self.strings) + 8
        skipped = max(0, min(start - len(tokens), len(new)))
        tail = list(tokens[max(start, len(tokens) - window) :])
        if len(tokens) < window and not start:
            tail = [*self.before, *tail][-window:]
        new = list(new[skipped:])
        if not self._complete([*tail, *new]):
            return None
        return skipped + next(count for count in range(1, len(new) + 1) if self._complete([*tail, *new[:count]]))

    def cut(self, text: str, without_last: str) -> str:
        """The text before the string that ended it. `without_last` is the text without the last token, which completed
        the string: an occurrence before `min_new_tokens` stays."""
        unfinished = len(without_last.rstrip("\ufffd"))
        starts = [text.find(string, max(0, unfinished - len(string) + 1)) for string in self.strings]
        return text[: min((start for start in starts if start >= 0), default=len(text))]

    def _complete(self, tokens: list[int]) -> bool:
        text = self._decode(tokens)
        return any(string in text for string in self.strings)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def answer_text(tokens: list[int], finish: str, stops: StopStrings | None, tokenizer: Any) -> str:
    """The text of an answer, without special tokens and without the string that ended it."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if stops is None or finish != "stop":
        return text
    return stops.cut(text, tokenizer.decode(tokens[:-1], skip_special_tokens=True))


def resolve_stops(stops: Sequence[int | str], tokenizer: Any) -> tuple[frozenset[int], StopStrings | None]:
    """Stop token ids and stop strings. The name of a special token, such as `<|im_end|>`, is its id: such tokens are
    left out of an answer's text."""
    texts = [stop for stop in stops if isinstance(stop, str)]
    if texts and tokenizer is None:
        raise SettingError(f"stop={texts[0]!r}: this model has no tokenizer; give stop tokens as ids.")
    special = (
        {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special} if texts else {}
    )
    ids = [stop for stop in stops if isinstance(stop, int)] + [special[text] for text in texts if text in special]
    strings = tuple(text for text in texts if text not in special)
    return frozenset(ids), StopStrings(strings, tokenizer) if strings else None
