"""What a plan comes to while the run learns and while it generates, and whether that fits the GPU."""

import os
from typing import TYPE_CHECKING

import torch

from alula.config import RunConfig
from alula.engine.cache import parse_bytes

if TYPE_CHECKING:
    from alula.rl.plan_check import Plan

USABLE = 0.9
"""Share of the free memory that a plan may take: CUDA's own and one layer's activations are not counted."""


def free_memory(config: RunConfig) -> int | None:
    """Bytes that are free on the GPU that the run would take; None where it would run on the CPU."""
    if config.model.device == "cpu" or not torch.cuda.is_available():
        return None
    named = torch.device(config.model.device or "cuda").index
    return torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")) if named is None else named)[0]


def totals(config: RunConfig, plan: "Plan", counted: int, free: int | None) -> list[tuple[str, str]]:
    """Rows below the parts, of which `counted` is the sum without KV. The KV pool is lent to the learner, which frees
    what only it needs before the next rollouts."""
    pool = parse_bytes(config.engine.kv_memory) if config.engine.kv_memory else plan.kv_sparse
    generating = counted - plan.gradients - plan.logits - plan.activations + pool
    rows = [
        ("in all, learning (the KV pool is lent)", size_text(counted)),
        ("in all, generating", size_text(generating)),
    ]
    if not config.learner.activation_checkpointing:
        rows.append(("  activations not counted: learner.activation_checkpointing is off", ""))
    if free is not None:
        rows.append((f"  {verdict(config, plan, counted, generating, free)}", f"{size_text(free)} free"))
    elif config.model.dtype is None:
        rows.append(("  in float32, as on this CPU; model.dtype=bfloat16 shows what a GPU would hold", ""))
    return rows


def verdict(config: RunConfig, plan: "Plan", learning: int, generating: int, free: int) -> str:
    """Fits, or what to lower: whatever the largest part of the excess is."""
    limit = int(USABLE * free)
    if learning - plan.logits - plan.activations > limit:
        return "does not fit: use more ranks, learner.lora, or a smaller model"
    if learning > limit:
        return f"does not fit: lower learner.{'token_budget' if plan.activations > plan.logits else 'logprob_chunk'}"
    if generating <= limit:
        return "fits"
    if config.engine.kv_memory:
        return "does not fit: lower engine.kv_memory"
    together = (limit - generating + plan.kv_sparse) * plan.running // max(plan.kv_sparse, 1)
    if together < 1:
        return "does not fit: lower sampling.max_new_tokens, or use a smaller budget"
    return f"fits {together:,} of the {plan.running:,} rollouts at a time; the others wait"


def size_text(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
