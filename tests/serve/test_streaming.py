"""Server-sent events, as clients split them into lines."""

import asyncio
import json

from alula.serve.streaming import EventStream, TextOffsets


def test_no_character_of_the_text_ends_a_line():
    text = "a\x85b\u2028c\u2029d\x1ce\r\nf é 漢"
    sent: list[bytes] = []

    async def events():
        yield {"text": text}

    async def send(message):
        sent.append(message.get("body", b""))

    asyncio.run(EventStream(events())({}, None, send))
    lines = [line for line in b"".join(sent).decode().splitlines() if line]  # as httpx splits them
    assert len(lines) == 2
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": text}
    assert lines[1] == "data: [DONE]"


def test_tokens_begin_where_their_character_does():
    class Bytes:
        def decode(self, tokens, skip_special_tokens=True):
            return bytes(tokens).decode(errors="replace")

    text = "a漢b€"
    offsets = TextOffsets(Bytes())
    first, rest = text.encode()[:3], text.encode()[3:]
    assert offsets.of([*first]) + offsets.of([*rest]) == [0, 1, 1, 1, 2, 3, 3, 3]
