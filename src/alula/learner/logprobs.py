"""LM head and log-probs in chunks of positions: the full logits [N, vocabulary] are never materialised.

With a vocabulary of 152k and 16k tokens the float32 logits would take 10 GB, and their gradient the same. Here each
chunk's logits exist only while they are used, and the backward pass recomputes them.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from alula.models.load import lm_logits

CHUNK = 2048
"""Positions per chunk: 1.2 GB of float32 logits at a vocabulary of 152k, large enough to keep a GPU busy."""


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    bias: Tensor | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weightᵀ / temperature) at `targets`, and the entropy of that softmax (no gradient).

    hidden [N, H], weight [V, H], targets [N] -> float32 [N] each. The gradients of `hidden`, `weight` and
    `bias` are summed over chunks in float32.
    """
    logprobs, entropies = _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, chunk, entropy)
    return logprobs, entropies


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        measured = fused(statistics, hidden)
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normaliser, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs) if entropy else None
        for rows in chunks(len(targets), chunk):
            logits = lm_logits(hidden[rows], weight, bias)
            logprobs[rows], normaliser[rows], chunk_entropies = measured(logits, targets[rows], temperature, entropy)
            if entropies is not None:
                entropies[rows] = chunk_entropies
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.temperature, ctx.chunk = temperature, chunk
        if entropies is not None:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        logit_gradient = fused(_logit_gradient, hidden)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        for rows in chunks(len(targets), ctx.chunk):
            logits = lm_logits(hidden[rows], weight, bias)
            grad = logit_gradient(
                logits, targets[rows], normaliser[rows], gradient[rows], ctx.temperature, hidden.dtype
            )
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += _wide_mm(grad.T, hidden[rows])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def statistics(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-prob of the target, log of the normaliser, and entropy -Σ p log p, at the temperature."""
    logits = logits / temperature
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    if not entropy:
        return logprobs, normaliser, None
    # A token with logit -inf has probability 0 and no share in the entropy: 0 · -inf must not become nan.
    everywhere = (logits - normaliser[:, None]).clamp_min(torch.finfo(logits.dtype).min)
    return logprobs, normaliser, -(everywhere.exp() * everywhere).sum(-1)


def _logit_gradient(
    logits: Tensor, targets: Tensor, normaliser: Tensor, gradient: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    """d logprob / d logits = (1[v = target] - p_v) / temperature, times the incoming gradient."""
    probabilities = torch.exp(logits / temperature - normaliser[:, None])
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    chosen = (vocabulary == targets[:, None]).to(logits.dtype)
    return ((chosen - probabilities) * (gradient / temperature)[:, None]).to(dtype)


def fused(function: Callable[..., Any], hidden: Tensor) -> Callable[..., Any]:
    """Compiled on a GPU: one or two passes over a chunk's logits instead of eight."""
    return _compiled(function) if hidden.is_cuda else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """a b with a float32 result."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def chunks(length: int, chunk: int) -> Iterator[slice]:
    """Slices of `chunk` positions; a single empty one for length 0, which keeps shapes."""
    for start in range(0, max(length, 1), chunk):
        yield slice(start, min(start + chunk, length))
