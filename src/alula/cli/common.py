"""Helpers that several commands share. They import torch only when called, so that `alula --help` stays instant."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from alula.cpus import set_threads
from alula.errors import SettingError, require

if TYPE_CHECKING:
    from alula.data import Dataset
    from alula.engine.engine import Engine
    from alula.models.load import LoadedModel
    from alula.sparsity.evict.query_statistics import QueryStatistics
    from alula.sparsity.policy import Sparsity


def shared_page(policies: "Sequence[Sparsity]", default: int = 16) -> int:
    """The page size that the policies share: a selector's block size, or else `default`."""
    pages = {policy.select.block for policy in policies if policy.select}
    require(len(pages) < 2, f"--sparsity: block sizes {sorted(pages)} need different page sizes; use one call each.")
    return next(iter(pages), default)


def check_output_file(out: Path | None, option: str = "--out") -> None:
    """Create the folder of `out`, and raise before the work starts if the file cannot be written."""
    if out is None:
        return
    new = not os.path.lexists(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if new or out.is_file() or out.is_dir():  # opening a pipe would wait for its reader
            out.open("a").close()
        if new:
            out.unlink()
    except OSError as error:
        raise SettingError(f"{option} {out}: cannot be written ({error.strerror}); choose another file.") from None


def warn_other_model(policies: "Sequence[Sparsity]", engine: "Engine") -> None:
    """Print a note for every schedule that was planned for another model."""
    from alula.trainer.start_warnings import OTHER_MODEL_ADVICE, schedules_of_other_models

    for message in dict.fromkeys(schedules_of_other_models(policies, engine.model.config)):
        typer.echo(f"note: {message} {OTHER_MODEL_ADVICE}", err=True)


def task_options(given: Sequence[str] | None) -> dict[str, Any]:
    """The options of generated tasks, from the texts `name=value` of --option."""
    from alula.config.load import parse_yaml

    options = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        require(bool(equals and name), f"--option {text!r}: write name=value.")
        options[name] = parse_yaml(value, f"--option {text!r}")
    return options


def load_model_and_prompts(
    model: str,
    data: Sequence[str],
    split: str | None,
    data_dir: Path | None,
    prompt: str | None,
    chat: bool | None,
    options: Sequence[str] | None,
    device: str | None,
    dtype: str | None,
    residual: str | None,
    seed: int,
) -> "tuple[LoadedModel, Dataset]":
    """The model with its tokenizer (a bare shape takes the first task's), and the tokenized prompts of all `data`."""
    from alula.data import Dataset, prepare
    from alula.data import load as load_data
    from alula.data.load import settings_per_source
    from alula.data.load_tokenizer import TASK, attach_tokenizer, load_tokenizer
    from alula.models.load import SHAPE, load_model

    of_task = task_options(options)
    settings = {"split": split, "data_dir": data_dir, "prompt": prompt, "options": of_task}
    per_source = settings_per_source(data, settings)
    sets = [load_data(one, answer="", seed=seed, **own) for one, own in zip(data, per_source)]
    loaded = load_model(model, device=device, dtype=dtype, seed=seed, residual=residual)
    set_threads(loaded.model)
    if loaded.tokenizer is None and data[0].startswith(TASK):
        loaded = attach_tokenizer(loaded, load_tokenizer(data[0], of_task), resize=model.startswith(SHAPE))
    require(loaded.tokenizer is not None, f"model {model!r} has no tokenizer, which prompts need; use another model.")
    prepared = [prepare(one, loaded.tokenizer, chat=chat) for one in sets]
    return loaded, Dataset(tuple(example for one in prepared for example in one), ", ".join(data))


class Engines:
    """Holds one engine at a time, and rebuilds it for another page size or KV dtype."""

    def __init__(
        self,
        loaded: "LoadedModel",
        length: int,
        kv_dtype: str | None,
        kv_memory: str | None,
        max_rows: int,
        adapter: Path | None,
    ) -> None:
        self.loaded, self.length, self.kv_dtype, self.kv_memory = loaded, length, kv_dtype, kv_memory
        self.max_rows, self.adapter = max_rows, adapter
        self.engine: Engine | None = None
        self.statistics: QueryStatistics | None = None
        """Statistics of the model's queries, passed on to every engine."""

    def with_page(self, page: int) -> "Engine":
        from alula.engine.engine import Engine

        if self.engine is None or (self.engine.page, self.engine.geometry.kv_dtype) != (page, self.kv_dtype):
            if self.engine is not None:
                self.engine.sleep()  # frees its memory for the next one
            self.engine = Engine(
                self.loaded,
                page=page,
                kv_dtype=self.kv_dtype,
                kv_memory=self.kv_memory,
                max_rows=self.max_rows,
                max_length=self.length + page,
                sparse_adapter=self.adapter,
            )
            if self.statistics is not None:
                self.engine.query_statistics = self.statistics
        return self.engine

    def measure_queries(self, file: Path | None, text: "Callable[[Engine], Sequence[Sequence[int]]]") -> None:
        """Load the statistics of the model's queries from `file`, or measure them on a text, that an engine may have to
        write, and write that file."""
        from alula.sparsity.evict.query_statistics import QueryStatistics

        if file is not None and file.exists():
            self.statistics = QueryStatistics.load(file)
            if self.engine is not None:
                self.engine.query_statistics = self.statistics
            return
        engine = self.engine or self.with_page(16)
        self.statistics = engine.measure_queries(text(engine))
        if file is not None:
            self.statistics.save(file)
            typer.echo(f"{file}: statistics of the model's queries.")
