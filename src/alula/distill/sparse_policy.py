"""The sparse policy with its adapter and the dense policy that teaches it, on the same parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alula.distill.attention.attention import use_sparse_attention
from alula.distill.attention.custom_op import register
from alula.distill.attention.visibility import Visibility
from alula.engine.rollout import Rollout
from alula.learner.forward import checkpoint_activations, hidden_states, use_packed_attention
from alula.learner.packing import Packed
from alula.models.load import share_weights
from alula.models.lora import Adapter, attach
from alula.ops.dispatch import use_triton


class SparsePolicy(nn.Module):
    """Two twins of `model` that share its parameters: a sparse one with the adapter φ, and a dense one as teacher.

    Updates of `model` are visible here; the adapter is not visible in `model`."""

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
        for twin in (self.model, self.teacher) if compiled else ():
            for layer in twin.get_decoder().layers:  # type: ignore[union-attr]
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
        """The adapter as it is now; its tensors are the live ones."""
        weights = {name: (layer.lora_a.detach(), layer.lora_b.detach()) for name, layer in self.layers.items()}
        return Adapter(self.rank, self.alpha, weights, self.base_model)

    def forward(self, batch: Packed, rollouts: Sequence[Rollout]) -> Tensor:
        """Hidden states [N, H] of the targets under the policy that sampled `rollouts`, φ included."""
        visibility = Visibility.of([rollouts[i] for i in batch.index], batch.input_ids.device)
        by_handle = self.compiled and use_triton(batch.input_ids)
        hidden = hidden_states(self.model, batch, visibility=register(visibility) if by_handle else visibility)
        if hidden.grad_fn is not None:
            hidden.grad_fn.metadata["visibility"] = visibility  # type: ignore[index]  # kept alive for the backward pass
        return hidden

    @torch.no_grad()
    def dense(self, batch: Packed) -> Tensor:
        """Hidden states [N, H] of the targets under the dense policy, without φ."""
        return hidden_states(self.teacher, batch)

    @contextmanager
    def dense_frozen(self) -> Iterator[None]:
        """Switch the gradients of the shared dense parameters off: they are the learner's."""
        trained = [parameter for parameter in self.dense_parameters if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
