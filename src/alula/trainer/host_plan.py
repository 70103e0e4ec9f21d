"""Host memory and traffic of `alula train --check`: what a node holds beside its GPUs, and what a step moves."""

from alula.config.run import RunConfig
from alula.engine.kv_cache import parse_bytes
from alula.files import size_text
from alula.trainer.memory_plan import MemoryPlan

STATE_BYTES = 12
"""Bytes of one trained parameter in a checkpoint: float32 master and two moments."""


def host_rows(config: RunConfig, plan: MemoryPlan) -> list[tuple[str, str]]:
    """Host memory per node, beside the processes themselves."""
    swap, engines = config.engine.swap_memory, 1 if plan.workers else plan.ranks // plan.nodes
    most = "a quarter of what is free"
    if swap is not None:
        most = size_text(engines * parse_bytes(swap, "engine.swap_memory"))
    rows = [
        ("checkpoint, while it is written", size_text(STATE_BYTES * plan.trained // plan.nodes)),
        ("exported model, on the first node", size_text(plan.parameters * plan.geometry.value_bytes)),
        ("KV of preempted rollouts" + (", per worker" if plan.workers else ""), f"at most {most}"),
    ]
    if plan.workers:
        rows.append(("two versions of the weights, with workers", size_text(2 * plan.published)))
    return rows


def traffic_rows(config: RunConfig, plan: MemoryPlan) -> list[tuple[str, str]]:
    """Bytes that move between processes in one step."""
    each = f"{size_text(plan.published)} to each of {plan.workers or plan.ranks}"
    rows = [("weights to the engines", each if plan.published else "none: shared with the learner")]
    if plan.nodes > 1:
        across = size_text(config.learner.updates * network_bytes(config, plan))
        rows.append((f"learner between {plan.nodes} nodes, per node", across))
    return rows


def micro_batches(config: RunConfig, plan: MemoryPlan) -> int:
    """Micro-batches per rank and optimizer step, if every answer had full length."""
    return -(-plan.update_tokens // (plan.ranks * config.learner.tokens))


def network_bytes(config: RunConfig, plan: MemoryPlan) -> float:
    """Bytes that a node of learners sends (and receives) per optimizer step, with ring collectives.

    Replicas sum their float32 gradients once: 2 (n − 1) / n of them. Shards over all nodes gather the weights for every
    forward and backward of a micro-batch, and scatter its gradients: (n − 1) / n of each.
    """
    gradients, others = 4 * plan.trained, (plan.nodes - 1) / plan.nodes
    if config.learner.shard == "node":
        return 2 * others * gradients
    gathered = 2 * plan.parameters * plan.geometry.value_bytes
    return others * (gathered + gradients) * micro_batches(config, plan)
