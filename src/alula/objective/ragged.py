"""Rollouts of unequal lengths without padding: tokens [T] and `sequence` [T], the rollout of each."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int64 [T]: the rollout of each token, for rollouts of these lengths one after another."""
    return torch.repeat_interleave(
        torch.arange(len(lengths), device=device), torch.tensor(lengths, dtype=torch.int64, device=device)
    )


def flatten(mask: Tensor, *padded: Tensor) -> tuple[Tensor, ...]:
    """`sequence` [T] of the tokens where `mask` [N, L] is set, and each `padded` [N, L] tensor there."""
    real = mask.bool()
    rows = torch.arange(mask.shape[0], device=mask.device)[:, None].expand_as(real)
    return (rows[real], *(tensor[real] for tensor in padded))


def unflatten(values: Tensor, mask: Tensor) -> Tensor:
    """The inverse: values [T] at the set places of `mask` [N, L], zero (or False) elsewhere."""
    padded = values.new_zeros(mask.shape)
    padded[mask.bool()] = values
    return padded


def count(sequence: Tensor, sequences: int) -> Tensor:
    """Tokens of each rollout, int64 [N]."""
    return torch.bincount(sequence, minlength=sequences)


def total(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Sum of each rollout's values, [N]; differentiable."""
    return values.new_zeros(sequences).index_add(0, sequence, values)


def position(sequence: Tensor, sequences: int) -> Tensor:
    """Index of each token within its own rollout, int64 [T]; rollouts may be interleaved."""
    order = torch.argsort(sequence, stable=True)
    lengths = count(sequence, sequences)
    starts = lengths.cumsum(0) - lengths
    places = torch.empty_like(sequence)
    places[order] = torch.arange(len(sequence), device=sequence.device) - starts[sequence[order]]
    return places


def first(found: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Index within its rollout of each rollout's first token where `found` [T] is set, -1 if none is; [N]."""
    never = torch.iinfo(torch.int64).max
    places = torch.where(found, position(sequence, sequences), never)
    index = torch.full((sequences,), never, device=sequence.device).scatter_reduce(0, sequence, places, "amin")
    return torch.where(index == never, -1, index)
