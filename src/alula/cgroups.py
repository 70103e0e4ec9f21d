"""Limits of this process' control groups, as a container or a job scheduler sets them: CPUs and memory, by the files of
versions 1 and 2 of Linux' cgroups."""

from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cpu_quota(root: Path = CGROUPS, process: Path = OWN_CGROUP) -> int | None:
    """CPUs of the quota, rounded up; None without one. The tightest group counts (version 2); of version 1 the
    outermost, which is a container's own."""
    pairs = [(folder / "cpu.max",) for folder in groups_around(root, process)]
    pairs += [(root / "cpu" / "cpu.cfs_quota_us", root / "cpu" / "cpu.cfs_period_us")]  # type: ignore[list-item]
    return min((quota for files in pairs if (quota := _quota(files)) is not None), default=None)


def memory_left(root: Path = CGROUPS, process: Path = OWN_CGROUP) -> int | None:
    """Bytes that the process may still allocate within its limits; None without one."""
    pairs = [(folder / "memory.max", folder / "memory.current") for folder in groups_around(root, process)]
    pairs.append((root / "memory" / "memory.limit_in_bytes", root / "memory" / "memory.usage_in_bytes"))
    return min((free for limit, used in pairs if (free := _free(limit, used)) is not None), default=None)


def groups_around(root: Path, process: Path) -> list[Path]:
    """The folders of this process' cgroup and of all around it (version 2), the innermost first."""
    try:
        group = next(line[3:] for line in process.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        group = "/"
    own = root / group.strip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]


def _quota(files: tuple[Path, ...]) -> int | None:
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else -(-int(quota) // int(period))


def _free(limit: Path, used: Path) -> int | None:
    if not (limit.exists() and used.exists()) or (text := limit.read_text().strip()) == "max":
        return None
    return max(0, int(text) - int(used.read_text()))
