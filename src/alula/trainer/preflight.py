"""Pre-flight checks of `alula train --check`: problems that a run would meet hours later are reported before its first
step. Data, rewards, tokenizer and model configuration are read as far as they are on this machine.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from alula.config.run import RunConfig
from alula.data import Dataset
from alula.data.load import is_path, load_source, on_hub
from alula.data.load_tokenizer import TASK, load_tokenizer
from alula.errors import SettingError, in_section, require
from alula.files import count_text
from alula.models.load import SHAPE, TOKENIZER_FILES, UNREADABLE, find_pretrained, load_failure
from alula.models.lora import Adapter, check_fits
from alula.models.shapes import SHAPES, shape
from alula.models.supported import check_config
from alula.rewards.scoring import TRIAL_EXAMPLES, try_out
from alula.run.checkpoint import Checkpoints, Resume
from alula.run.run_dir import check_folder
from alula.run.run_log import left_out
from alula.settings import Source
from alula.trainer.build import first_adapter
from alula.trainer.run_data import Data, load_held_out, split_data, tokenized


class Preflight:
    """The data of a run, read as far as it is on this machine, for `--check`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.sources = config.eval.data if config.eval.every else []
        self.training, self.held_out = self._read()
        """Examples of either kind, those that the run will use as far as it is known; None for those on the hub."""
        self.tokenizer = None if self.training is None else local_tokenizer(config)
        self.tokenized: Data | None = None
        """The data with the tokens of its prompts; None without training data or a tokenizer on this machine."""
        if self.training is not None and self.tokenizer is not None:
            read = tuple(dataset for dataset in self.held_out if dataset is not None)
            self.tokenized = tokenized(config, (self.training, read), self.tokenizer)
            self.training, read = self.tokenized
            in_order = iter(read)
            self.held_out = [None if dataset is None else next(in_order) for dataset in self.held_out]

    def _read(self) -> tuple[Dataset | None, Sequence[Dataset | None]]:
        config = self.config
        if not any(map(is_remote, [config.data, *self.sources])):
            return split_data(config)
        training = None if is_remote(config.data) else load_source(config.data, training=True)
        sources = enumerate(self.sources)
        return training, [None if is_remote(source) else load_held_out(config, index) for index, source in sources]

    def describe_data(self) -> Iterator[tuple[str, str]]:
        """Names and texts of the data's rows in the table of work."""
        yield "data", described(self.config.data, self.training, "to train on")
        for source, dataset in zip(self.sources, self.held_out):
            yield "held-out data", described(source, dataset, "to evaluate on")
        if self.config.eval.every and not self.sources:
            size, dropped = self.config.eval.size, ""
            for dataset in filter(None, self.held_out):
                size, dropped = len(dataset), left_out(dataset)
            yield "held-out data", f"{count_text(size, 'example')} of the same, set aside{dropped}"

    def try_rewards(self) -> Iterator[tuple[str, str]]:
        """Grade the data itself, and describe the grades as rows of the table of work. A field that a reward lacks is
        reported before the first rollout."""
        named = [("reference answers", self.training)]
        named += [("  held-out", dataset) for dataset in (self.held_out if self.sources else ())]
        for name, dataset in named:
            if dataset is not None:
                grades = try_out(self.config.rewards, [example.record() for example in dataset])
                if grades and isinstance(dataset[0].answer, str | int | float):  # not the tests of a coding task
                    tried = min(TRIAL_EXAMPLES, len(dataset))
                    listed = ", ".join(f"{reward} {grade:.2g}" for reward, grade in grades.items())
                    hint = "" if any(grades.values()) else "; none is accepted as it is, see docs/reward-stays-0.md"
                    yield name, f"mean grade of the first {tried}: {listed}{hint}"


def described(source: Source, dataset: Dataset | None, purpose: str) -> str:
    """A source of data in the table of work."""
    has_splits = source.split is not None and not Path(source.source).expanduser().is_file()
    name = f"{source.source} ({source.split})" if has_splits else source.source
    if dataset is None:
        return f"{name}: on the hub, not read"
    return f"{name}: {count_text(len(dataset), 'example')} {purpose}{left_out(dataset)}"


def is_remote(source: Source) -> bool:
    return on_hub(source.source, source.data_dir)


def local_tokenizer(config: RunConfig) -> Any | None:
    """The run's tokenizer, or None if it would have to be downloaded."""
    name, source = config.model.tokenizer, config.model.source
    folder = Path(source).expanduser()
    model_has_one = not source.startswith(SHAPE) and (
        not folder.is_dir() or any((folder / file).exists() for file in TOKENIZER_FILES)
    )
    if name is None and not model_has_one and config.data.source.startswith(TASK):
        name = config.data.source
    if name and (name.startswith(TASK) or is_path(name) or os.path.exists(name)):
        setting = "model.tokenizer" if config.model.tokenizer else "data.source"
        with in_section("model", f"{setting}={name!r}"):
            return load_tokenizer(name, config.data.options if config.data.source == name else {})
    if name is None and not model_has_one:
        return None
    try:
        location = {"pretrained_model_name_or_path": name} if name else find_pretrained(source)
        return AutoTokenizer.from_pretrained(**location, trust_remote_code=False, local_files_only=True)
    except (*UNREADABLE, ImportError):  # the run will report it
        return None


def load_model_config(source: str) -> PreTrainedConfig:
    """The configuration of a model without its weights: from a shape's name, a folder or the hub."""
    if source.startswith(SHAPE):
        with in_section("model", f"model.source={source!r}"):
            settings = copy.deepcopy(shape(source.removeprefix(SHAPE)))
        config: PreTrainedConfig = AutoConfig.for_model(settings.pop("model_type"), **settings)
    else:
        hint = f"check a bare shape instead: model.source={SHAPE}{nearest_shape(source)}."
        try:
            config = AutoConfig.from_pretrained(**find_pretrained(source), trust_remote_code=False)
        except SettingError as error:
            reason = str(error).removeprefix("model ").rstrip(".")
            raise SettingError(f"model.source={reason}; or {hint}") from error
        except UNREADABLE as error:
            raise SettingError(
                f"model.source={source!r}: its configuration cannot be read ({load_failure(error, source).rstrip('.')})"
                f"; name a folder on disk, or {hint}"
            ) from error
    check_config(config)
    return config


def nearest_shape(source: str) -> str:
    """The shape whose name is closest to a hub id."""
    name = source.rpartition("/")[2].lower().removesuffix("-instruct")
    return next(iter(get_close_matches(name, SHAPES, n=1, cutoff=0.0)))


def load_first_adapter(config: RunConfig, model: PreTrainedModel) -> Adapter | None:
    """The adapter that the run starts with. Raises if it is missing or does not fit the model's shape."""
    adapter = first_adapter(config)
    if config.distill is None or adapter is None:
        return None
    try:
        check_fits(model, adapter)
    except SettingError as error:
        raise SettingError(
            f"distill.adapter={config.distill.adapter!r} does not fit model.source={config.model.source!r} "
            f"({str(error).rstrip('.')}); name one that was distilled from this model."
        ) from error
    return adapter


def check_run_folder(config: RunConfig, resume: Resume) -> None:
    """Raise for a folder that the run would reject. Checksums of its checkpoints are not verified: they are large."""
    check_folder(Path(config.out), new=not resume)
    checkpoints = Checkpoints(Path(config.out) / "checkpoints")
    if resume:
        checkpoints.check_resume(resume)
        for last in checkpoints.all()[-1:]:
            check_steps_left(config, last)


def check_steps_left(config: RunConfig, checkpoint: Path) -> int:
    """The step of a checkpoint to resume from. Raises if the run is already beyond its last step."""
    step, steps = int(checkpoint.name.rpartition("-")[2]), config.steps
    require(step <= steps, f"steps={steps}: {config.out} has taken {step} already; raise it, or name another out.")
    return step
