"""Writes the KV of packed tokens (prompts, given tokens) into their pages, in one launch."""

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.eight_bits import dequantise, power_of_two_triton, quantise, quantise_vector


def write_tokens(
    key: Tensor, value: Tensor, page: Tensor, slot: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """key/value [T, Hkv, D] go to slot `slot[t]` of page `page[t]` of keys/values [P, Hkv, page, D]; returns them as
    they will be read. With `scales` uint8 [2, P, Hkv, page] (of keys and of values) they are quantised
    (`alula.ops.eight_bits`)."""
    write = write_tokens_triton if use_triton(key) else write_tokens_torch
    return write(key, value, page, slot, keys, values, scales)


def write_tokens_torch(
    key: Tensor, value: Tensor, page: Tensor, slot: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if scales is None:
        keys[page, :, slot] = key
        values[page, :, slot] = value
        return key, value
    read = []
    for x, pool, exponents in zip((key, value), (keys, values), scales):
        stored, exponent = quantise(x, pool.dtype)
        pool.view(torch.uint8)[page, :, slot], exponents[page, :, slot] = stored.view(torch.uint8), exponent
        read.append(dequantise(stored, exponent, x.dtype))
    return read[0], read[1]


def write_tokens_triton(
    key: Tensor, value: Tensor, page: Tensor, slot: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The last dimension of `key` and `value` is contiguous."""
    tokens, heads, dim = key.shape
    read_key, read_value = key, value
    if scales is not None:
        read_key, read_value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (key, value))
    _write_tokens[(tokens,)](
        key,
        value,
        page,
        slot,
        keys,
        values,
        scales if scales is not None else keys,
        scales.stride(0) if scales is not None else 0,
        read_key,
        read_value,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        HEADS=heads,
        DIM=dim,
        DIM_POW2=triton.next_power_of_2(dim),
        PAGE=keys.shape[2],
        QUANTISED=scales is not None,
        num_warps=1,
    )
    return read_key, read_value


@triton.jit
def _write_tokens(
    key,
    value,
    page,
    slot,
    keys,
    values,
    scales,
    value_scales,
    read_key,
    read_value,
    key_row,
    key_head,
    value_row,
    value_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM_POW2)
    inside = d < DIM
    first = tl.load(page + row).to(tl.int64) * HEADS * PAGE + tl.load(slot + row)
    for head in tl.static_range(HEADS):
        place = first + head * PAGE
        k = tl.load(key + row * key_row + head * key_head + d, mask=inside, other=0.0)
        v = tl.load(value + row * value_row + head * value_head + d, mask=inside, other=0.0)
        if QUANTISED:
            k, key_scale = quantise_vector(k, keys.dtype.element_ty == tl.int8)
            v, value_scale = quantise_vector(v, values.dtype.element_ty == tl.int8)
            tl.store(scales + place, key_scale)
            tl.store(scales + value_scales + place, value_scale)
            line = (row * HEADS + head) * DIM + d
            read = k.to(tl.float32) * power_of_two_triton(key_scale)
            tl.store(read_key + line, read.to(read_key.dtype.element_ty), mask=inside)
            read = v.to(tl.float32) * power_of_two_triton(value_scale)
            tl.store(read_value + line, read.to(read_value.dtype.element_ty), mask=inside)
        tl.store(keys + place * DIM + d, k, mask=inside)
        tl.store(values + place * DIM + d, v, mask=inside)
