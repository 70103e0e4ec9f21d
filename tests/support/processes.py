"""Processes of this machine: those below another, and how one ended."""

import os
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except OSError:  # it has ended
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found, last = list[int](), [pid]
    while last := [child for child, parent in parents.items() if parent in last]:
        found += last
    return found


def end_of(child: int) -> int:
    """Wait for a forked process; its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
