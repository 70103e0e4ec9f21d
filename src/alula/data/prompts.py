"""Prompts to tokens: chat template, system prompt, length limit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from alula.data.dataset import Dataset, Example, Messages
from alula.errors import SettingError, require
from alula.models.chat_template import apply_chat_template, check_variables


def prepare(
    dataset: Dataset,
    tokenizer: Any,
    *,
    chat: bool | None = None,
    system: str | None = None,
    max_prompt_tokens: int | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """The same examples with `prompt_ids`, without empty ones and those longer than `max_prompt_tokens` (both counted
    in `dropped`).

    `chat` applies the tokenizer's chat template (default: if it has one), with a generation prompt at the end and
    `system` in front; `template_options` go to the template, such as enable_thinking=False. Without chat, a prompt is
    tokenized as it is, with the tokenizer's special tokens.
    """
    use_chat = tokenizer.chat_template is not None if chat is None else chat
    if use_chat and tokenizer.chat_template is None:
        raise SettingError("chat=true, but the tokenizer has no chat template; set chat=false or use another model.")
    require(use_chat or system is None, "system= needs a chat template; put the text into the prompt template.")
    if use_chat:
        check_variables(tokenizer, template_options or (), "data.template_options")
        texts = [
            apply_chat_template(
                tokenizer,
                messages(example, system),
                f"data {dataset.name}, prompt {example.prompt!a:.80}",
                tokenize=False,
                **(template_options or {}),
            )
            for example in dataset
        ]
    else:
        texts = [plain(example) for example in dataset]
    # A chat template adds special tokens itself; adding them again would double the first one.
    ids = tokenizer(texts, add_special_tokens=not use_chat)["input_ids"]
    if dataset.name.startswith("task:"):
        check_known_symbols(dataset, tokenizer, ids)
    filled = [
        replace(example, prompt_ids=tuple(row)) for example, row in zip(dataset, ids) if row and has_text(example)
    ]
    require(
        len(filled) > 0,
        f"data {dataset.name}: all {len(dataset)} prompts are empty; name another field with data.prompt.",
    )
    kept = [
        example for example in filled if max_prompt_tokens is None or len(example.prompt_ids or ()) <= max_prompt_tokens
    ]
    require(
        len(kept) > 0,
        f"max_prompt_tokens={max_prompt_tokens}: all {len(filled)} prompts are longer; raise it.",
    )
    dropped = dict(dataset.dropped)
    if len(filled) < len(dataset):
        dropped["empty prompt"] = len(dataset) - len(filled)
    if len(kept) < len(filled):
        dropped[f"prompt over {max_prompt_tokens} tokens"] = len(filled) - len(kept)
    return Dataset(tuple(kept), dataset.name, dropped)


def check_known_symbols(dataset: Dataset, tokenizer: Any, ids: Sequence[Sequence[int]]) -> None:
    """Raise for symbols of a generated task that the tokenizer does not know: scores would be meaningless."""
    unknown = tokenizer.unk_token_id
    for example, row in zip(dataset, ids):
        if unknown is None or unknown not in row:
            continue
        for word in plain(example).split():  # not the words that a chat template adds
            if unknown in tokenizer(word, add_special_tokens=False)["input_ids"]:
                raise SettingError(
                    f"data {dataset.name}: the model's tokenizer does not know the symbol {word!r}; give the "
                    "task options that the model was trained with: data.options in a recipe, --option in a command."
                )


def has_text(example: Example) -> bool:
    """Whether a person wrote anything; a template and special tokens do not count."""
    turns = [{"content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
    return any(str(turn.get("content") or "").strip() for turn in turns)


def messages(example: Example, system: str | None) -> Messages:
    turns = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
    return [{"role": "system", "content": system}, *turns] if system else turns


def plain(example: Example) -> str:
    if not isinstance(example.prompt, str):
        raise SettingError("the prompts are chat messages, but chat is off or the tokenizer has no chat template.")
    return example.prompt
