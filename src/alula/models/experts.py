"""Mixtures of experts: the share of weights that a token uses, what graphs can capture, what adapters leave out."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.errors import require


def is_experts(parameter: Tensor) -> bool:
    """transformers stores the experts of a layer as one tensor [experts, out, in]; no other weight has three axes."""
    return parameter.dim() == 3


def expert_parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if is_experts(parameter))


def active_share(model: PreTrainedModel) -> float:
    """The share of the experts that a token passes through; 1 for a model without experts."""
    config = model.config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return config.num_experts_per_tok / experts if experts else 1.0


def check_graphs(model: PreTrainedModel, graphs: bool | None, cuda: bool) -> bool:
    """Whether to capture CUDA graphs, given the setting. Experts in float32 cannot be captured: torch multiplies groups
    of 16-bit matrices only, and otherwise loops over the experts on the host."""
    captures = model.dtype != torch.float32 or expert_parameters(model) == 0
    require(
        captures or not graphs,
        "graphs=True: a mixture of experts in float32 cannot be captured; leave graphs out, or use dtype=bfloat16.",
    )
    return (cuda and captures) if graphs is None else graphs


def unadapted_experts(experts: int, parameters: int, what: str) -> tuple[str, str] | None:
    """(message, advice) if a low-rank adapter leaves experts out; None for a model without experts."""
    if not experts:
        return None
    return (
        f"{what} adapts linear layers only: the experts and their router, {experts / parameters:.0%} of the "
        "parameters, stay as they are.",
        "Train all weights (learner.lora=null) if the experts must learn."
        if what == "learner.lora"
        else "The adapter of the sparse policy corrects attention alone; compare mismatch/tail with and without it.",
    )
