"""Learner settings that a run on a GPU chooses by what fits into its memory: activation checkpointing, token budget.

A given setting wins. The choice is in the run's folder, and `--resume` keeps it. On a CPU the learner's defaults hold.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from alula.config.run import RunConfig
from alula.distributed import World
from alula.files import write_atomically
from alula.settings import LearnerSettings
from alula.trainer.memory_plan import USABLE, MemoryPlan, plan_memory, separate_workers
from alula.trainer.run_data import Data

FILE = "learner.json"
BUDGETS = (65536, 32768, 16384, 8192, 4096)
"""Tokens per micro-batch that are tried without checkpointing. Small models need many: at 135M parameters and 16,384
tokens the host is the limit. Those of 1.7B gain nothing from more, and lose little at the last."""
RECOMPUTING = 16384
"""The most with checkpointing: its models are large."""


def fit_learner(config: RunConfig, world: World, resumed: bool, data: Data) -> RunConfig:
    """The settings of a run with the learner's choices filled in."""
    if world.device.type != "cuda" or not open_settings(config.learner):
        return config
    path = Path(config.out) / FILE
    chosen = recorded(path) if resumed else None
    if chosen is None:
        free = -world.all_max(-available(world.device))  # the same choice on all ranks
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        plan = plan_memory(config, world.size, data, nodes=nodes, workers=separate_workers(config))
        chosen = choose(config.learner, plan, free)
        if world.rank == 0:
            write_atomically(path, json.dumps(chosen, indent=1) + "\n")
    return with_choice(config, chosen)


def with_choice(config: RunConfig, chosen: dict[str, Any]) -> RunConfig:
    filled = {name: chosen[name] for name in open_settings(config.learner)}
    return config.model_copy(update={"learner": config.learner.model_copy(update=filled)})


def describe_choice(learner: LearnerSettings) -> str:
    kept = "with" if learner.checkpoints_activations else "without"
    return (
        f"learner, by what fits: {kept} activation checkpointing, {learner.tokens:,} tokens per micro-batch ({FILE})."
    )


def open_settings(learner: LearnerSettings) -> list[str]:
    return [name for name in ("activation_checkpointing", "token_budget") if getattr(learner, name) is None]


def choose(learner: LearnerSettings, plan: MemoryPlan, free: int) -> dict[str, Any]:
    """The first that fits into `free` bytes: no checkpointing, at the largest token budget; then with it.

    Recomputing costs a third of the work, smaller micro-batches much less.
    """
    given = learner.activation_checkpointing
    room = int(USABLE * free) - (plan.learning - plan.activations)
    for checkpointing in (False, True) if given is None else (given,):
        budgets = [budget for budget in BUDGETS if budget <= RECOMPUTING or not checkpointing]
        for budget in [learner.token_budget] if learner.token_budget else budgets:
            kept = plan.activations_of(checkpointing, budget)
            if kept is not None and kept <= room:
                return {"activation_checkpointing": checkpointing, "token_budget": budget}
    return {"activation_checkpointing": given is not False, "token_budget": learner.token_budget or BUDGETS[-1]}


def recorded(path: Path) -> dict[str, Any] | None:
    """The choice of the run's first start; None if there is none to read."""
    try:
        chosen = json.loads(path.read_text())
        return {name: chosen[name] for name in ("activation_checkpointing", "token_budget")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def available(device: torch.device) -> int:
    """Bytes of the GPU that this process holds or could get."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
