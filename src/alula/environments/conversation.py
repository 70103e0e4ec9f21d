"""Messages to tokens, without tokenizing a sampled token again.

Only what the chat template writes between two turns of the policy is tokenized: the end of its message, the
environment's messages, and the next generation prompt. The template is rendered with a placeholder for the policy's
message, and the text after the placeholder is taken.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from alula.data.dataset import Messages
from alula.environments.environment import Given
from alula.errors import SettingError, require
from alula.models.chat_template import apply_chat_template

Tools = list[dict[str, Any]] | None


class Conversation:
    """Renders prompts and what comes between turns.

    `chat` applies the tokenizer's chat template (default: if it has one), with `system` in front of the prompt and
    `template_options`. Without it a message is its text alone, on lines of its own: the role is not shown, and the
    policy's end-of-sequence token ends its turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: bool | None = None,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.system = tokenizer, system
        self.chat = tokenizer.chat_template is not None if chat is None else chat
        self.options = dict(template_options or {})

    def prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Tokens of the prompt; `tools` are function schemas for the chat template."""
        if not self.chat:
            return list(self.tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
        return self._ids(self._render(self._with_system(messages), tools))

    def between(self, before: Messages, new: Messages, last: int, tools: Tools = None) -> list[int]:
        """Tokens from the end of the policy's turn to the start of its next one. `before` are the messages up to that
        turn, `new` those that follow it. `last` is the turn's last token: if it already ends the message, the
        template's own end token is left out."""
        if not self.chat:
            return self._ids("\n" + "".join(message["content"] + "\n" for message in new))
        placeholder = f"@@{secrets.token_hex(16)}@@"  # that no message contains
        turn = {"role": "assistant", "content": placeholder}
        _, found, after = self._render([*self._with_system(before), turn, *new], tools).rpartition(placeholder)
        require(bool(found), "the chat template leaves out the assistant's last message; use another one.")
        ids = self._ids(after)
        return ids[1:] if ids[:1] == [last] else ids

    def rewrites_history(self) -> str | None:
        """What the template does to earlier turns, if it does not leave them as they were sampled."""
        if not self.chat:
            return None
        user = [{"role": "user", "content": "question"}]
        prompt = self._render(self._with_system(user))
        for content, change in (
            ("answer", "it writes them differently than the generation prompt starts them"),
            ("<think>\nthought\n</think>\n\nanswer", "it drops or moves their thinking"),
        ):
            turns = [*user, {"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
            if not self._render(self._with_system(turns)).startswith(prompt + content):
                return change
        return None

    def _with_system(self, messages: Messages) -> Messages:
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def _render(self, messages: Messages, tools: Tools = None) -> str:
        options = self.options | ({"tools": tools} if tools else {})
        return str(apply_chat_template(self.tokenizer, messages, "environment.use", tokenize=False, **options))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def as_messages(given: Given) -> Messages:
    """Chat messages of what an environment returned. Raises if it is neither a text nor a list of messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, list) and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in given):
        return [{**message, "role": message.get("role", "user")} for message in given]
    raise SettingError(f"the environment returned {str(given)[:80]!r} instead of messages with role and content.")
