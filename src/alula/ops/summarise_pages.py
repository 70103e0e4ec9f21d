"""Summaries of full pages that were not filled token by token: those of prompts, and of what an eviction kept."""

from torch import Tensor

from alula.ops.append import Summariser
from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.eight_bits import dequantise, power_of_two_triton

TORCH_BYTES = 1 << 28
"""torch makes copies of the keys: it summarises at most this many bytes of them at a time."""

BLOCK_BYTES = 1 << 15
"""float32 keys that one program holds in registers."""


def summarise_pages(
    keys: Tensor, pages: Tensor, summaries: Tensor, selector: Summariser, scales: Tensor | None = None
) -> None:
    """Write the summaries of `pages` int64 [N] in every layer: keys [L, P, Hkv, page, D], summaries [L, P, Hkv,
    vectors, D]. `scales` uint8 [L, P, Hkv, page] are those of quantised keys."""
    if len(pages):
        fused = selector.fused and use_triton(keys)
        summarise = summarise_pages_triton if fused else summarise_pages_torch
        summarise(keys, pages, summaries, selector, scales)


def summarise_pages_torch(
    keys: Tensor, pages: Tensor, summaries: Tensor, selector: Summariser, scales: Tensor | None = None
) -> None:
    layer_bytes = len(pages) * keys[0, 0].numel() * summaries.element_size()
    together = max(1, TORCH_BYTES // layer_bytes)
    for first in range(0, len(keys), together):  # a prompt's pages are many, an eviction's few
        layers = slice(first, first + together)
        read = keys[layers, pages]
        if scales is not None:
            read = dequantise(read, scales[layers, pages], summaries.dtype)
        summaries[layers, pages] = selector.summarise(read).to(summaries.dtype)


def summarise_pages_triton(
    keys: Tensor, pages: Tensor, summaries: Tensor, selector: Summariser, scales: Tensor | None = None
) -> None:
    layers, _, kv_heads, page, dim = keys.shape
    dim_pow2 = triton.next_power_of_2(dim)
    block = min(page, max(1, BLOCK_BYTES // (4 * dim_pow2)))
    _summarise_pages[(len(pages), kv_heads, layers)](
        keys,
        pages,
        summaries,
        scales if scales is not None else keys,
        keys.stride(0),
        summaries.stride(0),
        scales.stride(0) if scales is not None else 0,
        HEADS=kv_heads,
        PAGE=page,
        DIM=dim,
        DIM_POW2=dim_pow2,
        VECTORS=summaries.shape[3],
        BLOCK=block,
        QUANTISED=scales is not None,
        num_warps=2 if block * dim <= 2048 else 4,
    )


# The pages of an event lie anywhere in one upload.
@triton.jit(do_not_specialize=["pages"])
def _summarise_pages(
    keys,
    pages,
    summaries,
    scales,
    keys_layer,
    summaries_layer,
    scales_layer,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    layer = tl.program_id(2).to(tl.int64)
    line = tl.load(pages + tl.program_id(0)).to(tl.int64) * HEADS + tl.program_id(1)
    d = tl.arange(0, DIM_POW2)
    inside = d < DIM
    total = tl.zeros([DIM_POW2], tl.float32)
    low = tl.full([DIM_POW2], float("inf"), tl.float32)
    high = tl.full([DIM_POW2], float("-inf"), tl.float32)
    for first in tl.static_range(0, PAGE, BLOCK):
        slot = line * PAGE + first + tl.arange(0, BLOCK)
        start = keys + layer * keys_layer + slot * DIM
        key = tl.load(start[:, None] + d[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        if QUANTISED:
            key *= power_of_two_triton(tl.load(scales + layer * scales_layer + slot))[:, None]
        if VECTORS == 1:
            total += tl.sum(key, 0)
        else:
            low = tl.minimum(low, tl.min(key, 0))
            high = tl.maximum(high, tl.max(key, 0))
    out = summaries + layer * summaries_layer + line * VECTORS * DIM + d
    if VECTORS == 1:  # block-topk
        tl.store(out, (total / PAGE).to(summaries.dtype.element_ty), mask=inside)
    else:  # quest
        tl.store(out, low.to(summaries.dtype.element_ty), mask=inside)
        tl.store(out + DIM, high.to(summaries.dtype.element_ty), mask=inside)
