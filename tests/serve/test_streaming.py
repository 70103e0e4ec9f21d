"""Server-sent events, as clients split them into lines."""

import asyncio
import json

from alula.serve.streaming import EventStream


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
