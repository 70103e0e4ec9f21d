"""The pages' numbers are those of the raw result files."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_of_the_benchmarks_page_come_from_the_raw_results():
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"<!-- {name} -->" in page for name in table.tables())
    assert table.filled(page) == page, "run python benchmarks/table.py docs/benchmarks.md"
