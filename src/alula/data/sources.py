"""Reads rows from files, Hugging Face datasets and reasoning-gym."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from alula.errors import SettingError, require, unknown
from alula.hub import offline_if_unreachable

Row = Mapping[str, Any]
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as decoded with `errors="surrogateescape"`, which keeps line numbers correct."""


def read_file(path: Path) -> list[Row]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise SettingError(f"data file {path}: not readable as Parquet ({error}); write it again.") from error
    if path.suffix != ".jsonl":
        raise SettingError(f"data file {path}: must be .jsonl or .parquet; convert it.")
    rows = []
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in numbered(lines, f"data file {path}"):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                where = f"data file {path}, line {number}, column {error.colno}"
                raise SettingError(f"{where}: not JSON ({error.msg}); fix the line.") from error
            except (ValueError, RecursionError) as error:  # also a number of thousands of digits
                raise SettingError(f"data file {path}, line {number}: not JSON ({error}); fix the line.") from error
            require(isinstance(row, dict), f"data file {path}, line {number}: must be an object with fields.")
            rows.append(row)
    return rows


def numbered(lines: Iterable[str], file: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, from 1. Raises at the first line that is not UTF-8 (escaped in `lines`)."""
    for number, line in enumerate(lines, 1):
        require(_NOT_UTF8.search(line) is None, f"{file}, line {number}: not UTF-8; convert the file to UTF-8.")
        yield number, line


def read_folder(path: Path, split: str) -> list[Row]:
    """A data set written by `save_to_disk`, or a folder of <split>.jsonl or <split>.parquet files."""
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        import datasets

        try:
            saved = datasets.load_from_disk(str(path))
        except (OSError, ValueError, KeyError) as error:
            raise SettingError(
                f"data folder {path}: its saved data set is not complete ({error!r}); save it again."
            ) from error
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise unknown(f"split of {path}", split, saved)
            saved = saved[split]
        return list(saved)
    for file in (path / f"{split}.jsonl", path / f"{split}.parquet"):
        if file.exists():
            return read_file(file)
    splits = sorted(file.stem for file in path.iterdir() if file.suffix in (".jsonl", ".parquet"))
    if splits:
        raise unknown(f"split of {path}", split, splits)
    raise SettingError(f"data folder {path}: holds no .jsonl or .parquet files and no saved Hugging Face data set.")


def read_hub(path: str, split: str, config: str | None = None, files: str | None = None) -> Iterable[Row]:
    offline_if_unreachable()
    import datasets

    arguments: dict[str, Any] = {"path": path, "name": config, "split": split}
    if files is not None:
        arguments = files_on_hub(path, split, files)
    try:
        return datasets.load_dataset(**arguments)
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        raise SettingError(f"data {path!r} (split {split!r}) cannot be loaded from the hub: {error}") from error


def files_on_hub(path: str, split: str, files: str) -> dict[str, Any]:
    """Arguments of `load_dataset` for files of a repository, whatever loading script or configuration it has."""
    name = files.replace("{split}", split)
    builder = "parquet" if name.endswith(".parquet") else "json"
    return {"path": builder, "data_files": {split: f"hf://datasets/{path}/{name}"}, "split": split}


def generate_reasoning_gym(task: str, size: int, seed: int, options: Mapping[str, Any]) -> list[Row]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise SettingError(f"data reasoning-gym:{task}: run pip install 'alula[reasoning-gym]' first.") from error
    if task not in DATASETS:
        raise unknown("reasoning-gym task", task, DATASETS)
    try:
        return list(reasoning_gym.create_dataset(task, size=size, seed=seed, **options))
    except (TypeError, AssertionError) as error:
        raise SettingError(f"data reasoning-gym:{task}: {error}.") from error
