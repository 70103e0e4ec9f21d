"""The settings as tables for docs/training.md: `python -m alula.config.docs docs/training.md` writes them there."""

import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from alula.config.load import sections_in
from alula.config.run import RunConfig
from alula.objective.settings import Correction
from alula.section import fields_of

DEFAULTS = {"out": "`runs/<recipe name>`"}
"""Defaults that `alula.config.load` fills in."""
BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->\n"


def tables(section: Any = RunConfig, path: str = "") -> str:
    """A table of every section, its name in front: the run's own settings first, then section by section."""
    rows, inner = [], ""
    for name, field in fields_of(section).items():
        full = f"{path}.{name}" if path else name
        if sections := sections_in(field.annotation):
            inner += f"\n### {full}\n\n{text(field)}\n\n" + "".join(tables(one, full) for one in sections)
        else:
            shown = DEFAULTS.get(full) or default(field)
            if section is Correction:  # documented with its presets
                shown = "`sparse-rl`" if name == "preset" else "the preset's"
            rows.append(f"| `{full}` | {shown} | {text(field)} |\n")
    head = "| setting | default | |\n|---|---|---|\n" if rows else ""
    return head + "".join(rows) + inner


def text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value is None or value in ({}, [], ()):
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value}`"


def write(page: Path) -> None:
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(before + BEGIN + "\n" + tables() + "\n" + END + after)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
