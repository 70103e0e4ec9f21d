"""Causal attention over sequences packed one after another, without padding and without a mask.

On CUDA in half precision: flash attention's packed kernel, or cuDNN's one launch per sequence where they are long;
scaled-dot-product attention per sequence elsewhere. All have a backward pass. Keys and values may have fewer heads than
queries.
"""

import inspect
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from alula.ops.sequence_attention import sequence_attention

GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""torch 2.11 groups heads by default; later versions need the argument."""


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scaling: float,
    window: int | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    one_by_one: Tensor | None = None,
) -> Tensor:
    """softmax(scaling · q kᵀ) v of every token over its own sequence up to itself.

    query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq, D]; `cu_seqlens` int32 [sequences + 1] are the
    boundaries, `max_seqlen` the longest. `window` lets a query see only its last `window` tokens, itself
    included (Mistral's sliding window). Keys may be longer: with boundaries of their own, `cu_seqlens_k`, the queries
    are the last tokens of their sequence. `one_by_one` are the boundaries on the CPU if the sequences should be
    attended one by one (`alula.ops.sequence_attention`).
    """
    if cu_seqlens_k is None or max_seqlen_k is None:
        cu_seqlens_k, max_seqlen_k = cu_seqlens, max_seqlen
    if window is not None and window >= max_seqlen_k:
        window = None
    if one_by_one is not None and window is None:
        return sequence_attention(query, key, value, one_by_one, scaling)[0]
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256:
        options: dict[str, Any] = {
            "scale": scaling,
            "window_size": (-1 if window is None else window - 1, 0),
            **GROUPED,
        }
        boundaries = (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k)
        return cast(Tensor, varlen_attn(query, key, value, *boundaries, **options))
    return _per_sequence(query, key, value, cu_seqlens, cu_seqlens_k, scaling, window)


def _per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    scaling: float,
    window: int | None,
) -> Tensor:
    lengths = cu_seqlens.diff().tolist()
    lengths_k = lengths if cu_seqlens_k is cu_seqlens else cu_seqlens_k.diff().tolist()
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths_k), value.split(lengths_k)):
        mask = None
        if len(q) != len(k) or (window is not None and window < len(q)):
            mask = _banded(len(q), len(k), window or len(k), q.device)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _banded(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: the last `window` keys up to each query; the queries are the last tokens."""
    position = torch.arange(keys - queries, keys, device=device)
    distance = position[:, None] - torch.arange(keys, device=device)[None, :]
    return (distance >= 0) & (distance < window)
