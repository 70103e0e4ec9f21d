"""Passes of Llama- and Qwen-shaped models in few kernels.

A layer of a decode step takes seven to ten: four products, two sums with their norms, and attention in one to three,
which rotates and appends the new token itself where it can. The gated activation is part of its product if there are
few rows. Prompts and scores take the same with their own attention, and two more that rotate. The weights are those of
the model's own modules, whose joint buffers (`alula.engine.fused_linear`) give q, k, v and gate, up in one product
each. Every rounding is where the modules round. Other models run the modules themselves.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from alula.engine.attention import AttentionContext, DecodeContext
from alula.engine.fused_linear import JointSlice
from alula.models.residual import residual_of
from alula.ops.few_rows_linear import gated_linear, partial_linear
from alula.ops.rms_norm import add_norm
from alula.ops.rotary import Rotary, rotate

LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
"""Layers that compute what `FusedDecoder` does."""


def fusible(model: PreTrainedModel) -> bool:
    """Whether `FusedDecoder` computes what the model does. Its projections are fused already."""
    decoder: Any = model.base_model
    rotary = decoder.rotary_emb
    fixed = rotary.rope_type not in ("dynamic", "longrope")  # angles of a position that depend on the others
    return fixed and all(
        _known(layer) and 2 * rotary.inv_freq.numel() == layer.self_attn.head_dim for layer in decoder.layers
    )


def _known(layer: Any) -> bool:
    if type(layer) not in LAYERS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    joint = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
    return (
        all(type(module) is JointSlice for module in joint)
        and all(type(module) is nn.Linear for module in (attention.o_proj, mlp.down_proj))
        and isinstance(mlp.act_fn, type(ACT2FN["silu"]))
    )


class FusedDecoder:
    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        self.decoder: Any = model.base_model
        self._positions = positions
        self._plain_embedding = residual_of(model) is None and type(self.decoder.embed_tokens) is nn.Embedding

    @cached_property
    def _angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, D] of every position that decode steps reach."""
        positions = torch.arange(self._positions, device=self.decoder.embed_tokens.weight.device)
        return self._angles_at(positions)

    def _angles_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        like = self.decoder.embed_tokens(torch.zeros_like(positions[:1]))  # for its dtype
        cos, sin = self.decoder.rotary_emb(like, positions[None])
        return cos[0].contiguous(), sin[0].contiguous()

    def forward(self, ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Last hidden states [T, width] of tokens [T]."""
        cos, sin = self._angles if isinstance(context, DecodeContext) else self._angles_at(positions)
        stream, branch = self._embedded(ids), None
        for layer in self.decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            stream, normed = _add_norm(stream, branch, layer.input_layernorm)
            branch = _attention(attention, normed, cos, sin, context)
            stream, normed = _add_norm(stream, branch, layer.post_attention_layernorm)
            active = gated_linear(normed, mlp.gate_proj.joint, mlp.gate_proj.joint_bias)
            branch = partial_linear(active, mlp.down_proj.weight, mlp.down_proj.bias)
        return _add_norm(stream, branch, self.decoder.norm)[1]

    def _embedded(self, ids: Tensor) -> Tensor:
        embedding = self.decoder.embed_tokens
        # The module takes five times as long for few rows.
        return embedding.weight[ids] if self._plain_embedding else embedding(ids)


def _add_norm(stream: Tensor, branch: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    return add_norm(stream, branch, norm.weight, norm.variance_epsilon)


def _attention(attention: Any, normed: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
    joint = linear(normed, attention.q_proj.joint, attention.q_proj.joint_bias)
    heads = joint.view(len(joint), -1, attention.head_dim)
    kv_heads = attention.k_proj.out_features // attention.head_dim
    query, key, value = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    rotary = Rotary(cos, sin)
    if hasattr(attention, "q_norm"):
        norms = attention.q_norm, attention.k_norm
        rotary = Rotary(cos, sin, norms[0].weight, norms[1].weight, norms[0].variance_epsilon)
    if isinstance(context, DecodeContext):
        out = context.attend(attention.layer_idx, query, key, value, attention.scaling, rotary)
    else:
        query, key = rotate(query, rotary.query_norm, rotary), rotate(key, rotary.key_norm, rotary)
        out = context.attend(attention.layer_idx, query, key, value, attention.scaling)
    return partial_linear(out.flatten(1), attention.o_proj.weight, attention.o_proj.bias)
