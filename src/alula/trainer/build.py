"""Builds the parts of a run from its settings: learner, rollouts, monitor, distillation."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from alula.bench.ceilings import matrix_rate
from alula.config.run import RunConfig
from alula.data import Dataset
from alula.distributed import World
from alula.engine.measure_queries import TEXT_PROMPTS, dense_text
from alula.engine.rollout import Rollout, Sampling
from alula.errors import require
from alula.learner.learner import Learner, trains_in_place
from alula.mismatch.control.monitor import Monitor
from alula.models.load import LoadedModel
from alula.models.lora import Adapter
from alula.rollouts.build import build_engine, build_episodes, check_backend
from alula.rollouts.job import Job
from alula.rollouts.local_rollouts import LocalRollouts
from alula.rollouts.rollouts import Rollouts
from alula.sparsity.evict import needs_queries
from alula.sparsity.policy import DENSE
from alula.trainer.run_data import move_prompts

if TYPE_CHECKING:
    from alula.distill.distiller import Distiller
    from alula.distill.run_stage import RunDistiller

TEXT_TOKENS = 512
"""Tokens of an answer that the model's queries are measured on."""


def check_shares(config: RunConfig, world: World) -> None:
    """Raise if a rank would have no prompts, or nothing for one of the optimizer steps."""
    prompts, updates, unit = config.sampling.prompts, config.learner.updates, config.learner.minibatch
    share = prompts // world.size
    require(share >= 1, f"sampling.prompts={prompts}: each of the {world.size} ranks needs at least one; raise it.")
    items = share * (config.sampling.n if unit == "rollouts" else 1)
    require(
        updates <= items,
        f"learner.updates={updates}: must be at most {items} (the {unit} of a step on one of {world.size} ranks); "
        "lower it, or raise sampling.prompts.",
    )
    if config.distill and (first := config.distill.first):
        least = first.prompts // world.size
        require(
            first.minibatches <= least,
            f"distill.first.minibatches={first.minibatches}: must be at most {least} (the rollouts of a batch on one "
            f"of {world.size} ranks); lower it, or raise distill.first.prompts.",
        )


def build_learner(
    config: RunConfig, loaded: LoadedModel, world: World
) -> tuple[Learner, LoadedModel, "Distiller | None"]:
    """Learner, the model for an engine on this rank, and the distiller, which uses that model's parameters. If the
    learner trains in place, they are the learner's own; otherwise a copy, which `Rollouts.publish` refreshes."""
    in_place = trains_in_place(config.learner, world)
    elsewhere = config.rollouts.backend != "local" and config.distill is None
    for_engine = loaded if in_place or elsewhere else replace(loaded, model=copy.deepcopy(loaded.model))
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
    return learner, for_engine, distiller


def build_rollouts(
    config: RunConfig,
    learner: Learner,
    for_engine: LoadedModel,
    adapter: Adapter | None,
    world: World,
    longest: int,
    say: Callable[[str], None],
    check_stop: Callable[[], None],
) -> Rollouts:
    """Where the run's rollouts come from: an engine on this rank, or workers on a Ray cluster."""
    check_backend(config)
    if config.rollouts.backend == "local":
        engine = build_engine(config, for_engine, longest, adapter)
        rollouts: Rollouts = LocalRollouts(engine, build_episodes(config, engine), check_stop)
    else:
        from alula.rollouts.ray_rollouts import RayRollouts  # Ray is an extra

        copied = for_engine.model if adapter is not None and not learner.in_place else None
        rollouts = RayRollouts(config, world, learner, longest, adapter, copied, say=say, check_stop=check_stop)
    rollouts.check(config.sparsity)
    return rollouts


def query_text(config: RunConfig, rollouts: Rollouts, training: Dataset) -> list[list[int]] | None:
    """The text that the model's queries are measured on: dense answers to the first training prompts, the same on all
    ranks. None if no policy of the run needs it."""
    if not any(map(needs_queries, config.policies())):
        return None
    prompts = [list(example.prompt_ids or ()) for example in training.take(TEXT_PROMPTS)]
    tokens = min(config.most_generated(max(map(len, prompts))), TEXT_TOKENS)

    def generate(prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        return rollouts.generate([Job(prompt, sampling, DENSE, index) for index, prompt in enumerate(prompts)])

    return dense_text(generate, prompts, Sampling(max_new_tokens=tokens, seed=config.seed))


def first_adapter(config: RunConfig) -> Adapter | None:
    """The adapter that the run starts with, if `distill.adapter` names one."""
    folder = config.distill.adapter if config.distill else None
    return Adapter.load(folder, "distill.adapter") if folder else None


def build_run_distiller(
    config: RunConfig, distiller: "Distiller | None", rollouts: Rollouts, prompts: Dataset
) -> "RunDistiller | None":
    """DistillSparse in this run; `distill.move` measures its candidate on `prompts`."""
    if config.distill is None or distiller is None:
        return None
    from alula.distill.run_stage import RunDistiller

    return RunDistiller(distiller, rollouts, config.distill, move_prompts(config, prompts))


def build_monitor(config: RunConfig, rollouts: Rollouts, training: Dataset, world: World) -> Monitor:
    """The monitor of the run's sparse policy, with the controller if it is enabled."""
    prompt = max(len(example.prompt_ids or ()) for example in training)
    longest = prompt + config.most_generated(prompt)
    return Monitor(
        config.monitor,
        config.sparsity,
        rollouts.acceptance,
        longest,
        config.control,
        kv_dtype=config.engine.kv_dtype,
        gather=world.all_gather,
    )


def measure_matrix_rate(world: World) -> float | None:
    """FLOP/s of a large matrix product on the GPU, the reference of speed/mfu; None on the CPU."""
    if world.device.type != "cuda":
        return None
    rate = matrix_rate(world.device)
    torch.cuda.empty_cache()  # leave the memory to learner and engine
    return rate
