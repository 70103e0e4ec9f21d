"""Acceptance α of a token: the overlap of the dense and the sparse next-token distribution.

    α = E_{v~q}[min(p(v)/q(v), 1)] = Σ_v min(p(v), q(v)) = 1 − TV(p, q)

(Sparrow, arXiv 2606.08446, eq. 2), with p the dense and q the sparse policy. It is symmetric, lies in [0, 1],
and says nothing about which token was sampled.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alula.errors import require
from alula.mismatch.tail import lower_quantile

Head = Tensor | Callable[[Tensor], Tensor]
"""The LM head: a weight [vocabulary, hidden], or a function to logits (a module with bias, cap or scale)."""


def acceptance(p: Tensor, q: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Exact α in fp32 from logits or log-probs [..., vocabulary] of the two policies.

    Log-probs are logits too, so one function takes either; at a temperature other than 1 pass logits or
    log-probs taken at temperature 1.
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

    Only `chunk` rows of logits exist at a time: 2 · chunk · vocabulary fp32 values (a DistillSparse adapter
    can give the sparse policy a head of its own, hence two).
    """
    parts = [
        acceptance(_logits(a, p_head), _logits(b, q_head), temperature)
        for a, b in zip(p_hidden.split(chunk), q_hidden.split(chunk))
    ]
    return torch.cat(parts) if parts else p_hidden.new_empty(0, dtype=torch.float32)


def _logits(hidden: Tensor, head: Head) -> Tensor:
    return hidden @ head.T if isinstance(head, Tensor) else head(hidden)


def acceptance_bounds(
    p_ids: Tensor, p_logprobs: Tensor, q_ids: Tensor, q_logprobs: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Lower and upper bound on α from the top-K lists [..., K] of both policies (the two K may differ).

    Let A and B be the two lists, a and b their smallest probabilities, P = 1 − Σ_A p and Q = 1 − Σ_B q the
    masses of the tails, m = vocabulary − |A ∪ B|. Unlisted tokens have at most a under p, at most b under q.
    On A ∩ B the overlap is known: c = Σ min(p, q). Everywhere else:

    upper: on A∖B the overlap is at most x = min(Σ_{A∖B} min(p, b), Q), on B∖A at most
      y = min(Σ_{B∖A} min(q, a), P), on the m unlisted tokens at most min(P − y, Q − x, m·min(a, b)). A unit
      of tail mass moved from a listed to an unlisted token gains at most what it loses, so all three are
      reached together: upper = c + x + y + min(P − y, Q − x, m·min(a, b)), and some pair of distributions
      attains it.
    lower: the tails can dodge each other only while there is room. With u = p/a and w = q/b in [0, 1] an
      unlisted token overlaps by at least min(a, b)·(u + w − 1), one of A∖B by min(a, b)·w, one of B∖A by
      min(a, b)·u; summed: lower = c + min(a, b)·max(0, P/a + Q/b − m). c alone is the estimate of Sparrow's
      released code; the second term matters for flat distributions and small vocabularies.

    Computed in fp64: valid up to the rounding of the log-probs given.
    """
    p, q = p_logprobs.double().exp(), q_logprobs.double().exp()
    same = p_ids[..., :, None] == q_ids[..., None, :]
    shared = (torch.minimum(p[..., :, None], q[..., None, :]) * same).sum((-1, -2))
    a, b = p.amin(-1), q.amin(-1)
    p_tail, q_tail = (1 - p.sum(-1)).clamp(min=0), (1 - q.sum(-1)).clamp(min=0)
    only_p, only_q = ~same.any(-1), ~same.any(-2)
    unlisted = vocabulary - p.shape[-1] - only_q.sum(-1)
    least = torch.minimum(a, b)

    x = torch.minimum((torch.minimum(p, b[..., None]) * only_p).sum(-1), q_tail)
    y = torch.minimum((torch.minimum(q, a[..., None]) * only_q).sum(-1), p_tail)
    rest = torch.minimum(torch.minimum(p_tail - y, q_tail - x), unlisted * least)
    upper = (shared + x + y + rest).clamp(max=1.0)

    tiny = torch.finfo(torch.float64).tiny  # a smallest probability of 0 leaves no tail to place
    crowding = p_tail / a.clamp(min=tiny) + q_tail / b.clamp(min=tiny) - unlisted
    lower = shared + torch.where(least > 0, least * crowding.clamp(min=0), 0.0)
    return torch.minimum(lower, upper), upper


def usable(lower: Any, upper: Any, limit: float = 0.02) -> Any:
    """Whether a bracket (of a token's α, or of a tail) is narrow enough to stand for the exact value.

    Works on numbers, arrays and tensors.
    """
    return upper - lower < limit


def bracketed_tail(lower: Tensor, upper: Tensor, *, quantile: float = 0.05, limit: float = 0.02) -> tuple[float, float]:
    """The tails of a lower and an upper bound of α [tokens], which bracket the exact tail: a quantile is monotone.

    Refused where they are too far apart to stand for it.
    """
    low, high = (lower_quantile(bound.double().cpu().numpy(), quantile) for bound in (lower, upper))
    require(
        usable(low, high, limit),
        f"top-K lists leave the tail anywhere between {low:.3f} and {high:.3f}, wider than {limit}; measure it "
        "exactly, with Engine.acceptance, or list more tokens.",
    )
    return low, high
