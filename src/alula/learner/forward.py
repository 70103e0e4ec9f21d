"""The dense policy as one module: decoder with packed attention, LM head, and log-probs of the scored positions.

Packed attention works in any Hugging Face decoder, through transformers' AttentionInterface. The sequence boundaries
are passed as keyword arguments of the model's `forward` down to the attention function. transformers builds no mask for
an attention without a mask function, and packed sequences need none.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from alula.errors import SettingError, require
from alula.learner.logprobs import chunked_logprobs
from alula.learner.packing import Packed
from alula.models.geometry import head_dim
from alula.ops.packed_attention import packed_attention
from alula.ops.sequence_attention import one_by_one


class Policy(nn.Module):
    """Wraps a Hugging Face causal LM, sharing its modules and parameters.

    The head must be read inside this forward: under FSDP2 this is the root module, whose forward gathers the head's
    weight and whose backward reduces its gradient.
    """

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        super().__init__()
        use_packed_attention(model)
        self.model = model
        self.chunk = chunk

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.model.get_decoder().layers)  # type: ignore[arg-type]

    def forward(self, batch: Packed, temperature: float, entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        """float32 [N]: log-probs of the target tokens, and the entropy there (without gradient)."""
        hidden = hidden_states(self.model, batch)
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return chunked_logprobs(hidden, head.weight, batch.target_ids, temperature, self.chunk, bias, entropy=entropy)


def hidden_states(model: PreTrainedModel, batch: Packed, **options: Any) -> Tensor:
    """[N, H]: hidden states of the scored positions. `options` are passed to the attention function."""
    return model.get_decoder()(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        one_by_one=one_by_one(batch.lengths, head_dim(model.config), model.dtype, batch.cu_seqlens.device),
        **options,
    ).last_hidden_state[0, batch.targets]


NAME = "alula-packed"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    one_by_one: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """AttentionInterface: input [1, heads, tokens, dim], output [1, tokens, heads, dim]."""
    if dropout:
        raise SettingError(
            f"attention_dropout={dropout}: the trained policy would differ from the scored one; set it to 0 in the "
            "model's configuration."
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = packed_attention(q, k, v, cu_seqlens, max_seqlen, scaling, sliding_window, one_by_one=one_by_one)
    return out[None], None


AttentionInterface.register(NAME, attend)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch a model to packed attention.

    The setting lives on the config object, which copies of the model share, so the model gets its own copy first.
    """
    shared, config = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = config  # type: ignore[assignment]
    model.set_attn_implementation(NAME)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass.

    transformers does this only in layers whose `training` flag is set. Everything else stays in evaluation mode, so
    that dropout does not make the trained policy differ from the scored one. Layers with dropout raise, so no random
    numbers are drawn and no generator state has to be kept.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    # transformers makes the first layer's input always require a gradient; scoring would then compile another variant.
    model.disable_input_require_grads()
    embeddings = model.get_input_embeddings()
    if _require_gradient not in embeddings._forward_hooks.values():
        embeddings.register_forward_hook(_require_gradient)
    for layer in model.get_decoder().layers:  # type: ignore[union-attr]
        drops = [f"{name}={p}" for name, p in vars(layer).items() if "dropout" in name and isinstance(p, float) and p]
        require(
            not drops,
            f"activation_checkpointing=true: {type(layer).__name__} has {', '.join(drops)}, so the trained policy "
            "would differ from the scored one; set it to 0 in the model's configuration, or set this to false.",
        )
        require(
            isinstance(layer, GradientCheckpointingLayer),
            f"activation_checkpointing=true: {type(layer).__name__} does not support it; set it to false.",
        )
        layer.training = True  # type: ignore[union-attr]


def _require_gradient(module: nn.Module, inputs: Any, out: Tensor) -> None:
    if torch.is_grad_enabled():
        out.requires_grad_()
