"""The parts of a run, made from its settings: model and tokenizer, data, engine and learner on the same weights."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from alula.config.run import RunConfig
from alula.data import Dataset, prepare
from alula.data.load import is_path, load_source
from alula.distributed import World
from alula.engine.engine import Engine
from alula.errors import SettingError, require
from alula.learner.learner import Learner
from alula.mismatch.control.monitor import Monitor
from alula.mismatch.tail import MIN_PROMPTS
from alula.models.load import SHAPE, LoadedModel, load_model
from alula.models.lora import Adapter

if TYPE_CHECKING:
    from alula.distill.distiller import Distiller
    from alula.distill.run_stage import RunDistiller

TASK = "task:"

Data = tuple[Dataset, Dataset | None]
"""Training and held-out examples."""


def check_shares(config: RunConfig, world: World) -> None:
    """Every rank needs prompts, and something of each optimizer step."""
    prompts, updates, unit = config.sampling.prompts, config.learner.updates, config.learner.minibatch
    share = prompts // world.size
    require(share >= 1, f"sampling.prompts={prompts}: each of the {world.size} ranks needs at least one; raise it.")
    items = share * (config.sampling.n if unit == "rollouts" else 1)
    require(
        updates <= items,
        f"learner.updates={updates}: one of the {world.size} ranks has only {items} {unit} per step to share out; "
        "lower it, or raise sampling.prompts.",
    )
    if config.distill and (first := config.distill.first):
        least = first.prompts // world.size
        require(
            first.minibatches <= least,
            f"distill.first.minibatches={first.minibatches}: one of the {world.size} ranks has only {least} rollouts "
            "of a batch to share out; lower it, or raise distill.first.prompts.",
        )


def steps_taken(config: RunConfig, checkpoint: Path) -> int:
    """At the checkpoint, which the run is to continue from."""
    step, steps = int(checkpoint.name.rpartition("-")[2]), config.steps
    require(step <= steps, f"steps={steps}: {config.out} has taken {step} already; ask for more, or name another out.")
    return step


def load_policy(config: RunConfig, world: World) -> LoadedModel:
    """The model with a tokenizer."""
    m = config.model
    loaded = load_model(m.source, device=world.device, dtype=m.dtype, seed=config.seed, residual=m.residual)
    name = m.tokenizer
    if name is None and loaded.tokenizer is None and config.data.source.startswith(TASK):
        name = config.data.source
    if name is not None:
        options = config.data.options if config.data.source == name else {}
        loaded = with_tokenizer(loaded, named_tokenizer(name, options), cut=m.source.startswith(SHAPE))
    require(loaded.tokenizer is not None, f"model.source={m.source!r} has no tokenizer; name one in model.tokenizer.")
    return loaded


def named_tokenizer(name: str, options: dict[str, Any]) -> Any:
    """Of the hub, a folder, or a generated task with these options."""
    if name.startswith(TASK):
        from alula.data.tasks import build
        from alula.data.tasks.tokenizer import task_tokenizer

        return task_tokenizer(build(name.removeprefix(TASK), **options))
    folder = os.path.expanduser(name)
    require(
        os.path.exists(folder) or not is_path(name),
        f"model.tokenizer={name!r}: no such folder; name one that is there, a hub id or {TASK}<name>.",
    )
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingError(f"model.tokenizer={name!r} cannot be loaded: {str(error).splitlines()[0]}") from error


def with_tokenizer(loaded: LoadedModel, tokenizer: Any, cut: bool) -> LoadedModel:
    """Talk to the model through `tokenizer`; `cut` shrinks a random model's vocabulary to it."""
    model = loaded.model
    require(
        len(tokenizer) <= model.config.vocab_size,
        f"the tokenizer has {len(tokenizer)} tokens and the model only {model.config.vocab_size}; use another one.",
    )
    if cut:
        model.resize_token_embeddings(len(tokenizer))
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for holder in (model.config, model.generation_config):
            setattr(holder, role, getattr(tokenizer, role))
    return replace(loaded, tokenizer=tokenizer, eos_ids=(tokenizer.eos_token_id,))


def split_data(config: RunConfig) -> Data:
    """(training, held-out) examples; the second from data of its own, or set aside, or none."""
    training, held_out = load_source(config.data), None
    if config.eval.every and config.eval.data is not None:
        held_out = load_source(config.eval.data)
        held_out = held_out.take(config.eval.size, seed=0) if config.eval.size < len(held_out) else held_out
    elif config.eval.every:
        require(
            config.eval.size < len(training),
            f"eval.size={config.eval.size}: the training data has {len(training)} examples and some must be left to "
            "train on; lower it, name other data in eval.data, or set eval.every=0.",
        )
        training, held_out = training.split(config.eval.size, config.data.seed)
    return training, held_out


def load_data(config: RunConfig, tokenizer: Any) -> Data:
    """(training, held-out) examples as tokens."""
    return tokenized(config, split_data(config), tokenizer)


def tokenized(config: RunConfig, data: Data, tokenizer: Any) -> Data:
    d = config.data

    def ready(dataset: Dataset) -> Dataset:
        return prepare(
            dataset,
            tokenizer,
            chat=d.chat,
            system=d.system,
            max_prompt_tokens=d.max_prompt_tokens,
            template_options=d.template_options,
        )

    training, held_out = data
    return ready(training), None if held_out is None else ready(held_out)


def build_learner_and_engine(
    config: RunConfig, loaded: LoadedModel, world: World, longest: int
) -> tuple[Learner, Engine, "Distiller | None"]:
    """On one device without adapters the engine reads the learner's own parameters; otherwise it has a copy, which
    `Engine.update_weights` refreshes. A distiller reads what the engine reads."""
    for_engine = loaded if shares_weights(config, world) else replace(loaded, model=copy.deepcopy(loaded.model))
    learner = Learner(
        loaded.model,
        config.learner,
        world,
        total_steps=config.total_updates,
        keep_reference=config.objective.kl > 0,
    )
    learner.tensors()  # the moments take their memory now, before the engine takes what is left
    distiller = None
    if config.distill is not None:
        from alula.distill.distiller import Distiller  # only a run that distils loads it

        distiller = Distiller(
            for_engine.model,
            config.distill,
            adapter=first_adapter(config),
            base_model=config.model.source,
            loss=config.loss,
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
        buckets=e.buckets,
        graphs=e.graphs,
        compiled=e.compiled,
        sparse_adapter=None if distiller is None else distiller.adapter(),
    )
    engine.check(config.sparsity.build())
    return learner, engine, distiller


def first_adapter(config: RunConfig) -> Adapter | None:
    """The adapter that the run starts from, if `distill.adapter` names one."""
    folder = config.distill.adapter if config.distill else None
    return Adapter.load(folder, "distill.adapter") if folder else None


def build_run_distiller(
    config: RunConfig, distiller: "Distiller | None", engine: Engine, prompts: Dataset
) -> "RunDistiller | None":
    """DistillSparse in this run; a sparser policy is measured on `prompts`."""
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


def build_monitor(config: RunConfig, engine: Engine, training: Dataset, world: World) -> Monitor:
    """Watches the sparse policy of the run; the longest sequence is what the longest prompt can grow to."""
    longest = max(len(example.prompt_ids or ()) for example in training) + config.sampling.max_new_tokens
    return Monitor(
        config.monitor,
        config.sparsity.build(),
        engine,
        longest,
        config.control,
        gather=world.all_gather,
        share=lambda count: len(world.local_slice(range(count))),
    )


def shares_weights(config: RunConfig, world: World) -> bool:
    return not world.is_distributed and config.learner.lora is None
