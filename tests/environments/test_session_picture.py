"""The picture of docs/environments.md: examples/session_memory.py draws exactly what the recorded evictions say."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_episodes import EVICTING, SAMPLING, engine_of, episodes_of, loaded, starts  # noqa: F401 - a fixture

from alula.engine.rollout import NEVER

SCRIPT = Path(__file__).parents[2] / "examples" / "session_memory.py"
spec = importlib.util.spec_from_file_location("session_memory", SCRIPT)
picture = importlib.util.module_from_spec(spec)
spec.loader.exec_module(picture)


def test_the_area_of_every_row_is_what_heads_hold(loaded):  # noqa: F811
    recorded = [start for start in starts(1) if not setattr(start, "record", True)]
    played = episodes_of(engine_of(loaded)).play(recorded, SAMPLING, EVICTING)
    episode = max(played, key=len)
    assert episode.kv.evictions > 0
    drawn = ElementTree.fromstring(picture.draw(episode, "title"))
    rects = [r for r in drawn.iter("{http://www.w3.org/2000/svg}rect") if r.get("fill-opacity")]
    length = len(episode.prompt_ids) + len(episode)
    ends = episode.history.clamp(max=length).where(episode.history != NEVER, length).double().mean((0, 1))
    for token in range(length):
        row = [r for r in rects if float(r.get("y")) == picture.TOP + token * picture.CELL]
        area = sum(float(r.get("width")) / picture.CELL * float(r.get("fill-opacity")) for r in row)
        assert area == pytest.approx(float(ends[token]) - token, abs=0.01 * length)
        assert {r.get("fill") for r in row} == {picture.KINDS[picture.kinds(episode)[token]]}
