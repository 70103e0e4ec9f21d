"""Supervised fine-tuning on given answers, with the learner that reinforcement learning uses."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alula.learner.learner import Learner, Update
from alula.learner.packing import Packed


@dataclass
class Trace:
    """A prompt and its answer, end-of-sequence token included."""

    prompt_ids: list[int]
    token_ids: list[int]


def supervised_step(learner: Learner, traces: Sequence[Trace]) -> Update:
    """One optimizer step on −1/N Σ log p(token | prefix), with N answer tokens on all ranks."""
    tokens = torch.tensor(sum(len(trace.token_ids) for trace in traces), dtype=torch.float64)
    count = float(learner.world.all_sum(tokens.to(learner.world.device)))

    def loss(logprobs: Tensor, entropy: Tensor, batch: Packed) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs.sum() / count, {}

    return learner.update(traces, loss)


def warm_up(
    learner: Learner,
    batches: Iterable[Sequence[Trace]],
    *,
    below: float | None = None,
    seen: Callable[[int, float], None] | None = None,
) -> list[float]:
    """One step per batch until a loss is `below` a value. Returns the losses; calls `seen(step, loss)` after each."""
    losses: list[float] = []
    for batch in batches:
        losses.append(supervised_step(learner, batch).loss)
        if seen:
            seen(len(losses), losses[-1])
        if below is not None and losses[-1] < below:
            break
    return losses
