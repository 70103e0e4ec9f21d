"""The pages' numbers are those of the raw result files, and these are replaced only by complete sections."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from sections import arguments, record

def good():
    yield {{"value": 1}}

def bad():
    yield {{"value": 1}}
    raise ValueError("no room")

def slow():
    import time
    yield {{"value": 1}}
    time.sleep(60)

def empty():
    yield from ()

sections = {{"good": good, "bad": bad, "slow": slow, "empty": empty}}
record(sections, arguments(sections, None).parse_args(), {{}})
"""


@pytest.fixture
def benchmarks(monkeypatch):
    """The folder's modules by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield import_module
    for name in ("retake", "table"):
        sys.modules.pop(name, None)


def test_the_tables_of_the_benchmarks_page_come_from_the_raw_results(benchmarks):
    table = benchmarks("table")
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"<!-- {name} -->" in page for name in table.tables())
    assert table.filled(page) == page, "run python benchmarks/table.py docs/benchmarks.md"


def test_the_break_even_length_is_computed_from_the_raw_results(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    speed = import_module("speed")
    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    speed.main()
    written = (ROOT / "docs" / "results" / "speed" / "breakeven.jsonl").read_text()
    assert (tmp_path / "speed" / "breakeven.jsonl").read_text() == written, "run python experiments/speed.py"


def test_sections_are_taken_again_the_oldest_first(benchmarks):
    found = benchmarks("retake").sections()
    assert [section.taken for section in found] == sorted(section.taken for section in found)
    assert {("engine", "pool"), ("training", "long"), ("sparrow", "decode")} <= {(s.file, s.name) for s in found}


def test_only_a_section_that_ends_replaces_the_old_one(benchmarks, monkeypatch, tmp_path):
    retaken = benchmarks("retake")
    script, old = tmp_path / "script.py", {name: {"taken": "", "rows": []} for name in ("good", "bad", "slow", "empty")}
    script.write_text(SCRIPT.format(folder=str(ROOT / "benchmarks")))
    monkeypatch.setattr(retaken.table, "RESULTS", tmp_path)
    monkeypatch.setattr(retaken, "SCRIPTS", {"some": str(script)})
    results = tmp_path / "some-h200.json"
    results.write_text(json.dumps(old))
    limits = {"good": 60, "bad": 60, "slow": 8, "empty": 60}
    outcomes = {s.name: retaken.retake(s, (), limits[s.name]) for s in retaken.sections()}
    assert outcomes["good"].startswith("taken in")
    assert outcomes["bad"].startswith("failed: ValueError: no room; its rows are in ")
    assert json.loads(Path(outcomes["bad"].rpartition(" ")[2]).read_text())["bad"]["rows"][0] == {"value": 1}
    assert outcomes["slow"].startswith("stopped after 8 s")
    assert outcomes["empty"] == "failed: it has no rows"
    new = json.loads(results.read_text())
    assert new["good"]["rows"] == [{"value": 1}]
    assert new["good"]["taken"]
    assert new["good"]["seconds"] < 60
    assert {**new, "good": None} == {**old, "good": None}
