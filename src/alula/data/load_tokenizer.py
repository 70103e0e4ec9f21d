"""Tokenizers by name (hub, folder or generated task), and attaching one to a model."""

import os
from dataclasses import replace
from typing import Any

from transformers import AutoTokenizer

from alula.data.load import is_path
from alula.errors import SettingError, first_line, require
from alula.models.load import LoadedModel
from alula.models.stop_tokens import stop_token_ids

TASK = "task:"


def load_tokenizer(name: str, options: dict[str, Any]) -> Any:
    """The tokenizer of a hub id, a folder, or `task:<name>`, a generated task with these options."""
    if name.startswith(TASK):
        from alula.data.tasks import build
        from alula.data.tasks.tokenizer import task_tokenizer

        return task_tokenizer(build(name.removeprefix(TASK), **options))
    folder = os.path.expanduser(name)
    require(
        os.path.exists(folder) or not is_path(name),
        f"model.tokenizer={name!r}: no such folder; name an existing one, a hub id or {TASK}<name>.",
    )
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingError(f"model.tokenizer={name!r} cannot be loaded: {first_line(error)}.") from error


def attach_tokenizer(loaded: LoadedModel, tokenizer: Any, *, resize: bool) -> LoadedModel:
    """The model with this tokenizer and its special tokens. `resize` shrinks a random model's vocabulary to it."""
    model = loaded.model
    require(
        len(tokenizer) <= model.config.vocab_size,
        f"the tokenizer has {len(tokenizer)} tokens and the model only {model.config.vocab_size}; use another one.",
    )
    if resize:
        model.resize_token_embeddings(len(tokenizer))
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for holder in (model.config, model.generation_config):
            setattr(holder, role, getattr(tokenizer, role))
    return replace(loaded, tokenizer=tokenizer, eos_ids=stop_token_ids(tokenizer=tokenizer))
