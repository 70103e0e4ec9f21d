"""Causal attention of packed sequences, one launch each: cuDNN's kernels for Hopper.

On an H200 they run long sequences at nearly twice the rate of flash attention's packed kernel. cuDNN plans every shape
it meets for about 0.1 s, so a sequence is padded to one of a few lengths. Nothing is copied for that: causal queries
never see the padding, and what the padding reads, the sequences that follow, is thrown away. Sequences that all have
the same such length take one launch together, and their results are not copied.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

STEP = 256
"""Lengths are padded to multiples of this, or of an eighth of the power of two below them."""

LONG = 3072
"""Where one launch per sequence pays: the mean length that a token sees."""


def padded(length: int) -> int:
    step = max(STEP, (1 << (length.bit_length() - 1)) // 8)
    return -(-length // step) * step


def one_by_one(lengths: Sequence[int], head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Boundaries int64 [sequences + 1], on the CPU, of sequences that should be attended one by one; else None."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or head_dim != 128:
        return None  # narrower heads: flash attention is as fast up to 8,192 tokens
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    long = sum(n * n for n in lengths) >= LONG * sum(lengths)
    return torch.tensor([0, *accumulate(lengths)]) if hopper and long else None


@torch.library.custom_op("alula::sequence_attention", mutates_args=())
def sequence_attention(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """query [T, Hq, D], key and value [T, Hkv, D], boundaries [sequences + 1] on the CPU -> (out [T, Hq, D],
    logsumexp fp32 [T, Hq])."""
    q, k, v = map(_rows, (query, key, value))
    spans = _spans(boundaries)
    length = spans[0][1]
    if len(q) == len(spans) * length and padded(length) == length and {b - a for a, b in spans} == {length}:
        own_q, own_k, own_v = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        one, one_lse = (x.transpose(1, 2).contiguous() for x in _forward(own_q, own_k, own_v, scaling))
        return one.view(query.shape), one_lse.view(query.shape[:2])
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    for start, stop in spans:
        own_q, own_k, own_v = (_sequence(x, start, stop) for x in (q, k, v))
        one, one_lse = _forward(own_q, own_k, own_v, scaling)
        out[start:stop] = one[0, :, : stop - start].transpose(0, 1)
        lse[start:stop] = one_lse[0, :, : stop - start].transpose(0, 1)
    return out, lse


@sequence_attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("alula::sequence_attention_backward", mutates_args=())
def sequence_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    boundaries: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, g = map(_rows, (query, key, value, out, gradient))
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
    for start, stop in _spans(boundaries):
        more = padded(stop - start) - (stop - start)
        # The padding's gradient is 0, and its weights, exp(score - lse), too: it adds nothing to real keys.
        own = torch.nn.functional.pad(g[start:stop], (0, 0, 0, 0, 0, more)).transpose(0, 1)[None]
        own_lse = torch.nn.functional.pad(lse[start:stop], (0, 0, 0, more), value=1e30).t().contiguous()[None]
        own_q, own_k, own_v, own_out = (_sequence(x, start, stop) for x in (q, k, v, o))
        ones = _backward(own, own_q, own_k, own_v, own_out, own_lse, scaling)
        for all_, one in zip(gradients, ones):
            all_[start:stop] = one[0, :, : stop - start].transpose(0, 1)
    return gradients[0], gradients[1], gradients[2]


@sequence_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, boundaries, ctx.scaling = inputs
    ctx.save_for_backward(query, key, value, *output, boundaries)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple:
    *saved, boundaries = ctx.saved_tensors
    return *sequence_attention_backward(gradient, *saved, boundaries, ctx.scaling), None, None


sequence_attention.register_autograd(_differentiate, setup_context=_keep)


def _spans(boundaries: Tensor) -> list[tuple[int, int]]:
    ends = boundaries.tolist()
    return [(start, stop) for start, stop in pairwise(ends) if stop > start]


def _rows(x: Tensor) -> Tensor:
    """With strides that do not depend on the number of tokens: cuDNN plans anew for other strides."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _sequence(x: Tensor, start: int, stop: int) -> Tensor:
    """[1, H, padded length, D]: the sequence and what follows it, or zeros after the last one."""
    end = start + padded(stop - start)
    if end > len(x):
        return torch.nn.functional.pad(x[start:], (0, 0, 0, 0, 0, end - len(x))).transpose(0, 1)[None]
    return x[start:end].transpose(0, 1)[None]


def _forward(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """[B, H, S, D] each -> (out [B, Hq, S, D], logsumexp [B, Hq, S])"""
    if q.is_cuda:
        # No boundaries: with them cuDNN takes its packed path, which is slow and has a wrong backward pass.
        shape = (None, None, q.shape[2], k.shape[2])
        results = torch.ops.aten._cudnn_attention_forward(q, k, v, None, *shape, True, 0.0, True, False, scale=scaling)
        return results[0], results[1][..., 0]
    scores = _scores(q, k, scaling)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.softmax(scores, -1).to(v.dtype) @ v, torch.logsumexp(scores, -1)


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda:
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is off
        shape = (None, None, q.shape[2], k.shape[2])
        gradients = torch.ops.aten._cudnn_attention_backward(
            gradient, q, k, v, out, lse[..., None], state, state, None, *shape, 0.0, True, scale=scaling
        )
        return gradients[0], gradients[1], gradients[2]
    group = q.shape[1] // k.shape[1]
    weights = torch.exp(_scores(q, k, scaling) - lse[..., None])
    inner = gradient.float() @ v.repeat_interleave(group, 1).float().transpose(-1, -2)
    scores = weights * (inner - (gradient.float() * out.float()).sum(-1, keepdim=True)) * scaling
    dq = scores @ k.repeat_interleave(group, 1).float()
    dk, dv = scores.transpose(-1, -2) @ q.float(), weights.transpose(-1, -2) @ gradient.float()
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    scores = q.float() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().transpose(-1, -2) * scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf"))
