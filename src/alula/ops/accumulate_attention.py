"""H2O's running sum of the attention that every cached token has received."""

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton
from alula.ops.eight_bits import power_of_two, power_of_two_triton


def accumulate_attention(
    q: Tensor,
    keys: Tensor,
    table: Tensor,
    tokens: Tensor,
    lse: Tensor,
    scaling: float,
    most_tokens: int,
    accumulated: Tensor,
    rows: Tensor,
    scales: Tensor | None = None,
) -> None:
    """H2O's running sum: accumulated[row, h, t] += Σ over the group of softmax(q·k)[t], for rows where `rows`.
    `scales` uint8 [P, Hkv, page] are those of quantised keys."""
    if use_triton(q):
        batch, q_heads, dim = q.shape
        _, kv_heads, page, _ = keys.shape
        block = 64
        _accumulate[(batch, kv_heads, triton.cdiv(most_tokens, block))](
            q,
            keys,
            table,
            tokens,
            lse,
            accumulated,
            rows,
            scales if scales is not None else keys,
            q.stride(0),
            q.stride(1),
            table.stride(0),
            tokens.stride(0),
            accumulated.stride(0),
            accumulated.stride(1),
            scaling,
            GROUP=q_heads // kv_heads,
            HEADS=kv_heads,
            DIM=dim,
            DIM_POW2=triton.next_power_of_2(dim),
            PAGE=page,
            BLOCK_N=block,
            QUANTISED=scales is not None,
            num_warps=4,
        )
    else:
        accumulate_attention_torch(q, keys, table, tokens, lse, scaling, most_tokens, accumulated, rows, scales)


def accumulate_attention_torch(
    q: Tensor,
    keys: Tensor,
    table: Tensor,
    tokens: Tensor,
    lse: Tensor,
    scaling: float,
    most_tokens: int,
    accumulated: Tensor,
    rows: Tensor,
    scales: Tensor | None = None,
) -> None:
    batch, q_heads, dim = q.shape
    _, kv_heads, page, _ = keys.shape
    group = q_heads // kv_heads
    pages = table[:, 0, : -(-most_tokens // page)].long()
    key = keys[pages].transpose(1, 2).reshape(batch, kv_heads, -1, dim)[:, :, :most_tokens].float()
    if scales is not None:
        scale = scales[pages].transpose(1, 2).reshape(batch, kv_heads, -1)[:, :, :most_tokens]
        key = key * power_of_two(scale)[..., None]
    logits = (q.view(batch, kv_heads, group, dim).float() * scaling) @ key.transpose(-1, -2)
    weights = torch.exp(logits - lse.view(batch, kv_heads, group, 1)).sum(2)
    valid = torch.arange(key.shape[2], device=q.device) < tokens[:, :1, None]
    valid = valid & (rows[:, None, None] != 0)
    accumulated[:batch, :, : key.shape[2]] += weights.masked_fill(~valid, 0)


@triton.jit
def _accumulate(
    q,
    keys,
    table,
    tokens,
    lse,
    accumulated,
    rows,
    scales,
    q_row,
    q_head,
    table_row,
    tokens_row,
    acc_row,
    acc_head,
    scaling,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tokens + row * tokens_row)
    wanted = tl.load(rows + row)
    first = block * BLOCK_N
    if (first < count) & (wanted != 0):
        t = first + tl.arange(0, BLOCK_N)
        valid = t < count
        d = tl.arange(0, DIM_POW2)
        page = tl.load(table + row * table_row + t // PAGE, mask=valid, other=0).to(tl.int64)
        slot = (page * HEADS + head) * PAGE + t % PAGE
        line = slot * DIM
        key = tl.load(keys + line[:, None] + d[None, :], mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
        key = key.to(tl.float32)
        if QUANTISED:
            key *= power_of_two_triton(tl.load(scales + slot, mask=valid, other=0))[:, None]
        weights = tl.zeros([BLOCK_N], tl.float32)
        for g in tl.static_range(GROUP):
            query = tl.load(q + row * q_row + (head * GROUP + g) * q_head + d, mask=d < DIM, other=0.0)
            logits = tl.sum(key * query.to(tl.float32)[None, :], 1) * scaling
            weights += tl.exp(logits - tl.load(lse + row * (HEADS * GROUP) + head * GROUP + g))
        place = accumulated + row * acc_row + head * acc_head + t
        tl.store(place, tl.load(place, mask=valid, other=0.0) + weights, mask=valid)
