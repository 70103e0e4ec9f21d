"""`alula train --check` of an environment: its name and options, its first prompt, and the chat template."""

import math
from collections.abc import Iterator
from typing import Any

from alula.config.run import RunConfig
from alula.data import Dataset
from alula.environments.calls import Calls
from alula.environments.conversation import as_messages
from alula.environments.registry import load_environment
from alula.errors import require
from alula.files import count_text
from alula.rollouts.build import build_conversation


def check_environment(config: RunConfig, training: Dataset | None, tokenizer: Any | None) -> Iterator[tuple[str, str]]:
    """Rows for the table of work. Raises for an environment that cannot be built or reset on the first example; data
    and tokenizer are None if they are not on this machine."""
    settings = config.environment
    if settings is None:
        return
    build = load_environment(settings.use, settings.options)
    limits = f"at most {count_text(settings.max_turns, 'turn')} and {settings.max_tokens:,} tokens per episode"
    yield "environment", f"{settings.use}: {limits}, {settings.timeout:g} s per call"
    if training is None:
        return
    calls = Calls(settings.timeout)

    def reset() -> Any:
        environment = build()
        try:
            return calls.resolve(environment.reset(training[0].record(), config.seed))
        finally:
            if close := getattr(environment, "close", None):
                calls.resolve(close())

    calls.start("reset", reset)
    while not (outcomes := calls.poll(math.inf)):
        pass
    require(
        outcomes[0].failure is None,
        f"environment.use={settings.use!r} cannot be reset on the first example ({outcomes[0].failure}); correct it.",
    )
    messages = as_messages(outcomes[0].value)
    if tokenizer is None:
        return
    conversation = build_conversation(config, tokenizer)
    prompt = len(conversation.prompt(messages))
    require(
        prompt < settings.max_tokens,
        f"environment.max_tokens={settings.max_tokens}: the first prompt alone has {prompt} tokens; raise it.",
    )
    if change := conversation.rewrites_history():
        yield (
            "chat template",
            f"rewrites earlier turns: {change}. Training keeps all turns as they were sampled, so a server that "
            "applies the template shows the model other contexts",
        )
