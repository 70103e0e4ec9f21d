"""Alula: reinforcement learning of reasoning LLMs with sparse rollouts."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Engine": "alula.engine.engine",
    "Rollout": "alula.engine.rollout",
    "Sampling": "alula.engine.rollout",
    "Sparsity": "alula.sparsity.policy",
    "Evict": "alula.sparsity.policy",
    "Select": "alula.sparsity.policy",
    "Schedule": "alula.sparsity.schedule",
}
__all__ = ["Engine", "Evict", "Rollout", "Sampling", "Schedule", "Select", "Sparsity"]

if TYPE_CHECKING:
    from alula.engine.engine import Engine
    from alula.engine.rollout import Rollout, Sampling
    from alula.sparsity.policy import Evict, Select, Sparsity
    from alula.sparsity.schedule import Schedule


def __getattr__(name: str) -> Any:
    # Lazy, so that `alula --help` and configuration checks do not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'alula' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
