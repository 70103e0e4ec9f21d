"""Builds the parts of a run from its settings: model, data, learner, engine, monitor, distillation."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from alula.bench.ceilings import matrix_rate
from alula.config.run import RunConfig
from alula.data import Dataset, prepare
from alula.data.load import load_source
from alula.data.load_tokenizer import TASK, attach_tokenizer, load_tokenizer
from alula.distributed import World
from alula.engine.engine import Engine
from alula.environments.conversation import Conversation
from alula.environments.episodes import Episodes
from alula.environments.registry import load_environment
from alula.errors import require
from alula.learner.learner import Learner, trains_in_place
from alula.mismatch.control.monitor import Monitor
from alula.mismatch.tail import MIN_PROMPTS
from alula.models.load import SHAPE, LoadedModel, load_model
from alula.models.lora import Adapter

if TYPE_CHECKING:
    from alula.distill.distiller import Distiller
    from alula.distill.run_stage import RunDistiller

Data = tuple[Dataset, tuple[Dataset, ...]]
"""Training examples, and the held-out sets."""


def check_shares(config: RunConfig, world: World) -> None:
    """Raise if a rank would have no prompts, or nothing for one of the optimizer steps."""
    prompts, updates, unit = config.sampling.prompts, config.learner.updates, config.learner.minibatch
    share = prompts // world.size
    require(share >= 1, f"sampling.prompts={prompts}: each of the {world.size} ranks needs at least one; raise it.")
    items = share * (config.sampling.n if unit == "rollouts" else 1)
    require(
        updates <= items,
        f"learner.updates={updates}: one of the {world.size} ranks has only {items} {unit} per step; "
        "lower it, or raise sampling.prompts.",
    )
    if config.distill and (first := config.distill.first):
        least = first.prompts // world.size
        require(
            first.minibatches <= least,
            f"distill.first.minibatches={first.minibatches}: one of the {world.size} ranks has only {least} rollouts "
            "per batch; lower it, or raise distill.first.prompts.",
        )


def load_policy(config: RunConfig, world: World) -> LoadedModel:
    """The model with its tokenizer: `model.tokenizer`, the model's own, or that of the generated task."""
    m = config.model
    loaded = load_model(m.source, device=world.device, dtype=m.dtype, seed=config.seed, residual=m.residual)
    name = m.tokenizer
    if name is None and loaded.tokenizer is None and config.data.source.startswith(TASK):
        name = config.data.source
    if name is not None:
        options = config.data.options if config.data.source == name else {}
        loaded = attach_tokenizer(loaded, load_tokenizer(name, options), resize=m.source.startswith(SHAPE))
    require(loaded.tokenizer is not None, f"model.source={m.source!r} has no tokenizer; name one in model.tokenizer.")
    return loaded


def split_data(config: RunConfig) -> Data:
    """(training, held-out) examples. The held-out sets come from `eval.data`, or one is split off, or there is none."""
    training, size = load_source(config.data, training=True), config.eval.size
    if not config.eval.every:
        return training, ()
    if config.eval.data:
        return training, tuple(load_held_out(config, index) for index in range(len(config.eval.data)))
    require(
        size < len(training),
        f"eval.size={size}: the training data has only {len(training)} examples; lower it, name other data in "
        "eval.data, or set eval.every=0.",
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


def build_learner_and_engine(
    config: RunConfig, loaded: LoadedModel, world: World, longest: int
) -> tuple[Learner, Engine, "Distiller | None"]:
    """Learner, engine and distiller. If the learner trains in place, the engine reads its parameters. Otherwise it has
    a copy, which `Engine.update_weights` refreshes. The distiller uses the engine's parameters."""
    in_place = trains_in_place(config.learner, world)
    for_engine = loaded if in_place else replace(loaded, model=copy.deepcopy(loaded.model))
    learner = Learner(
        loaded.model,
        config.learner,
        world,
        total_steps=config.total_updates,
        keep_reference=config.objective.kl > 0,
    )
    learner.tensors()  # allocate the moments now, before the engine takes the remaining memory
    distiller = None
    if config.distill is not None:
        from alula.distill.distiller import Distiller  # only a run that distils loads it

        distiller = Distiller(
            for_engine.model,
            config.distill,
            adapter=first_adapter(config),
            base_model=config.model.source,
            loss=config.objective,
            world=world,
            compiled=config.learner.compile,
        )
        distiller.tensors()
    e = config.engine
    page = config.sparsity.select.block if config.sparsity.select else e.page
    engine = Engine(
        for_engine,
        page=page,
        kv_memory=e.kv_memory,
        max_rows=e.max_rows,
        max_length=e.max_length or longest,
        lookahead=e.lookahead,
        swap_memory=e.swap_memory,
        session_timeout=math.inf,  # episodes close their sessions themselves
        buckets=e.buckets,
        graphs=e.graphs,
        compiled=e.compiled,
        sparse_adapter=None if distiller is None else distiller.adapter(),
    )
    engine.check(config.sparsity)
    return learner, engine, distiller


def first_adapter(config: RunConfig) -> Adapter | None:
    """The adapter that the run starts with, if `distill.adapter` names one."""
    folder = config.distill.adapter if config.distill else None
    return Adapter.load(folder, "distill.adapter") if folder else None


def build_run_distiller(
    config: RunConfig, distiller: "Distiller | None", engine: Engine, prompts: Dataset
) -> "RunDistiller | None":
    """DistillSparse in this run; `distill.move` measures its candidate on `prompts`."""
    if config.distill is None or distiller is None:
        return None
    from alula.distill.run_stage import RunDistiller

    move = config.distill.move
    wanted = prompts.take(min(len(prompts), move.prompts)) if move else ()
    ids = [list(example.prompt_ids or ()) for example in wanted]
    if move is not None and move.at is None:
        require(
            len(ids) >= MIN_PROMPTS,
            f"distill.move: there are {len(ids)} held-out prompts, and a tail that decides needs at least "
            f"{MIN_PROMPTS}; raise eval.size, or set move.at.",
        )
    return RunDistiller(distiller, engine, config.distill, ids)


def build_conversation(config: RunConfig, tokenizer: Any) -> Conversation:
    d = config.data
    return Conversation(tokenizer, chat=d.chat, system=d.system, template_options=d.template_options)


def build_episodes(config: RunConfig, engine: Engine, check_stop: Callable[[], None]) -> Episodes | None:
    """What plays episodes, if the run has an environment."""
    settings = config.environment
    if settings is None:
        return None
    build = load_environment(settings.use, settings.options)
    return Episodes(settings, build, engine, build_conversation(config, engine.tokenizer), check_stop)


def build_monitor(config: RunConfig, engine: Engine, training: Dataset, world: World) -> Monitor:
    """The monitor of the run's sparse policy, with the controller if it is enabled."""
    prompt = max(len(example.prompt_ids or ()) for example in training)
    longest = prompt + config.most_generated(prompt)
    return Monitor(
        config.monitor,
        config.sparsity,
        engine,
        longest,
        config.control,
        gather=world.all_gather,
    )


def measure_matrix_rate(world: World) -> float | None:
    """FLOP/s of a large matrix product on the GPU, the reference of speed/mfu; None on the CPU."""
    if world.device.type != "cuda":
        return None
    rate = matrix_rate(world.device)
    torch.cuda.empty_cache()  # leave the memory to learner and engine
    return rate
