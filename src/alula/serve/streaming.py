"""Streams answers: text as soon as it is certain, and server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from alula.engine.stop_strings import StopStrings


class TextStream:
    """Turns the tokens of one answer into pieces of text.

    Held back until more tokens come: an incomplete character, and an end that may be the start of a stop string.
    """

    def __init__(self, tokenizer: Any, stops: StopStrings | None) -> None:
        self.tokenizer, self.stops = tokenizer, stops.strings if stops else ()
        self.tokens: list[int] = []
        self.sent = 0
        """Characters sent."""
        self._held = ""
        self._from = self._upto = 0
        """Tokens [from, upto) were decoded before; they give the next ones their context."""

    def add(self, tokens: list[int]) -> str:
        """New text that is certain."""
        self.tokens += tokens
        before = self._decode(self.tokens[self._from : self._upto])
        after = self._decode(self.tokens[self._from :])
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._from, self._upto = self._upto, len(self.tokens)
        text = self._held + after[len(before) :]
        held = max((overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return self._send(text[: len(text) - held])

    def finish(self, text: str) -> str:
        """The rest of the complete text."""
        return self._send(text[self.sent :])

    def _send(self, text: str) -> str:
        self.sent += len(text)
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


class TextOffsets:
    """Where the tokens of one answer begin in its text; parts of a character begin where it does."""

    def __init__(self, tokenizer: Any) -> None:
        self._text = TextStream(tokenizer, None)

    def of(self, tokens: list[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._text.sent)
            self._text.add([token])
        return offsets


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class EventStream(Response):
    """Server-sent events from JSON objects. The source is closed whatever happens to the connection.

    The JSON is ASCII: many clients end a line at U+0085 or U+2028, too, which a model may well write.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any]]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in events:
                body = b"data: %b\n\n" % to_json(event, ensure_ascii=True)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
