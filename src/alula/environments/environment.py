"""The protocol of an environment."""

from collections.abc import Awaitable
from typing import Any, Protocol

from alula.data.dataset import Messages

Given = str | Messages
"""What an environment says: chat messages; a text is one message of the user."""
Answer = tuple[Given, float, bool]
"""(messages, reward, done): what the policy reads next, the reward of its turn, and whether the episode is over."""


class Environment(Protocol):
    """One episode: `reset` once, then `step` after every turn of the policy, until it is done. Both may be `async def`.

    Every episode has an instance of its own, built with `environment.options`. Calls run in other threads than the
    engine. All rollouts of a prompt get the same example and seed. An exception, or a call that takes longer than
    `environment.timeout`, ends the episode, which is then not trained on. Answer a wrong call of a tool with a message
    instead.
    """

    replayable: bool
    """Whether the same example, seed and completions always give the same answers. `reroll` needs it; absent: no.

    An environment may also have `tools`, a list of function schemas for the chat template, and `close()`, which is
    called when its episode has ended for whatever reason."""

    def reset(self, example: dict[str, Any], seed: int) -> Given | Awaitable[Given]:
        """The prompt. `example` is the data's row, with `prompt` and `answer`."""

    def step(self, completion: str) -> Answer | Awaitable[Answer]:
        """Answer the policy's turn. The episode's reward is the sum over its turns. A turn that was cut at
        `sampling.max_new_tokens` is answered too, for its reward; it is the last one."""
