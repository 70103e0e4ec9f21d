"""Writes one new token per row into its page, its query into the ring, and the page's summary when it is full.

Queries and keys may come straight from their projections: they are then rotated on the way (`alula.ops.rotary`).
"""

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.eight_bits import dequantise, power_of_two_triton, quantise, quantise_vector
from alula.ops.rotary import Rotary, rotate_torch, rotated_vector


class Summariser(Protocol):
    """The part of a selector (`alula.sparsity.select`) that writes page summaries."""

    fused: ClassVar[bool]

    def summarise(self, keys: Tensor) -> Tensor: ...


def append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    kv_len: Tensor,
    live: Tensor,
    position: Tensor,
    ring_size: Tensor,
    ring: Tensor | None,
    summaries: Tensor | None,
    selector: Summariser | None,
    scales: Tensor | None = None,
    rotary: Rotary | None = None,
) -> Tensor:
    """q [B, Hq, D], k/v [B, Hkv, D] go to slot kv_len[b] of row b; inactive rows write to the scratch page 0. ring
    [B, Hq, W, D] keeps the last ring_size[b] <= W queries at position % ring_size; summaries
    [P, Hkv, vectors, D], as `selector` summarises a full page. With `scales` uint8 [2, P, Hkv, page] (of keys and
    of values) the token is quantised (`alula.ops.eight_bits`). With `rotary` q and k are rotated first. Returns the
    queries.
    """
    if use_triton(q):
        fused = summaries if selector is not None and selector.fused else None
        query = append_triton(
            q, k, v, keys, values, table, kv_len, live, position, ring_size, ring, fused, scales, rotary
        )
        if selector is not None and not selector.fused:
            _summarise_full_pages(keys, table[: len(k)], kv_len, live, summaries, selector, scales)
        return query
    if rotary is not None:
        here = position[: len(k)]
        at_rows = rotary._replace(cos=rotary.cos[here], sin=rotary.sin[here])
        q, k = rotate_torch(q, rotary.query_norm, at_rows), rotate_torch(k, rotary.key_norm, at_rows)
    append_torch(q, k, v, keys, values, table, kv_len, live, position, ring_size, ring, summaries, selector, scales)
    return q


def append_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    kv_len: Tensor,
    live: Tensor,
    position: Tensor,
    ring_size: Tensor,
    ring: Tensor | None,
    summaries: Tensor | None,
    selector: Summariser | None,
    scales: Tensor | None = None,
) -> None:
    page_size = keys.shape[2]
    rows = torch.arange(len(k), device=k.device)
    at = kv_len[: len(k)].long()
    alive = live[: len(k)] != 0
    listed = torch.where(alive, at // page_size, 0)  # a row that ended may stand just past its table
    page = torch.where(alive, table[rows, listed].long(), 0)
    slot = at % page_size
    if scales is not None:
        k, scales[0, page, :, slot] = quantise(k, keys.dtype)
        v, scales[1, page, :, slot] = quantise(v, values.dtype)
    keys[page, :, slot] = k
    values[page, :, slot] = v
    if ring is not None:
        size = ring_size[: len(k)].long()
        wanted = (size > 0) & alive
        index = rows[wanted]
        ring[index, :, (position[: len(k)] % size.clamp(min=1))[wanted]] = q[wanted]
    if summaries is not None:
        assert selector is not None
        full = page[slot == page_size - 1]
        summaries[full] = selector.summarise(_read(keys, full, summaries.dtype, scales)).to(summaries.dtype)


def _read(keys: Tensor, pages: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """The keys [len(pages), Hkv, page, D] of some pages."""
    return keys[pages] if scales is None else dequantise(keys[pages], scales[0, pages], dtype)


def _summarise_full_pages(
    keys: Tensor,
    table: Tensor,
    kv_len: Tensor,
    live: Tensor,
    summaries: Tensor | None,
    selector: Summariser,
    scales: Tensor | None,
) -> None:
    """Summarise the pages that the new tokens fill, without a sync."""
    assert summaries is not None
    rows, at = torch.arange(len(table), device=keys.device), kv_len[: len(table)].long()
    alive = live[: len(table)] != 0
    page = torch.where(alive, table[rows, torch.where(alive, at // keys.shape[2], 0)].long(), 0)
    full = (at % keys.shape[2] == keys.shape[2] - 1)[:, None, None, None]
    new = selector.summarise(_read(keys, page, summaries.dtype, scales)).to(summaries.dtype)
    summaries[page] = torch.where(full, new, summaries[page])


def append_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    kv_len: Tensor,
    live: Tensor,
    position: Tensor,
    ring_size: Tensor,
    ring: Tensor | None,
    summaries: Tensor | None,
    scales: Tensor | None = None,
    rotary: Rotary | None = None,
) -> Tensor:
    batch, kv_heads, dim = k.shape
    group = q.shape[1] // kv_heads
    page = keys.shape[2]
    normed = rotary is not None and rotary.query_norm is not None
    query = q if rotary is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _append[(batch, kv_heads)](
        q,
        k,
        v,
        keys,
        values,
        table,
        kv_len,
        live,
        position,
        ring_size,
        ring if ring is not None else q,
        summaries if summaries is not None else keys,
        scales if scales is not None else keys,
        query,
        rotary.cos if rotary is not None else q,
        rotary.sin if rotary is not None else q,
        rotary.query_norm if rotary is not None and normed else q,
        rotary.key_norm if rotary is not None and normed else q,
        scales.stride(0) if scales is not None else 0,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        table.stride(0),
        ring.stride(0) if ring is not None else 0,
        ring.stride(1) if ring is not None else 0,
        GROUP=group,
        HEADS=kv_heads,
        DIM=dim,
        DIM_POW2=triton.next_power_of_2(dim),
        PAGE=page,
        PAGE_POW2=triton.next_power_of_2(page),
        RING=ring is not None,
        VECTORS=summaries.shape[2] if summaries is not None else 0,
        QUANTISED=scales is not None,
        ROTATE=rotary is not None,
        NORM=normed,
        EPSILON=rotary.epsilon if rotary is not None else 0.0,
        num_warps=2 if page * dim <= 2048 else 4,
    )
    return query


@triton.jit
def _append(
    q,
    k,
    v,
    keys,
    values,
    table,
    kv_len,
    live,
    position,
    ring_size,
    ring,
    summaries,
    scales,
    query,
    cos,
    sin,
    query_norm,
    key_norm,
    value_scales,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    table_row,
    ring_row,
    ring_head,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_POW2: tl.constexpr,
    RING: tl.constexpr,
    VECTORS: tl.constexpr,
    QUANTISED: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    EPSILON: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, DIM_POW2)
    inside = d < DIM
    at = tl.load(kv_len + row)
    alive = tl.load(live + row) != 0
    slot = at % PAGE
    page = tl.load(table + row * table_row + at // PAGE, mask=alive, other=0).to(tl.int64)
    base = (page * HEADS + head) * PAGE * DIM
    new_key = k + row * k_row + head * k_head
    if ROTATE:
        angle = tl.load(position + row).to(tl.int64) * DIM + d
        row_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        row_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        key = rotated_vector(new_key, key_norm, row_cos, row_sin, DIM, DIM_POW2, NORM, EPSILON)
    else:
        key = tl.load(new_key + d, mask=inside, other=0.0)
    value = tl.load(v + row * v_row + head * v_head + d, mask=inside, other=0.0)
    if QUANTISED:
        key, key_scale = quantise_vector(key, keys.dtype.element_ty == tl.int8)
        value, value_scale = quantise_vector(value, values.dtype.element_ty == tl.int8)
        home = (page * HEADS + head) * PAGE + slot
        tl.store(scales + home, key_scale)
        tl.store(scales + value_scales + home, value_scale)
    tl.store(keys + base + slot * DIM + d, key, mask=inside)
    tl.store(values + base + slot * DIM + d, value, mask=inside)
    if RING:
        size = tl.load(ring_size + row)
        wanted = (size > 0) & alive
        place = tl.load(position + row) % tl.maximum(size, 1)
    if ROTATE or RING:
        for g in tl.static_range(GROUP):
            q_at = head * GROUP + g
            source = q + row * q_row + q_at * q_head
            if ROTATE:
                turned = rotated_vector(source, query_norm, row_cos, row_sin, DIM, DIM_POW2, NORM, EPSILON)
                tl.store(query + (row * (HEADS * GROUP) + q_at) * DIM + d, turned, mask=inside)
            else:
                turned = tl.load(source + d, mask=inside & wanted, other=0.0)
            if RING:
                entry = ring + row.to(tl.int64) * ring_row + q_at * ring_head + place * DIM
                tl.store(entry + d, turned, mask=inside & wanted)
    if VECTORS > 0:  # noqa: SIM102 (decided when compiling)
        if slot == PAGE - 1:
            s = tl.arange(0, PAGE_POW2)
            before = (s < PAGE - 1)[:, None] & inside[None, :]
            old = tl.load(keys + base + s[:, None] * DIM + d[None, :], mask=before, other=0.0).to(tl.float32)
            new = key.to(tl.float32)
            if QUANTISED:
                scale = tl.load(scales + (page * HEADS + head) * PAGE + s, mask=s < PAGE - 1, other=0)
                old *= power_of_two_triton(scale)[:, None]
                new *= power_of_two_triton(key_scale)
            line = summaries + (page * HEADS + head) * VECTORS * DIM + d
            if VECTORS == 1:  # block-topk
                mean = (tl.sum(old, 0) + new) / PAGE
                tl.store(line, mean.to(summaries.dtype.element_ty), mask=inside)
            else:  # quest
                low = tl.minimum(tl.min(tl.where(before, old, float("inf")), 0), new)
                high = tl.maximum(tl.max(tl.where(before, old, float("-inf")), 0), new)
                tl.store(line, low.to(summaries.dtype.element_ty), mask=inside)
                tl.store(line + DIM, high.to(summaries.dtype.element_ty), mask=inside)
