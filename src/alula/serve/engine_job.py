"""The engine requests of one HTTP request, and the events that answer them."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np

from alula.engine.rollout import Rollout
from alula.engine.sequence import Request, Sequence


@dataclass
class Progress:
    """New tokens of a rollout that goes on."""

    prompt_index: int
    sample_index: int
    token_ids: list[int]
    logprobs: list[float]
    topk: tuple[np.ndarray, np.ndarray] | None
    """Ids and log-probs [tokens, k]."""


@dataclass(eq=False)
class EngineJob:
    """The engine requests of one HTTP request. Its events come from the engine's thread."""

    name: str
    """The request id that clients see."""
    requests: list[Request]
    stream: bool = False
    session: str | None = None
    seeded: bool = False
    """Whether the client chose the seed."""
    continued: bool = False
    """Whether the session's kept cache was continued."""
    events: "asyncio.Queue[Progress | Rollout | Exception]" = field(default_factory=asyncio.Queue)
    live: dict[int, int] = field(default_factory=dict)
    """Unfinished rollouts by the engine's request id. Only the engine's thread uses it and `sent`."""
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens handed out, by prompt and sample."""

    @property
    def rollouts(self) -> int:
        return sum(request.sampling.n for request in self.requests)

    async def results(self) -> AsyncGenerator[Progress | Rollout]:
        """Events up to the last rollout's end."""
        left = self.rollouts
        while left:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            left -= isinstance(event, Rollout)
            yield event

    def progress(self, sequence: Sequence) -> Progress | None:
        """The tokens of this turn that were not handed out yet."""
        request = sequence.request
        index = request.prompt_index, sequence.sample
        start = sequence.turn_start + self.sent.get(index, 0)
        tokens = sequence.tokens[start:]
        if not tokens:
            return None
        self.sent[index] = self.sent.get(index, 0) + len(tokens)
        topk = None
        if request.sampling.topk_logprobs:
            ids, values = zip(*sequence.topk)
            topk = last_rows(ids, len(tokens)), last_rows(values, len(tokens))
        return Progress(*index, tokens, sequence.logprobs[start:], topk)


def last_rows(parts: tuple[np.ndarray, ...], count: int) -> np.ndarray:
    """The last `count` rows of arrays that follow each other."""
    first, rows = len(parts), 0
    while rows < count:
        first -= 1
        rows += len(parts[first])
    return np.concatenate(parts[first:])[-count:]
