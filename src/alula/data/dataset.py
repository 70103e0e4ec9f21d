"""Examples, and data sets of examples in a fixed order."""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alula.errors import require

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    """A prompt with its reference answer."""

    prompt: str | Messages
    answer: Any = None
    """The reference answer."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The row that the example was built from."""
    prompt_ids: tuple[int, ...] | None = None
    """The prompt's tokens, with chat template and special tokens; set by `prepare`."""

    def record(self) -> dict[str, Any]:
        """The argument of reward functions: the row's fields with `prompt` and `answer`."""
        return {**self.fields, "prompt": self.prompt, "answer": self.answer}


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt as text: of chat messages their texts, line by line. A message may have none, or a list of parts."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(text for message in prompt if (text := _content_text(message.get("content"))))


def _content_text(content: Any) -> str:
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)
    return "" if content is None else str(content)


@dataclass(frozen=True)
class Dataset(Sequence[Example]):
    """Examples in a fixed order."""

    examples: tuple[Example, ...]
    name: str = "data"
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of rows left out, by reason."""

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        return self.examples[index]

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)

    def take(self, size: int | None, seed: int | None = None) -> "Dataset":
        """The first `size` examples; with a seed, `size` random ones."""
        require(size is None or size >= 1, f"size={size}: ask for at least one example.")
        order = range(len(self)) if seed is None else shuffled(len(self), seed)
        return Dataset(tuple(self.examples[i] for i in order[:size]), self.name, self.dropped)

    def split(self, held_out: int, seed: int = 0) -> tuple["Dataset", "Dataset"]:
        """(training, held-out) examples without overlap, chosen by seed, each in the original order."""
        require(
            0 < held_out < len(self),
            f"held_out={held_out}: must leave some of the {len(self)} examples for training.",
        )
        chosen = set(shuffled(len(self), seed)[:held_out])
        training = tuple(example for i, example in enumerate(self.examples) if i not in chosen)
        evaluation = tuple(example for i, example in enumerate(self.examples) if i in chosen)
        return Dataset(training, self.name, self.dropped), Dataset(evaluation, f"{self.name} held out")

    def fingerprint(self) -> str:
        """A hash of prompts, answers and their order."""
        digest = hashlib.blake2b(digest_size=8)
        for example in self.examples:
            digest.update(repr((example.prompt, example.answer)).encode())
        return digest.hexdigest()


def shuffled(size: int, *seed: int) -> list[int]:
    """A permutation that is the same on every machine and Python version (which is guaranteed for `random()` only)."""
    generator = random.Random("/".join(map(str, seed)))
    keys = [generator.random() for _ in range(size)]
    return sorted(range(size), key=keys.__getitem__)
