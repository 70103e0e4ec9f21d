"""Builds what generates a run's rollouts from its settings: model, engine, episodes."""

import math
from importlib.util import find_spec
from typing import Any

import torch

from alula.config.run import RunConfig
from alula.data.load_tokenizer import TASK, attach_tokenizer, load_tokenizer
from alula.engine.engine import Engine
from alula.environments.conversation import Conversation
from alula.environments.episodes import Episodes
from alula.environments.registry import load_environment
from alula.errors import in_section, require
from alula.models.load import SHAPE, LoadedModel, load_model
from alula.models.lora import Adapter


def check_backend(config: RunConfig) -> None:
    """Raise if the package behind `rollouts.backend` is not installed."""
    require(
        config.rollouts.backend == "local" or find_spec("ray") is not None,
        "rollouts.backend=ray: Ray is not installed; pip install 'alula[ray]', or set rollouts.backend=local.",
    )


def load_policy(config: RunConfig, device: torch.device) -> LoadedModel:
    """The model with its tokenizer: `model.tokenizer`, the model's own, or that of the generated task."""
    m = config.model
    with in_section("model", f"model.source={m.source!r}"):
        loaded = load_model(m.source, device=device, dtype=m.dtype, seed=config.seed, residual=m.residual)
    name = m.tokenizer
    if name is None and loaded.tokenizer is None and config.data.source.startswith(TASK):
        name = config.data.source
    if name is not None:
        options = config.data.options if config.data.source == name else {}
        setting = "model.tokenizer" if m.tokenizer else "data.source"
        with in_section("model", f"{setting}={name!r}"):
            loaded = attach_tokenizer(loaded, load_tokenizer(name, options), resize=m.source.startswith(SHAPE))
    require(loaded.tokenizer is not None, f"model.source={m.source!r} has no tokenizer; name one in model.tokenizer.")
    return loaded


def build_engine(config: RunConfig, loaded: LoadedModel, longest: int, adapter: Adapter | None = None) -> Engine:
    """The engine of a run, or of one of its workers. `longest` is the longest sequence of the run."""
    e = config.engine
    with in_section("engine"):
        return Engine(
            loaded,
            page=config.page,
            kv_memory=e.kv_memory,
            kv_dtype=e.kv_dtype,
            max_rows=e.max_rows,
            max_length=e.max_length or longest,
            lookahead=e.lookahead,
            swap_memory=e.swap_memory,
            session_timeout=math.inf,  # episodes close their sessions themselves
            buckets=e.buckets,
            graphs=e.graphs,
            compiled=e.compiled,
            sparse_adapter=adapter,
        )


def build_conversation(config: RunConfig, tokenizer: Any) -> Conversation:
    d = config.data
    return Conversation(tokenizer, chat=d.chat, system=d.system, template_options=d.template_options)


def build_episodes(config: RunConfig, engine: Engine) -> Episodes | None:
    """What plays episodes, if the run has an environment."""
    settings = config.environment
    if settings is None:
        return None
    build = load_environment(settings.use, settings.options)
    return Episodes(settings, build, engine, build_conversation(config, engine.tokenizer))
