"""Rollouts of different lengths without padding: tokens [T], and `sequence` [T] with the rollout of each token."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int64 [T]: the rollout of each token, for consecutive rollouts of these lengths."""
    return torch.repeat_interleave(
        torch.arange(len(lengths), device=device), torch.tensor(lengths, dtype=torch.int64, device=device)
    )


def steps(step: Tensor) -> int:
    """The number of optimizer steps that `step` [N] numbers from 0."""
    return int(step.max()) + 1 if len(step) else 1


def concatenate(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """[T]: the tokens of all rollouts; a rank may have none."""
    return torch.cat(list(parts)) if parts else torch.empty(0, device=device)


def flatten(mask: Tensor, *padded: Tensor) -> tuple[Tensor, ...]:
    """`sequence` [T] of the tokens where `mask` [N, L] is set, and each `padded` [N, L] tensor there."""
    real = mask.bool()
    rows = torch.arange(mask.shape[0], device=mask.device)[:, None].expand_as(real)
    return (rows[real], *(tensor[real] for tensor in padded))


def unflatten(values: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `flatten`: values [T] where `mask` [N, L] is set, zero (or False) elsewhere."""
    padded = values.new_zeros(mask.shape)
    padded[mask.bool()] = values
    return padded


def count(sequence: Tensor, sequences: int) -> Tensor:
    """int64 [N]: number of tokens of each rollout."""
    return torch.bincount(sequence, minlength=sequences)


def total(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """[N]: sum of each rollout's values; differentiable."""
    return values.new_zeros(sequences).index_add(0, sequence, values)


def position(sequence: Tensor, sequences: int) -> Tensor:
    """int64 [T]: index of each token within its rollout; rollouts may be interleaved."""
    order = torch.argsort(sequence, stable=True)
    lengths = count(sequence, sequences)
    starts = lengths.cumsum(0) - lengths
    index = torch.empty_like(sequence)
    index[order] = torch.arange(len(sequence), device=sequence.device) - starts[sequence[order]]
    return index


def first(flags: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """int64 [N]: index within the rollout of its first token where `flags` [T] is set, -1 if there is none."""
    never = torch.iinfo(torch.int64).max
    positions = torch.where(flags, position(sequence, sequences), never)
    index = torch.full((sequences,), never, device=sequence.device).scatter_reduce(0, sequence, positions, "amin")
    return torch.where(index == never, -1, index)
