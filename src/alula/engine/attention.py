"""The model's attention, routed to the engine: dense inside prompts, paged over the KV cache while decoding.

transformers calls one attention function per layer (`AttentionInterface`). Here that function is an opaque operator for
`torch.compile`, so it takes tensors only: the layer's number is a tensor, because a Python number would be compiled
into every layer's code, and the batch is the `AttentionContext` of the forward pass that runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from alula.engine.batch_state import BatchFeatures, BatchState
from alula.engine.kv_cache import KVCache
from alula.ops.append import append
from alula.ops.packed_attention import packed_attention
from alula.ops.paged_attention import accumulate_attention, paged_attention
from alula.ops.select_pages import select_pages

NAME = "alula"


class AttentionContext(Protocol):
    """The batch of one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D] of the pass's tokens -> [T, Hq, D]"""


@dataclass
class PrefillContext:
    """Packed sequences that attend densely, each to itself. Prompts also write their KV and what evictors need."""

    cache: KVCache
    cu_seqlens: Tensor
    max_seqlen: int
    page: Tensor | None = None
    slot: Tensor | None = None
    """int64 [T] each: page and slot of every token; None if nothing is cached"""
    lengths: list[int] = field(default_factory=list)
    ring_index: Tensor | None = None
    """int64 [G, W]: the packed token whose query belongs to each entry of a prompt's ring"""
    rings: Tensor | None = None
    """[L, G, Hq, W, D]: recent queries of each prompt"""
    attention_sums: list[Tensor | None] | None = None
    """per prompt fp32 [L, Hkv, P]: attention received inside the prompt, or None if its evictor does not need it"""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if self.page is not None:
            self.cache.keys[layer][self.page, :, self.slot] = key
            self.cache.values[layer][self.page, :, self.slot] = value
        if self.rings is not None:
            self.rings[layer] = query[self.ring_index].transpose(1, 2)
        if self.attention_sums is not None:
            start = 0
            for sums, length in zip(self.attention_sums, self.lengths):
                span = slice(start, start + length)
                if sums is not None:
                    sums[layer] = attention_received(query[span], key[span], scaling)
                start += length
        return packed_attention(query, key, value, self.cu_seqlens, self.max_seqlen, scaling)


@dataclass
class DecodeContext:
    """One new token in each of the rows 0 .. bucket-1: appended to the cache, then attending to it."""

    cache: KVCache
    state: BatchState
    features: BatchFeatures
    bucket: int
    max_kv_len: int
    page_budget: Tensor | None
    """int32 [bucket]: pages that a selector may read"""
    selected: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)
    """Per layer: pages and token counts that were read; None for a layer that read everything. Filled on request."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        cache, state, features, bucket = self.cache, self.state, self.features, self.bucket
        ring = cache.ring[layer] if features.ring else None  # type: ignore[index]
        selector = features.page_selector
        summaries = cache.summaries[layer] if selector else None  # type: ignore[index]
        keys, values = cache.keys[layer], cache.values[layer]
        append(
            query,
            key,
            value,
            keys,
            values,
            state.table,
            state.kv_len,
            state.live,
            state.position,
            state.ring_size,
            ring,
            summaries,
            selector,
        )
        table, tokens = state.table[:bucket, None], state.context_len[:bucket, None]
        if summaries is not None and selector is not None and layer >= features.dense_layers:
            table, tokens = select_pages(
                query,
                summaries,
                state.table[:bucket],
                state.context_len[:bucket],
                self.page_budget,  # type: ignore[arg-type]
                cache.page,
                self.max_kv_len,
                selector,
            )
            if features.record_selected:
                self.selected.append((table.cpu(), tokens.cpu()))
        elif features.record_selected:
            self.selected.append(None)
        out, lse = paged_attention(query, keys, values, table, tokens, scaling, self.max_kv_len)
        if features.accumulates:
            accumulated = cache.accumulated[layer]  # type: ignore[index]
            wanted = state.accumulates[:bucket] * state.live[:bucket]
            accumulate_attention(
                query,
                keys,
                state.table[:bucket, None],
                state.context_len[:bucket, None],
                lse,
                scaling,
                min(self.max_kv_len, accumulated.shape[2]),
                accumulated,
                wanted,
            )
        return out


_context: AttentionContext | None = None


@contextmanager
def attention_context(context: AttentionContext) -> Iterator[None]:
    """Make `context` the batch that the models' attention reads."""
    global _context
    previous, _context = _context, context
    try:
        yield
    finally:
        _context = previous


@torch.library.custom_op("alula::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float) -> Tensor:
    """[1, H, T, D] each -> [1, T, Hq, D]"""
    assert _context is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _context.attend(int(layer), q, k, v, scaling).unsqueeze(0)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    return attend(query, key, value, module.alula_layer, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)


def install(model: nn.Module) -> None:
    """Route a model's attention through `attend`."""
    model.config._attn_implementation = NAME  # type: ignore[union-attr]
    number_layers(model)


def number_layers(model: nn.Module) -> None:
    """Store every attention module's layer number as a tensor, on the CPU, where reading it needs no sync."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.alula_layer = torch.tensor(module.layer_idx)


def attention_received(query: Tensor, key: Tensor, scaling: float, block: int = 512) -> Tensor:
    """fp32 [Hkv, P]: Σ over queries, and over the heads of a group, of causal softmax attention inside a prompt."""
    length, q_heads, dim = query.shape
    kv_heads = key.shape[1]
    q = query.view(length, kv_heads, q_heads // kv_heads, dim).permute(1, 2, 0, 3).float() * scaling
    k = key.transpose(0, 1).float()[:, None]
    total = torch.zeros(kv_heads, length, device=query.device)
    for first in range(0, length, block):
        logits = q[:, :, first : first + block] @ k.transpose(-1, -2)
        later = (
            torch.arange(length, device=query.device)
            > torch.arange(first, first + logits.shape[2], device=query.device)[:, None]
        )
        total += torch.softmax(logits.masked_fill(later, float("-inf")), -1).sum((1, 2))
    return total
