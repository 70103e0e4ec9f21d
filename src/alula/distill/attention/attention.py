"""The sparse policy's attention inside any Hugging Face decoder, differentiable, through AttentionInterface.

softmax(scaling · q kᵀ where visible) v, with `Visibility` as the mask. On CUDA, `kernel` computes the mask tile by
tile. Elsewhere the mask [rows, heads, queries, keys] is built for a chunk of queries at a time, and again in the
backward pass. Either way memory grows linearly with the length.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from alula.distill.attention.custom_op import sparse_attention_op
from alula.distill.attention.kernel import visible_attention
from alula.distill.attention.tiles import layer_visibility
from alula.distill.attention.visibility import Visibility
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
    visibility: Visibility | Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The AttentionInterface signature, for a packed batch of one. In compiled layers `visibility` is a handle of
    `alula.distill.attention.custom_op`."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if isinstance(visibility, Tensor):
        q, k, v = (x.contiguous() for x in (q, k, v))  # fused by the compiler into the preceding operations
        return sparse_attention_op(q, k, v, visibility, module.alula_layer, scaling)[0][None], None  # type: ignore[arg-type]
    return attend_visible(q, k, v, visibility, module, scaling)[None], None


AttentionInterface.register(NAME, attend)


def use_sparse_attention(model: PreTrainedModel) -> None:
    model.set_attn_implementation(NAME)
    number_layers(model)


@torch.compiler.disable  # it differs by layer, while one compiled layer serves all of them
def attend_visible(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, module: nn.Module, scaling: float
) -> Tensor:
    """q [T, Hq, D], k and v [T, Hkv, D] of a layer, packed -> [T, Hq, D]"""
    layer: int = module.layer_idx  # type: ignore[assignment]
    if visibility.dense(layer):
        return packed_attention(q, k, v, visibility.starts, visibility.width, scaling)
    attention = kernel_attention if use_triton(q) else sparse_attention
    return attention(q, k, v, visibility, layer, scaling)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    layer: int,
    scaling: float,
    mask_elements: int = MASK_ELEMENTS,
) -> Tensor:
    """query [T, Hq, D], key and value [T, Hkv, D], packed -> [T, Hq, D]"""
    q, k, v = (visibility.pad(x).transpose(1, 2) for x in (query, key, value))
    with torch.no_grad():
        summaries = visibility.summaries(layer, k)

    def chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            visible = visibility.visible(layer, q, k.shape[2] - q.shape[2], summaries)
        return masked_attention(q, k, v, visible, scaling)

    size = max(1, mask_elements // (visibility.rows * q.shape[1] * visibility.width))
    if size >= visibility.width:
        return visibility.unpad(chunk(q, k, v).transpose(1, 2))
    parts = []
    for first in range(0, visibility.width, size):
        last = min(first + size, visibility.width)
        pieces = (q[:, :, first:last], k[:, :, :last], v[:, :, :last])
        parts.append(checkpoint(chunk, *pieces, use_reentrant=False, preserve_rng_state=False))
    return visibility.unpad(torch.cat(parts, 2).transpose(1, 2))


def kernel_attention(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, layer: int, scaling: float
) -> Tensor:
    """The same through Triton kernels."""
    return visible_attention(query, key, value, *layer_visibility(visibility, layer, query, key), scaling)


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
