"""Moves KV between pages: gather a sequence's keys, copy the kept tokens into new pages, switch to those."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.eight_bits import dequantise, power_of_two_triton


@dataclass(frozen=True)
class PagedKeys:
    """The first n keys of some sequences, as views of the cache's pages."""

    pool: Tensor
    """[L, P, Hkv, page, D]"""
    table: Tensor
    """int32 [C, pages]"""
    n: int
    scales: Tensor | None = None
    """uint8 [L, P, Hkv, page] of quantised keys"""
    dtype: torch.dtype | None = None
    """dtype of the gathered keys, if they are quantised"""

    @property
    def shape(self) -> tuple[int, int, int]:
        """R = C·L (row after row), Hkv, n."""
        return len(self.table) * self.pool.shape[0], self.pool.shape[2], self.n

    def first_layer(self) -> "PagedKeys":
        scales = None if self.scales is None else self.scales[:1]
        return replace(self, pool=self.pool[:1], scales=scales)

    @cached_property
    def gathered(self) -> Tensor:
        """[R, Hkv, n, D]: gathered at the first use."""
        return gather_keys(self.pool, self.table, self.n, self.scales, self.dtype).flatten(0, 1)


def gather_keys(
    keys: Tensor, table: Tensor, n: int, scales: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """keys [L, P, Hkv, page, D], table [C, pages] -> [C, L, Hkv, n, D]: the first n keys of each sequence.

    Quantised keys with `scales` uint8 [L, P, Hkv, page] are returned as `dtype`.
    """
    layers, _, kv_heads, page, dim = keys.shape
    rows = len(table)
    if use_triton(keys):
        out = torch.empty(rows, layers, kv_heads, n, dim, dtype=dtype or keys.dtype, device=keys.device)
        _copy[(triton.cdiv(n, 64), rows * layers, kv_heads)](
            keys,
            keys,
            out,
            out,
            keys,
            table,
            table,
            scales if scales is not None else keys,
            scales.stride(0) if scales is not None else 0,
            0,
            keys.stride(0),
            n,
            table.stride(0),
            0,
            LAYERS=layers,
            HEADS=kv_heads,
            PAGE=page,
            DIM=dim,
            DIM_POW2=triton.next_power_of_2(dim),
            BLOCK=64,
            VALUES=False,
            PAGED_OUT=False,
            INDEXED=False,
            QUANTISED=scales is not None,
            num_warps=4,
        )
        return out
    pages = table[:, : -(-n // page)].long()
    found = keys[:, pages]  # [L, C, pages, Hkv, page, D]
    if scales is not None:
        found = dequantise(found, scales[:, pages], dtype or torch.float32)
    return found.permute(1, 0, 3, 2, 4, 5).reshape(rows, layers, kv_heads, -1, dim)[..., :n, :]


def compact(keys: Tensor, values: Tensor, kept: Tensor, old: Tensor, new: Tensor, scales: Tensor | None = None) -> None:
    """Token kept[c, l, h, i] of the pages old[c] becomes token i of the pages new[c], in every layer and head.

    kept int32 [C, L, Hkv, count]; old and new int32 [C, pages]. `old` and `new` must not share pages. The `scales` of
    quantised tokens, uint8 [2, L, P, Hkv, page], move with them.
    """
    layers, _, kv_heads, page, dim = keys.shape
    rows, count = len(kept), kept.shape[-1]
    if use_triton(keys):
        _copy[(triton.cdiv(count, 64), rows * layers, kv_heads)](
            keys,
            values,
            keys,
            values,
            kept,
            old,
            new,
            scales if scales is not None else keys,
            scales.stride(1) if scales is not None else 0,
            scales.stride(0) if scales is not None else 0,
            keys.stride(0),
            count,
            old.stride(0),
            new.stride(0),
            LAYERS=layers,
            HEADS=kv_heads,
            PAGE=page,
            DIM=dim,
            DIM_POW2=triton.next_power_of_2(dim),
            BLOCK=64,
            VALUES=True,
            PAGED_OUT=True,
            INDEXED=True,
            QUANTISED=scales is not None,
            num_warps=4,
        )
        return
    layer = torch.arange(layers, device=keys.device)[None, :, None, None]
    head = torch.arange(kv_heads, device=keys.device)[None, None, :, None]
    kept = kept.long()
    row = torch.arange(rows, device=keys.device)[:, None, None, None]
    source = old.long()[row, kept // page]
    i = torch.arange(count, device=keys.device)
    target = new.long()[:, i // page][:, None, None]
    for cache in (keys, values, *(() if scales is None else scales)):
        cache[layer, target, head, i % page] = cache[layer, source, head, kept % page]


def install(table: Tensor, kv_len: Tensor, row: Tensor, pages: Tensor, count: int) -> None:
    """Batch row row[c] now holds `count` tokens in pages[c]: table [rows, width], kv_len [rows], pages [C, <= width],
    all int32."""
    if use_triton(table):
        _install[(len(row),)](
            table,
            kv_len,
            row,
            pages,
            count,
            table.stride(0),
            row.stride(0),
            pages.stride(0),
            pages.shape[1],
            BLOCK=64,
            num_warps=1,
        )
        return
    table[row, : pages.shape[1]] = pages
    kv_len[row] = count


# The tables of an event lie anywhere in one upload: nothing is specialised on where, or on how wide they are.
@triton.jit(do_not_specialize=["row", "pages", "count", "row_stride", "pages_row", "width"])
def _install(table, kv_len, row, pages, count, table_row, row_stride, pages_row, width, BLOCK: tl.constexpr):
    c = tl.program_id(0)
    target = tl.load(row + c * row_stride)
    for first in range(0, width, BLOCK):
        i = first + tl.arange(0, BLOCK)
        page = tl.load(pages + c * pages_row + i, mask=i < width, other=0)
        tl.store(table + target * table_row + i, page, mask=i < width)
    tl.store(kv_len + target, count)


@triton.jit(do_not_specialize=["old", "new", "count", "old_row", "new_row"])
def _copy(
    keys,
    values,
    keys_out,
    values_out,
    kept,
    old,
    new,
    scales,
    scales_layer,
    value_scales,
    layer_stride,
    count,
    old_row,
    new_row,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    PAGED_OUT: tl.constexpr,
    INDEXED: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    block, row_layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_layer // LAYERS
    layer = (row_layer % LAYERS).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM_POW2)
    valid = i < count
    mask = valid[:, None] & (d < DIM)[None, :]
    line = (row_layer * HEADS + head).to(tl.int64) * count
    source = tl.load(kept + line + i, mask=valid, other=0) if INDEXED else i
    page = tl.load(old + row * old_row + source // PAGE, mask=valid, other=0).to(tl.int64)
    slot = (page * HEADS + head) * PAGE + source % PAGE
    start = layer * layer_stride + slot * DIM
    if PAGED_OUT:
        page_out = tl.load(new + row * new_row + i // PAGE, mask=valid, other=0).to(tl.int64)
        slot_out = (page_out * HEADS + head) * PAGE + i % PAGE
        end = layer * layer_stride + slot_out * DIM
        if QUANTISED:
            scales += layer * scales_layer
            tl.store(scales + slot_out, tl.load(scales + slot, mask=valid, other=0), mask=valid)
            scale = tl.load(scales + value_scales + slot, mask=valid, other=0)
            tl.store(scales + value_scales + slot_out, scale, mask=valid)
    else:
        end = (line + i) * DIM
    data = tl.load(keys + start[:, None] + d[None, :], mask=mask, other=0.0)
    if QUANTISED and not PAGED_OUT:
        scale = tl.load(scales + layer * scales_layer + slot, mask=valid, other=0)
        data = (data.to(tl.float32) * power_of_two_triton(scale)[:, None]).to(keys_out.dtype.element_ty)
    tl.store(keys_out + end[:, None] + d[None, :], data, mask=mask)
    if VALUES:
        data = tl.load(values + start[:, None] + d[None, :], mask=mask, other=0.0)
        tl.store(values_out + end[:, None] + d[None, :], data, mask=mask)
