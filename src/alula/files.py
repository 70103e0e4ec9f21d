"""File helpers: reading, atomic writes, permissions; the same-settings check of a continued job; sizes, counts and
standard errors as text."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from alula.errors import SettingError


def read_text(path: Path, what: str) -> str:
    """The text of a file that the user named; `what` begins the error, as in "recipe mine.yaml"."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{what}: not UTF-8 text (byte {error.start:,}); name another file.") from error
    except OSError as error:
        raise SettingError(f"{what}: cannot be read ({error.strerror}); name another file.") from error


def write_atomically(path: Path, text: str) -> None:
    """Write next to `path`, then rename: a reader sees the old text or the new one, never half of it. A link stays a
    link, and what is not a file, such as /dev/null, is written as it is."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with replacement(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A file next to `path` to be written, which replaces it at the end. If writing fails, `path` stays as it is."""
    path = Path(os.path.realpath(path))
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def apply_umask(folder: Path) -> None:
    """Give the files in `folder` the permissions of the umask; safetensors writes them for the owner only."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o666 & ~mask)


def check_same_settings(source: str, before: Mapping[str, Any], now: Mapping[str, Any], hint: str) -> None:
    """Raise at the first setting of `now` that differs from the one that `source` was written with."""
    for name, value in now.items():
        if before.get(name) != value:
            raise SettingError(f"{source} was written with {name}={before.get(name)}, not {name}={value}; {hint}.")


def read_continued(path: Path, what: str, settings: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The JSON object, with `settings` and these `keys`, of a file that a command continues. Raises for a damaged file,
    for one of another command, and for other settings; `what` begins the error."""
    source, record = f"{what} {path}", None
    with suppress(json.JSONDecodeError):
        record = json.loads(read_text(path, source))
    if not isinstance(record, dict) or not {"settings", *keys} <= record.keys():
        raise SettingError(f"{source}: damaged, or of another command; set another --out, or delete the file.")
    hint = "use the same setting to continue, delete the file to start over, or set another --out"
    check_same_settings(source, record["settings"], settings, hint)
    return record


def size_text(size: float) -> str:
    """Bytes as text, in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def count_text(count: int, noun: str) -> str:
    """A number of things as text: 1 step, 2,000 steps."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def plus_minus(error: float | None, unit: str = "%") -> str:
    """The standard error of a share, to append to it: " ± 2.1%". Empty if the error is unknown, or 0 because all
    answers were graded alike: that is no certainty."""
    return f" ± {100 * error:.1f}{unit}" if error else ""
