"""Which tokens end an answer: the model's end-of-sequence tokens, and the one that ends a turn of its chat template."""

from typing import Any

from jinja2 import TemplateError


def stop_token_ids(*holders: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """End-of-sequence ids of configurations and tokenizer, and the chat template's end of turn.

    Base models need the latter: Qwen2.5's name only <|endoftext|>, and their chat template ends turns with <|im_end|>.
    """
    ids: set[int] = set()
    for holder in (*holders, tokenizer):
        eos = getattr(holder, "eos_token_id", None)
        ids.update(eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos])
    end = end_of_turn(tokenizer)
    return tuple(sorted(ids if end is None else ids | {end}))


def end_of_turn(tokenizer: Any | None) -> int | None:
    """The special token that the chat template writes after an assistant's answer, if there is one."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    answer = "an answer"
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)  # type: ignore[union-attr]
    except (TemplateError, ValueError):  # a template with roles of its own, or several templates without a default
        return None
    after = text.rpartition(answer)[2].lstrip()
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}  # type: ignore[union-attr]
    return special.get(max((token for token in special if after.startswith(token)), key=len, default=""))
