"""Floating-point operations a training step needs, for model-FLOPs utilisation."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from alula.models.geometry import Geometry


@dataclass(frozen=True)
class Flops:
    """Forward and backward, in the convention of PaLM (arXiv 2204.02311, appendix B): recomputation of
    activations or logits is not counted, since another implementation could do without."""

    layers: float
    """6 per parameter outside embedding and head and per token; 4 for a frozen one, which gets no gradient."""
    attention: float
    """QKᵀ and PV over the causal half: 6 · layers · heads · head_dim · length² per sequence."""
    head: float
    """6 · width · vocabulary per scored token."""

    @property
    def total(self) -> float:
        return self.layers + self.attention + self.head


def training_flops(model: PreTrainedModel, lengths: Sequence[int], scored: int) -> Flops:
    """One update on sequences of `lengths` tokens, prompts included, of which `scored` are response tokens."""
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    body = (p for p in model.parameters() if p is not embedding and p is not head)
    per_token = sum(_factor(p) * p.numel() for p in body)
    geometry = Geometry.of(model)
    return Flops(
        layers=float(per_token * sum(lengths)),
        attention=6.0 * geometry.layers * geometry.attention_width * sum(n * n for n in lengths),
        head=float(_factor(head) * config.hidden_size * config.vocab_size * scored),
    )


def _factor(parameter: Tensor) -> int:
    return 6 if parameter.requires_grad else 4
