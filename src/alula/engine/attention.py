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

from alula.engine.batch_state import BatchState, StepSize
from alula.engine.kv_cache import KVCache
from alula.ops.accumulate_attention import accumulate_attention
from alula.ops.append import append
from alula.ops.dispatch import use_triton
from alula.ops.packed_attention import packed_attention
from alula.ops.paged_attention import NewTokens, appending_pays, paged_attention, paged_attention_triton
from alula.ops.rotary import Rotary
from alula.ops.select_pages import select_pages

NAME = "alula"


class AttentionContext(Protocol):
    """The batch of one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D] of the pass's tokens -> [T, Hq, D]"""


@dataclass
class PrefillContext:
    """Packed tokens that attend densely, each to its own sequence. They also write their KV and what evictors need.

    A token may attend to KV that is cached already: `keys_page` and `keys_slot` then list all keys.
    """

    cache: KVCache
    cu_seqlens: Tensor
    max_seqlen: int
    one_by_one: Tensor | None = None
    """boundaries on the CPU, if the sequences should be attended one by one"""
    page: Tensor | None = None
    slot: Tensor | None = None
    """int64 [T] each: page and slot of every token; None if nothing is cached"""
    lengths: list[int] = field(default_factory=list)
    """tokens of each sequence in this pass"""
    keys_page: Tensor | None = None
    keys_slot: Tensor | None = None
    """int64 [K] each: page and slot of every key; None if the pass's own tokens are all"""
    cu_seqlens_k: Tensor | None = None
    max_seqlen_k: int | None = None
    key_lengths: list[int] = field(default_factory=list)
    """keys of each sequence"""
    ring_index: Tensor | None = None
    """int64 [G, W]: the packed token whose query belongs to each entry of a prompt's ring"""
    rings: Tensor | None = None
    """[L, G, Hq, W, D]: recent queries of each prompt"""
    attention_sums: list[Tensor | None] | None = None
    """per prompt fp32 [L, Hkv, P]: attention received inside the prompt, or None if its evictor does not need it"""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if self.page is not None and self.slot is not None:
            key, value = self.cache.write(layer, self.page, self.slot, key, value)
        if self.keys_page is not None and self.keys_slot is not None:
            key, value = self.cache.read(layer, self.keys_page, self.keys_slot)
        self.keep_queries(layer, query)
        if self.attention_sums is not None:
            lengths_k = self.key_lengths or self.lengths
            for i, (q, k) in enumerate(zip(query.split(self.lengths), key.split(lengths_k))):
                if self.attention_sums[i] is not None:
                    self.add_attention(layer, i, attention_received(q, k, scaling))
        bounds = (self.cu_seqlens_k, self.max_seqlen_k, self.one_by_one)
        return packed_attention(query, key, value, self.cu_seqlens, self.max_seqlen, scaling, None, *bounds)

    def keep_queries(self, layer: int, query: Tensor) -> None:
        """Copy the queries that evictors need later."""
        if self.rings is not None:
            self.rings[layer] = query[self.ring_index].transpose(1, 2)

    def add_attention(self, layer: int, index: int, received: Tensor) -> None:
        """Note the attention [Hkv, keys] that a sequence's keys received in this pass."""
        sums = self.attention_sums[index]  # type: ignore[index]
        sums[layer] = received  # type: ignore[index]


@dataclass
class ExtendContext(PrefillContext):
    """Given tokens of rows that run: they attend to all that is held, and update the rows' queries and sums."""

    ring: Tensor | None = None
    """the rows' own ring, [L, rows, Hq, W, D]"""
    ring_token: Tensor | None = None
    ring_row: Tensor | None = None
    ring_entry: Tensor | None = None
    """int64 [Q] each: packed tokens whose queries are kept, their rows, and where in the ring"""

    def keep_queries(self, layer: int, query: Tensor) -> None:
        if self.ring is not None and self.ring_token is not None:
            self.ring[layer][self.ring_row, :, self.ring_entry] = query[self.ring_token]

    def add_attention(self, layer: int, index: int, received: Tensor) -> None:
        sums = self.attention_sums[index]  # type: ignore[index]
        sums[layer, :, : received.shape[1]] += received  # type: ignore[index]


@dataclass
class DecodeContext:
    """One new token in each of the first rows: appended to the cache, then attending to it."""

    cache: KVCache
    state: BatchState
    size: StepSize
    page_budget: Tensor | None
    """int32 [rows]: pages that a selector may read"""
    selected: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)
    """Per layer: pages and token counts that were read; None for a layer that read everything. Filled on request."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rotary: Rotary | None = None
    ) -> Tensor:
        """With `rotary`, queries and keys are still to be rotated."""
        cache, state = self.cache, self.state
        bucket, kv_len, read_len = self.size
        kind, features, selector = state.kind, state.features, state.selector
        ring = state.ring[layer] if features.ring else None  # type: ignore[index]
        summaries = cache.summaries[kind.selector][layer] if kind.selector else None
        keys, values = cache.keys[layer], cache.values[layer]
        scales = None if cache.scales is None else cache.scales[:, layer]
        table, tokens, longest = state.table[:bucket, None], state.context_len[:bucket, None], kv_len
        alone = summaries is None and scales is None and not features.accumulated
        if rotary is not None and alone and use_triton(query) and appending_pays(query, cache.geometry.kv_heads):
            new = NewTokens(key, value, state.live, state.position, rotary, ring, state.ring_size)
            return paged_attention_triton(query, keys, values, table, tokens, scaling, longest, new=new)[0]
        query = append(
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
            scales,
            rotary,
        )
        if summaries is not None and selector is not None and layer >= kind.dense_layers:
            table, tokens = select_pages(
                query,
                summaries,
                state.table[:bucket],
                state.context_len[:bucket],
                self.page_budget,  # type: ignore[arg-type]
                cache.page,
                kv_len,
                selector,
            )
            longest = read_len
            if features.record_selected:
                self.selected.append((table.cpu(), tokens.cpu()))
        elif features.record_selected:
            self.selected.append(None)
        out, lse = paged_attention(query, keys, values, table, tokens, scaling, longest, scales)
        if features.accumulated:
            accumulated = state.accumulated[layer]  # type: ignore[index]
            wanted = state.accumulates[:bucket] * state.live[:bucket]
            accumulate_attention(
                query,
                keys,
                state.table[:bucket, None],
                state.context_len[:bucket, None],
                lse,
                scaling,
                min(kv_len, accumulated.shape[2]),
                accumulated,
                wanted,
                None if scales is None else scales[0],
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
    """fp32 [Hkv, K]: Σ over queries, and over the heads of a group, of causal softmax attention. The queries are the
    last tokens of the sequence that the keys belong to."""
    queries, q_heads, dim = query.shape
    length, kv_heads = key.shape[:2]
    q = query.view(queries, kv_heads, q_heads // kv_heads, dim).permute(1, 2, 0, 3).float() * scaling
    k = key.transpose(0, 1).float()[:, None]
    total = torch.zeros(kv_heads, length, device=query.device)
    position = torch.arange(length, device=query.device)
    for first in range(0, queries, block):
        logits = q[:, :, first : first + block] @ k.transpose(-1, -2)
        query_position = position[length - queries + first :][: logits.shape[2], None]
        total += torch.softmax(logits.masked_fill(position > query_position, float("-inf")), -1).sum((1, 2))
    return total
