"""The sparse policy in the learner, and the dense one that teaches it: the same parameters, φ beside them in one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alula.distill.attention.attention import use_sparse_attention
from alula.distill.attention.custom_op import ticket
from alula.distill.attention.visibility import View
from alula.engine.rollout import Rollout
from alula.learner.forward import checkpoint_activations, hidden_states, use_packed_attention
from alula.learner.packing import Packed
from alula.models.load import share_weights
from alula.models.lora import Adapter, attach
from alula.ops.dispatch import use_triton


class SparsePolicy(nn.Module):
    """Twins of `model` on the very same parameters: its steps are seen here, φ is not seen there."""

    def __init__(
        self, model: PreTrainedModel, adapter: Adapter, activation_checkpointing: bool = False, compiled: bool = False
    ) -> None:
        super().__init__()
        self.dense_parameters = list(model.parameters())
        self.model, self.teacher = share_weights(model).eval(), share_weights(model).eval()
        use_sparse_attention(self.model)
        use_packed_attention(self.teacher)
        self.layers = attach(self.model, adapter)
        self.rank, self.alpha, self.base_model = adapter.rank, adapter.alpha, adapter.base_model
        if activation_checkpointing:
            checkpoint_activations(self.model)
        self.compiled = compiled
        for own in (self.model, self.teacher) if compiled else ():
            for layer in own.get_decoder().layers:  # type: ignore[union-attr]
                layer.compile(dynamic=True)  # type: ignore[union-attr]

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        """The LM head, which both policies share."""
        head = self.model.get_output_embeddings()
        return head.weight, getattr(head, "bias", None)  # type: ignore[return-value, union-attr]

    def adapter_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, layer in self.layers.items():
            yield f"{name}.lora_A", layer.lora_a
            yield f"{name}.lora_B", layer.lora_b

    def adapter(self) -> Adapter:
        """φ as it is now; its tensors are the live ones."""
        weights = {name: (layer.lora_a.detach(), layer.lora_b.detach()) for name, layer in self.layers.items()}
        return Adapter(self.rank, self.alpha, weights, self.base_model)

    def forward(self, batch: Packed, rollouts: Sequence[Rollout]) -> Tensor:
        """Hidden states [N, H] of the targets under the policy that sampled `rollouts`, φ included."""
        view = View.of([rollouts[i] for i in batch.index], batch.input_ids.device)
        opaque = self.compiled and use_triton(batch.input_ids)
        hidden = hidden_states(self.model, batch, view=ticket(view) if opaque else view)
        if hidden.grad_fn is not None:
            hidden.grad_fn.metadata["view"] = view  # type: ignore[index]  # the backward pass looks into it
        return hidden

    @torch.no_grad()
    def dense(self, batch: Packed) -> Tensor:
        """Hidden states [N, H] of the targets under the dense policy, without φ."""
        return hidden_states(self.teacher, batch)

    @contextmanager
    def dense_frozen(self) -> Iterator[None]:
        """θ takes no gradient meanwhile: the parameters are the learner's own."""
        trained = [parameter for parameter in self.dense_parameters if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
