"""The sparse policy's attention inside any Hugging Face decoder, differentiable, through AttentionInterface.

softmax(scaling · q kᵀ where visible) v, with `View` saying what is visible. On CUDA `kernel` computes
visibility tile by tile. Elsewhere the mask [rows, heads, queries, keys] exists for a chunk of queries at a time: the
backward pass builds it again, chunk by chunk. Either way memory grows with the length and not with its square.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from alula.distill.attention.custom_op import attend_opaquely
from alula.distill.attention.kernel import visible_attention
from alula.distill.attention.tiles import look
from alula.distill.attention.visibility import View
from alula.engine.attention import number_layers
from alula.ops.dispatch import use_triton
from alula.ops.packed_attention import packed_attention

NAME = "alula-sparse"
MASK_ELEMENTS = 1 << 28
"""Most elements of a mask at a time, over rows, query heads, queries and keys: half a gigabyte in bfloat16."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    view: View | Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The AttentionInterface signature, for a packed batch of one. In compiled layers the view comes as its ticket: see
    `alula.distill.attention.custom_op`."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if isinstance(view, Tensor):
        q, k, v = (x.contiguous() for x in (q, k, v))  # which the compiler fuses into what made them
        return attend_opaquely(q, k, v, view, module.alula_layer, scaling)[0][None], None  # type: ignore[arg-type]
    return attend_view(q, k, v, view, module, scaling)[None], None


AttentionInterface.register(NAME, attend)


def use_sparse_attention(model: PreTrainedModel) -> None:
    model.set_attn_implementation(NAME)
    number_layers(model)


@torch.compiler.disable  # what it does differs by layer, while one compiled layer serves all of them
def attend_view(q: Tensor, k: Tensor, v: Tensor, view: View, module: nn.Module, scaling: float) -> Tensor:
    """q [T, Hq, D], k and v [T, Hkv, D] of a layer, packed -> [T, Hq, D]"""
    layer: int = module.layer_idx  # type: ignore[assignment]
    if view.dense(layer):
        return packed_attention(q, k, v, view.starts, view.width, scaling)
    attention = kernel_attention if use_triton(q) else sparse_attention
    return attention(q, k, v, view, layer, scaling)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    view: View,
    layer: int,
    scaling: float,
    mask_elements: int = MASK_ELEMENTS,
) -> Tensor:
    """query [T, Hq, D], key and value [T, Hkv, D], packed -> [T, Hq, D]"""
    q, k, v = (view.pad(x).transpose(1, 2) for x in (query, key, value))
    with torch.no_grad():
        summaries = view.summaries(layer, k)

    def chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            visible = view.visible(layer, q, k.shape[2] - q.shape[2], summaries)
        return masked_attention(q, k, v, visible, scaling)

    size = max(1, mask_elements // (view.rows * q.shape[1] * view.width))
    if size >= view.width:
        return view.unpad(chunk(q, k, v).transpose(1, 2))
    parts = []
    for first in range(0, view.width, size):
        last = min(first + size, view.width)
        pieces = (q[:, :, first:last], k[:, :, :last], v[:, :, :last])
        parts.append(checkpoint(chunk, *pieces, use_reentrant=False, preserve_rng_state=False))
    return view.unpad(torch.cat(parts, 2).transpose(1, 2))


def kernel_attention(query: Tensor, key: Tensor, value: Tensor, view: View, layer: int, scaling: float) -> Tensor:
    """The same through Triton kernels."""
    return visible_attention(query, key, value, *look(view, layer, query, key), scaling)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """q [B, Hq, C, D], k and v [B, Hkv, K, D], visible [B, Hkv or 1, C, K] -> [B, Hq, C, D].

    The query heads of a group are laid one after another, so that keys and values are not repeated.
    """
    rows, q_heads, count, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = q_heads // kv_heads
    mask = visible[:, :, None].expand(rows, kv_heads, group, count, keys).flatten(2, 3)
    folded = q.reshape(rows, kv_heads, group * count, dim)
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scaling)
    return out.view(rows, q_heads, count, dim)
