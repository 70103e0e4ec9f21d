"""What `--check` learns from the data, the hub's aside: how much there is, how long the prompts are, and whether the
rewards can grade it."""

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from alula.config import RunConfig, Source
from alula.data import Dataset
from alula.data.load import is_path, on_hub
from alula.errors import require
from alula.model import SHAPE, TOKENIZER_FILES, find_pretrained
from alula.rewards.scoring import try_out
from alula.rl.setup import TASK, named_tokenizer, split_data, tokenized

Data = tuple[Dataset, Dataset | None]
"""Training and held-out examples."""


def read_data(config: RunConfig) -> Data | None:
    """None where some of it is on the hub; what is here is read all the same, so that a wrong name or field is found
    now."""
    if not any(map(remote, sources(config))):
        return split_data(config)
    for one in sources(config):
        if not remote(one):
            one.load()
    return None


def sources(config: RunConfig) -> list[Source]:
    return [config.data, *([config.eval.data] if config.eval.every and config.eval.data else [])]


def remote(one: Source) -> bool:
    return on_hub(one.source, one.data_dir)


def describe_data(config: RunConfig, data: Data | None) -> str:
    if data is None:
        names = dict.fromkeys(one.source for one in sources(config) if remote(one))
        return f"{', '.join(names)}: on the hub, not looked at"
    training, held_out = data
    evaluated = f", {len(held_out):,} to evaluate on" if held_out else ""
    return f"{len(training):,} examples to train on{evaluated}"


def try_rewards(config: RunConfig, data: Data | None) -> None:
    """On the data itself: a field that a reward misses is found before the first rollout."""
    if data is not None:
        try_out(config.rewards.specs(), [example.record() for example in data[0]], config.rewards.timeout)


def tokenizer_at_hand(config: RunConfig) -> Any | None:
    """The run's tokenizer, where the hub need not be asked for it."""
    name, source = config.model.tokenizer, config.model.source
    folder = Path(source).expanduser()
    own = not source.startswith(SHAPE) and (
        not folder.is_dir() or any((folder / file).exists() for file in TOKENIZER_FILES)
    )
    if name is None and not own and config.data.source.startswith(TASK):
        name = config.data.source
    if name and (name.startswith(TASK) or is_path(name) or os.path.exists(name)):
        return named_tokenizer(name, config.data.options if config.data.source == name else {})
    if name is None and not own:
        return None
    try:
        place = {"pretrained_model_name_or_path": name} if name else find_pretrained(source)
        return AutoTokenizer.from_pretrained(**place, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError):  # whoever needs it will say what is wrong with it
        return None


def longest_prompt(config: RunConfig, data: Data | None, tokenizer: Any | None) -> int | None:
    """In tokens, of the prompts that the run would take."""
    if data is None or tokenizer is None:
        return None
    sets = [tokenized(config, dataset, tokenizer) for dataset in data if dataset is not None]
    return max(len(example.prompt_ids or ()) for dataset in sets for example in dataset)


def check_positions(config: RunConfig, positions: int, prompt: int | None) -> None:
    """Refuse answers that the model has no positions for, with the longest prompt in front where it is known."""
    named = [("sampling.max_new_tokens", config.sampling.max_new_tokens)]
    if config.eval.every and config.eval.max_new_tokens:
        named.append(("eval.max_new_tokens", config.eval.max_new_tokens))
    setting, answer = max(named, key=lambda one: one[1])
    longest, before = (prompt or 1) + answer, f" after the longest prompt of {prompt} tokens" if prompt else ""
    require(
        longest <= max(positions, config.engine.max_length or 0),
        f"{setting}={answer}{before}: model.source={config.model.source!r} has max_position_embeddings={positions}; "
        f"lower it{', or leave longer prompts out with data.max_prompt_tokens' if prompt else ''}.",
    )
