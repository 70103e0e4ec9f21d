"""Loads a data set by name: a file, a folder, a benchmark, a hub id or a generator."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from alula.data import sources
from alula.data.benchmarks import BENCHMARKS, Benchmark, hub_split
from alula.data.dataset import Dataset
from alula.data.mapping import FieldMapping
from alula.errors import SettingError, in_section, require, unknown
from alula.settings import Source

GENERATED = 1000
"""Number of generated examples if no size is given."""
FILES = (".jsonl", ".parquet")
REASONING_GYM = FieldMapping("{question}\nPut your final answer between <answer> and </answer>.", "{answer}")


def load_source(settings: Source, section: str = "data", *, training: bool = False) -> Dataset:
    """The examples that a section of a recipe names; with `training`, of a benchmark's train split. Errors name the
    section's settings."""
    values = {name: getattr(settings, name) for name in Source.model_fields}
    with in_section(section, f"{section}.source={settings.source!r}"):
        return load(**values | ({"split": training_split(settings)} if training else {}), section=section)


def training_split(settings: Source) -> str | None:
    """The split to train on. Raises for a benchmark's test split."""
    known = BENCHMARKS.get(settings.source)
    return settings.split if known is None else known.training_split(settings.split)


def load(
    source: str | PathLike[str],
    *,
    split: str | None = None,
    data_dir: str | Path | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    answer_form: str | None = None,
    size: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    section: str = "data",
) -> Dataset:
    """Load the examples of `source`:

    - `task:<name>` or `reasoning-gym:<task>`: `size` examples generated from `seed`, with `options` for the generator;
    - `verifiers:<environment>`: the first `size` tasks of that package's environment, with `options` of its taskset;
    - `gsm8k`, `math500` and the other names of `alula.data.benchmarks`: `<data_dir>/<name>/<split>.jsonl`, or the
      hub's copy without `data_dir`;
    - a .jsonl or .parquet file, a folder of them, or a folder written by `datasets.save_to_disk`;
    - any data set of the Hugging Face hub: `owner/name` or `owner/name:configuration`.

    `prompt`, `answer` (templates with {field}s) and `answer_form` override the source's mapping; answer="" means
    data without answers. `size` keeps the first rows of a stored set. `section` is the settings' name in errors.
    Settings that a source does not take raise.
    """
    require(size is None or size >= 1, f"size={size}: ask for at least one example.")
    source = fspath(source)
    kind, _, rest = source.partition(":")
    generated = is_generated(source)
    if not generated:
        check_exists(source)  # before any other error about this source
    require(
        generated or not options,
        f"{section}.options={sorted(options or ())}: only generated data takes options; leave them out for {source}.",
    )
    if generated or is_file(source):
        what = "generated data" if generated else "a single file"
        reject({"split": split, "data_dir": data_dir}, what, source, section)
    if generated and kind == "task":
        mapped = {"prompt": prompt, "answer": answer or None, "answer_form": answer_form}
        reject(mapped, "a generated task", source, section)
        from alula.data.tasks import build

        return build(rest, **dict(options or {})).dataset(size or GENERATED, seed)
    rows: Iterable[sources.Row]
    if kind == "verifiers":
        from alula.data.verifiers_tasks import task_rows

        rows, mapping = task_rows(rest, size, options or {}, f"{section}.source"), FieldMapping(answer=None)
    elif generated:
        rows = sources.generate_reasoning_gym(rest, size or GENERATED, seed, options or {})
        mapping = REASONING_GYM
    else:
        rows, mapping = stored(source, split, data_dir)
    mapping = override(mapping, prompt, answer, answer_form)
    name = Path(source).stem if Path(source).suffix in FILES else source
    known = BENCHMARKS.get(source)
    if known is None or known.convert is None:
        return mapping.apply(islice(rows, size), name, source, section)
    kept, dropped = convert(known, rows, size)
    dataset = mapping.apply(kept, name, source, section)
    return replace(dataset, dropped=dataset.dropped | ({"no tests": dropped} if dropped else {}))


def is_generated(source: str) -> bool:
    kind, _, rest = source.partition(":")
    return kind in ("task", "reasoning-gym", "verifiers") and rest != ""


def is_file(source: str) -> bool:
    return source not in BENCHMARKS and Path(source).expanduser().is_file()


def settings_per_source(sources: Sequence[str], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings that each of several sources takes. One that none takes goes to all, which raise."""

    def takes(source: str, name: str) -> bool:
        if name == "options":
            return is_generated(source)
        if name in ("split", "data_dir"):
            return not is_generated(source) and not is_file(source)
        return not source.startswith("task:")

    unused = {name for name in settings if not any(takes(source, name) for source in sources)}
    return [{name: v for name, v in settings.items() if name in unused or takes(one, name)} for one in sources]


def reject(settings: Mapping[str, Any], kind: str, source: str, section: str) -> None:
    """Raise for settings that this kind of source does not take."""
    for name, value in settings.items():
        require(value is None, f"{section}.{name}={value}: {kind} takes no {name}; leave it out for {source}.")


def convert(benchmark: Benchmark, rows: Iterable[sources.Row], size: int | None) -> tuple[list[dict[str, Any]], int]:
    """The first `size` rows of a coding benchmark with tests, and the number of rows without."""
    assert benchmark.convert is not None
    kept: list[dict[str, Any]] = []
    dropped = 0
    for number, row in enumerate(rows, 1):
        if len(kept) == size:
            break
        try:
            converted = benchmark.convert(row)
        except (KeyError, TypeError, ValueError, SyntaxError, UnpicklingError) as error:
            raise SettingError(
                f"data {benchmark.name}, row {number}: not in the published form ({error!r}); check the file."
            ) from error
        if converted is None:
            dropped += 1
        else:
            kept.append(converted)
    return kept, dropped


def check_exists(source: str) -> None:
    """Raise for a file or folder that does not exist, if the name can only be a path."""
    exists = Path(source).expanduser().exists()
    require(exists or not is_path(source), f"data {source!r} does not exist; check the path.")


def is_path(source: str) -> bool:
    """Whether the name can only be a file or folder, existing or not."""
    return Path(source).suffix in FILES or source.startswith(("/", "./", "../", "~")) or source.count("/") > 1


def on_hub(source: str, data_dir: str | Path | None = None) -> bool:
    """Whether `load` would read from the Hugging Face hub."""
    if source in BENCHMARKS:
        return data_dir is None
    path = Path(source).expanduser()
    local = path.exists() or is_path(source) or source.startswith(("task:", "reasoning-gym:", "verifiers:"))
    return source.count("/") == 1 and not local


def stored(source: str, split: str | None, data_dir: str | Path | None) -> tuple[Iterable[sources.Row], FieldMapping]:
    path = Path(source).expanduser()
    if source in BENCHMARKS and not path.suffix:
        return benchmark(source, split, data_dir)
    if path.is_file():
        return sources.read_file(path), FieldMapping()
    if path.is_dir():
        return sources.read_folder(path, split or "train"), FieldMapping()
    if source.count("/") != 1:
        raise unknown("data set", source, BENCHMARKS)
    name, _, config = source.partition(":")
    return sources.read_hub(name, split or "train", config or None), FieldMapping()


def benchmark(name: str, split: str | None, data_dir: str | Path | None) -> tuple[Iterable[sources.Row], FieldMapping]:
    known = BENCHMARKS[name]
    if data_dir is None:
        hub = hub_split(known, split)
        return sources.read_hub(hub.path, hub.split, hub.config, hub.files), known.mapping(from_hub=True)
    folder = Path(data_dir).expanduser() / name
    require(folder.is_dir(), f"data_dir={str(data_dir)!r} has no folder {name!r}; leave data_dir out to use the hub.")
    together = folder / f"{name}.jsonl"
    if known.split_of and together.exists():
        rows = [row for row in sources.read_file(together) if known.split_of(row) == (split or known.split)]
        return rows, known.mapping(from_hub=False)
    return sources.read_folder(folder, split or known.split), known.mapping(from_hub=False)


def override(mapping: FieldMapping, prompt: str | None, answer: str | None, answer_form: str | None) -> FieldMapping:
    if prompt is not None:
        mapping = replace(mapping, prompt=prompt)
    if answer is not None:
        mapping = replace(mapping, answer=answer or None)
    if answer_form is not None:
        mapping = replace(mapping, answer_form=answer_form)
    return mapping
