"""The sparse policy q against the dense policy p, token by token, with logits that never exist whole.

    kl          Σ_v q log(q/p): KL(sparse ‖ dense), exact
    topk-kl     the same over the teacher's K tokens and all others as one: at most `kl`
    sampled-kl  ½ (log q − log p)² of the sampled token (k2): over tokens drawn from q its mean gradient is that of
                `kl`, while k3's would be that of KL(dense ‖ sparse)
    overlap     1 − α = 1 − Σ_v min(p, q)

Each chunk's logits are computed again in the backward pass.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from alula.engine.rollout import Scores
from alula.model import lm_logits


class Compared(NamedTuple):
    logprobs: Tensor
    """float32 [N]: of the sampled tokens under the sparse policy, with gradient."""
    divergence: Tensor
    """float32 [N], with gradient."""
    acceptance: Tensor | None = None
    """float32 [N]: α, without gradient; only against a whole distribution."""
    kl: Tensor | None = None


Head = tuple[Tensor, Tensor | None]


def against_hidden(
    hidden: Tensor, teacher: Tensor, head: Head, targets: Tensor, temperature: float, overlap: bool, chunk: int
) -> Compared:
    """Against the whole distribution of the dense policy, whose hidden states [N, H] are `teacher`."""
    weight, bias = head

    def part(hidden: Tensor, rows: slice) -> tuple[Tensor, ...]:
        lq = (lm_logits(hidden, weight, bias) / temperature).log_softmax(-1)
        with torch.no_grad():
            lp = (lm_logits(teacher[rows], weight, bias) / temperature).log_softmax(-1)
        return compare(lq, lp, targets[rows], overlap)

    return Compared(*_in_chunks(part, hidden, chunk))


def compare(lq: Tensor, lp: Tensor, targets: Tensor, overlap: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob of `targets`, divergence, α and KL from log-probs [N, V] of both policies."""
    q, p = lq.exp(), lp.exp()
    kl = (q * (lq - lp)).sum(-1)
    alpha = torch.minimum(q, p).sum(-1)
    divergence = 1 - alpha if overlap else kl
    return lq.gather(-1, targets[:, None])[:, 0], divergence, alpha.detach().clamp(max=1.0), kl.detach()


def against_scores(
    hidden: Tensor, teacher: Scores, head: Head, targets: Tensor, temperature: float, chunk: int
) -> Compared:
    """Against the dense policy's scores [N] of the sampled tokens, or its top-K lists [N, K] where it has them."""
    weight, bias = head

    def part(hidden: Tensor, rows: slice) -> tuple[Tensor, ...]:
        logits = lm_logits(hidden, weight, bias) / temperature
        normaliser = logits.logsumexp(-1, keepdim=True)
        sampled = (logits.gather(-1, targets[rows, None]) - normaliser)[:, 0]
        if teacher.topk_ids is None or teacher.topk_logprobs is None:
            return sampled, 0.5 * (sampled - teacher.logprobs[rows]).square()
        listed = logits.gather(-1, teacher.topk_ids[rows]) - normaliser
        return sampled, bucketed_kl(listed, teacher.topk_logprobs[rows])

    return Compared(*_in_chunks(part, hidden, chunk))


def bucketed_kl(lq: Tensor, lp: Tensor) -> Tensor:
    """KL over the K listed tokens [N, K] and one bucket of all others, whose mass is known to 1e-6 only."""
    q, p = lq.exp(), lp.exp()
    q_rest, p_rest = ((1 - x.sum(-1)).clamp(min=1e-6) for x in (q, p))
    return (q * (lq - lp)).sum(-1) + q_rest * (q_rest.log() - p_rest.log())


def _in_chunks(part: Callable[..., tuple[Tensor, ...]], hidden: Tensor, chunk: int) -> list[Tensor]:
    found = []
    for first in range(0, max(len(hidden), 1), chunk):
        rows = slice(first, first + chunk)
        if torch.is_grad_enabled():
            found.append(checkpoint(part, hidden[rows], rows, use_reentrant=False, preserve_rng_state=False))
        else:
            found.append(part(hidden[rows], rows))
    return [torch.cat(column) for column in zip(*found)]
