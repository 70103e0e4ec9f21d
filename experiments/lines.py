"""Files of JSON lines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, or none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A whole file, its folder made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def merge_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Lines of the same arm and seed are replaced, others stay."""
    rows = list(rows)
    new = {(row["arm"], row["seed"]) for row in rows}
    write_lines(path, [*(row for row in read_lines(path) if (row["arm"], row["seed"]) not in new), *rows])
