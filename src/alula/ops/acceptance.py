"""Acceptance α of a token: the overlap of the dense and the sparse next-token distribution.

    α = E_{v~q}[min(p(v)/q(v), 1)] = Σ_v min(p(v), q(v)) = 1 − TV(p, q)

(Sparrow, arXiv 2606.08446, eq. 2), with p the dense and q the sparse policy. It is symmetric, lies in [0, 1],
and says nothing about which token was sampled.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Head = Tensor | Callable[[Tensor], Tensor]
"""The LM head: a weight [vocabulary, hidden], or a function to logits (a module with bias, cap or scale)."""


def acceptance(p: Tensor, q: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Exact α in fp32 from logits or log-probs [..., vocabulary] of the two policies.

    Log-probs are valid logits. For a temperature other than 1, pass logits or log-probs of temperature 1.
    """
    p, q = ((x.float() / temperature).softmax(-1) for x in (p, q))
    return torch.minimum(p, q).sum(-1).clamp_(max=1.0)


@torch.no_grad()
def chunked_acceptance(
    p_hidden: Tensor,
    p_head: Head,
    q_hidden: Tensor,
    q_head: Head,
    *,
    temperature: float = 1.0,
    chunk: int = 256,
) -> Tensor:
    """Exact α [tokens] from two last hidden states [tokens, hidden] and their heads.

    Only `chunk` rows of logits exist at a time: 2 · chunk · vocabulary fp32 values. The sparse policy may have its own
    head (a DistillSparse adapter), hence two heads.
    """
    parts = [
        acceptance(_logits(a, p_head), _logits(b, q_head), temperature)
        for a, b in zip(p_hidden.split(chunk), q_hidden.split(chunk))
    ]
    return torch.cat(parts) if parts else p_hidden.new_empty(0, dtype=torch.float32)


def _logits(hidden: Tensor, head: Head) -> Tensor:
    return hidden @ head.T if isinstance(head, Tensor) else head(hidden)
