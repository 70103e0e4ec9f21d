"""The dense policy as one module: decoder, LM head and log-probs of the scored positions in one forward.

Packed attention inside any Hugging Face decoder, through transformers' AttentionInterface.

The sequence boundaries travel as keyword arguments of the model's `forward` down to the attention function.
transformers builds no mask for a name without a mask function, and packed sequences need none.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from alula.errors import SettingError, require
from alula.learner.logprobs import chunked_logprobs, topk_logprobs
from alula.learner.packing import Packed
from alula.ops.packed_attention import packed_attention


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
    scaling: float,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """The AttentionInterface signature: heads before tokens in, tokens before heads out, a batch of one."""
    if dropout:
        raise SettingError(
            f"attention_dropout={dropout}: the policy that is trained must be the one that was scored; "
            "set it to 0 in the model's configuration."
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(q, k, v, cu_seqlens, max_seqlen, scaling, sliding_window)[None], None


AttentionInterface.register(NAME, attend)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch a model to packed attention.

    The setting lives on the config object, which a copy of the model would share: it gets its own first.
    """
    shared, config = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = config  # type: ignore[assignment]
    model.set_attn_implementation(NAME)
