"""What `--check` learns from the data, the hub's aside: how much there is, how long the prompts are, and whether the
rewards can grade it."""

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig

from alula.config import RunConfig, Source
from alula.data.load import is_path, on_hub
from alula.errors import require
from alula.model import SHAPE, TOKENIZER_FILES, find_pretrained
from alula.rewards.scoring import try_out
from alula.rl.room import longest_sequence, positions_of
from alula.rl.setup import TASK, Data, named_tokenizer, split_data, tokenized


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


def read_by(tokenizer: Any | None, config: RunConfig, data: Data | None) -> Data | None:
    """The data with the prompts' tokens, as the run would take it."""
    return None if data is None or tokenizer is None else tokenized(config, data, tokenizer)


def longest_prompt(data: Data | None) -> int | None:
    """In tokens."""
    if data is None:
        return None
    return max(len(example.prompt_ids or ()) for dataset in data if dataset for example in dataset)


def check_positions(config: RunConfig, model: PreTrainedConfig, data: Data | None) -> None:
    """Refuse sequences that the model has no positions for; of prompts that are not known at least the answers."""
    if data is not None:
        longest_sequence(config, model, *data)
        return
    answer = config.sampling.max_new_tokens
    positions = positions_of(model)
    require(
        answer < max(positions, config.engine.max_length or 0),
        f"sampling.max_new_tokens={answer}: model.source={config.model.source!r} has "
        f"max_position_embeddings={positions}; lower it, or set engine.max_length if the model can read so far.",
    )
