"""The dense policy as one module: decoder, LM head and log-probs of the scored positions in one forward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from alula.errors import require
from alula.rl.attention import use_packed_attention
from alula.rl.logprobs import chunked_logprobs, topk_logprobs
from alula.rl.packing import Packed


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass.

    transformers does it only in layers whose own flag says training; all else stays in evaluation, so that no dropout
    makes the trained policy another one than the scored. Layers that drop out by themselves are refused, so nothing is
    drawn, and no generator's state is kept.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    # transformers lets the first layer's input require a gradient always: without one, another variant to compile.
    model.disable_input_require_grads()
    embeddings = model.get_input_embeddings()
    if _ask_for_gradient not in embeddings._forward_hooks.values():
        embeddings.register_forward_hook(_ask_for_gradient)
    for layer in model.get_decoder().layers:  # type: ignore[union-attr]
        drops = [f"{name}={p}" for name, p in vars(layer).items() if "dropout" in name and isinstance(p, float) and p]
        require(
            not drops,
            f"activation_checkpointing: {type(layer).__name__} has {', '.join(drops)}, and would train another policy "
            "than is scored; set it to 0 in the model's configuration, or switch activation_checkpointing off.",
        )
        require(
            isinstance(layer, GradientCheckpointingLayer),
            f"activation_checkpointing: {type(layer).__name__} cannot recompute itself; switch it off.",
        )
        layer.training = True  # type: ignore[union-attr]


def _ask_for_gradient(module: nn.Module, inputs: Any, out: Tensor) -> None:
    if torch.is_grad_enabled():
        out.requires_grad_()


def hidden_states(model: PreTrainedModel, batch: Packed, **options: Any) -> Tensor:
    """[N, H]: of the positions whose next token is scored. `options` go down to the attention function."""
    return model.get_decoder()(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        **options,
    ).last_hidden_state[0, batch.targets]


class Scored(NamedTuple):
    logprobs: Tensor
    """float32 [N]: of every target token."""
    entropy: Tensor | None = None
    """float32 [N], without gradient."""
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None


class Policy(nn.Module):
    """Wraps a Hugging Face causal LM (its own modules, its own parameters).

    The head is read inside this forward, never outside: as the root module under FSDP2, its forward is what
    gathers the head's weight, and its backward what reduces the gradient.
    """

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        super().__init__()
        use_packed_attention(model)
        self.model = model
        self.chunk = chunk

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.model.get_decoder().layers)  # type: ignore[arg-type]

    def forward(self, batch: Packed, temperature: float, topk: int = 0, entropy: bool = True) -> Scored:
        hidden = hidden_states(self.model, batch)
        head = self.model.get_output_embeddings()
        weight, bias = head.weight, getattr(head, "bias", None)
        if topk:
            best = topk_logprobs(hidden, weight, batch.target_ids, topk, temperature, self.chunk, bias)
            return Scored(best.logprobs, None, best.topk_ids, best.topk_logprobs)
        scored = chunked_logprobs(hidden, weight, batch.target_ids, temperature, self.chunk, bias, entropy=entropy)
        return Scored(*scored)
