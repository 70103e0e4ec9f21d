"""Files of JSON lines."""

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Of a file that may not be there yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
