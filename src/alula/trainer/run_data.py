"""The examples of a run: those to train on, and the held-out sets."""

from dataclasses import replace
from typing import Any

from alula.config.run import RunConfig
from alula.data import Dataset, Example, prepare
from alula.data.load import load_source
from alula.errors import require
from alula.mismatch.tail import MIN_PROMPTS
from alula.rewards.scoring import distinct

Data = tuple[Dataset, tuple[Dataset, ...]]
"""Training examples, and the held-out sets."""


def split_data(config: RunConfig) -> Data:
    """(training, held-out) examples. The held-out sets come from `eval.data`, or one is split off, or there is none."""
    training, held_out = _split(config)
    if config.distill and config.distill.move and config.distill.move.at is None:
        measured = len(move_prompts(config, held_out[0] if held_out else training))
        require(
            measured >= MIN_PROMPTS,
            f"distill.move: there are {measured} held-out prompts, and a tail that decides needs at least "
            f"{MIN_PROMPTS}; raise eval.size, or set move.at.",
        )
    return training, held_out


def move_prompts(config: RunConfig, prompts: Dataset) -> list[Example]:
    """Those that `distill.move` measures its candidate on."""
    move = config.distill.move if config.distill else None
    return [*prompts.take(min(len(prompts), move.prompts))] if move else []


def _split(config: RunConfig) -> Data:
    training, size = load_source(config.data, training=True), config.eval.size
    if not config.eval.every:
        return training, ()
    if config.eval.data:
        sets = [load_held_out(config, index) for index in range(len(config.eval.data))]
        names = distinct([dataset.name for dataset in sets])
        return training, tuple(replace(dataset, name=name) for dataset, name in zip(sets, names))
    require(
        size < len(training),
        f"eval.size={size}: must be below the number of training examples ({len(training)}); lower it, name other "
        "data in eval.data, or set eval.every=0.",
    )
    training, held_out = training.split(size, config.data.seed)
    return training, (held_out,)


def load_held_out(config: RunConfig, index: int) -> Dataset:
    """The examples of one set of `eval.data`."""
    sources, size = config.eval.data, config.eval.size
    held_out = load_source(sources[index], "eval.data" if len(sources) == 1 else f"eval.data[{index}]")
    return held_out.take(size, seed=0) if size < len(held_out) else held_out


def load_data(config: RunConfig, tokenizer: Any) -> Data:
    """(training, held-out) examples with token ids."""
    return tokenized(config, split_data(config), tokenizer)


def tokenized(config: RunConfig, data: Data, tokenizer: Any) -> Data:
    """The same data with token ids."""
    d = config.data

    def with_ids(dataset: Dataset) -> Dataset:
        return prepare(
            dataset,
            tokenizer,
            chat=d.chat,
            system=d.system,
            max_prompt_tokens=d.max_prompt_tokens,
            template_options=d.template_options,
        )

    training, held_out = data
    return with_ids(training), tuple(map(with_ids, held_out))
