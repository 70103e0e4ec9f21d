"""Packing: sequences of any length into micro-batches without padding, with the positions to score."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from alula.errors import require


class Tokens(Protocol):
    """The part of a rollout that the learner needs."""

    prompt_ids: list[int]
    token_ids: list[int]


def sampled_mask(sequence: Tokens) -> Tensor:
    """bool [len(token_ids)]: the tokens to score. Tokens that an environment gave (`Rollout.sampled`) are not."""
    mask: Tensor | None = getattr(sequence, "sampled", None)
    return torch.ones(len(sequence.token_ids), dtype=torch.bool) if mask is None else mask


@dataclass
class Packed:
    """Consecutive sequences in a batch of one.

    Position i is a *target* if token i + 1 was sampled in the response of the same sequence: its hidden state predicts
    `target_ids`. Exactly the sampled tokens are scored, the first of them from the last prompt token. Tokens that were
    given inside a response are read, never scored: nothing after the forward pass needs a mask.
    """

    index: list[int]
    """Indices into the caller's list of sequences, in packed order."""
    input_ids: Tensor
    """int64 [1, T]"""
    position_ids: Tensor
    """int64 [1, T]: starts at 0 in every sequence."""
    cu_seqlens: Tensor
    """int32 [sequences + 1]: boundaries."""
    lengths: list[int]
    """Tokens of each sequence."""
    max_seqlen: int
    targets: Tensor
    """int64 [N]: positions in [0, T) whose next token is a sampled response token."""
    target_ids: Tensor
    """int64 [N]: those next tokens."""
    sequence: Tensor
    """int64 [N]: the row of `index` that each target belongs to."""
    response_lengths: list[int]
    """Sampled tokens of each sequence."""

    def flat(self, per_sequence: Sequence[Tensor]) -> Tensor:
        """Per-token tensors of the caller's list, [sampled tokens] each, in the order of the targets: [N]."""
        device = self.target_ids.device
        return torch.cat([per_sequence[i].to(device, non_blocking=True) for i in self.index])

    def rows(self, values: Tensor) -> Tensor:
        """One value per sequence of the caller's list -> one per packed sequence."""
        return values.to(self.target_ids.device)[self.index]

    def split(self, per_token: Tensor) -> list[Tensor]:
        """[N, ...] in the order of the targets -> one tensor per packed sequence."""
        return list(per_token.split(self.response_lengths))


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch, balanced, at most `budget` tokens each; a longer sequence is alone.

    First-fit decreasing gives the number of micro-batches. Then the longest remaining sequence always joins the
    emptiest micro-batch, which balances their sizes. If that exceeds the budget, the first-fit packing is used. The
    result depends only on the lengths; ties go to the lower index.
    """
    require(budget >= 1, f"token_budget={budget}: must be at least 1.")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    fitted: list[list[int]] = []
    room: list[int] = []
    for i in order:
        bin_ = next((b for b, left in enumerate(room) if lengths[i] <= left), None)
        if bin_ is None:
            fitted.append([i])
            room.append(budget - lengths[i])
        else:
            fitted[bin_].append(i)
            room[bin_] -= lengths[i]
    balanced: list[list[int]] = [[] for _ in fitted]
    filled = [0] * len(fitted)
    for i in order:
        bin_ = filled.index(min(filled))
        balanced[bin_].append(i)
        filled[bin_] += lengths[i]
    fits = all(total <= budget or len(members) == 1 for total, members in zip(filled, balanced))
    return [sorted(members) for members in (balanced if fits else fitted)]


def collate(sequences: Sequence[Tokens], index: Sequence[int], device: torch.device | str = "cpu") -> Packed:
    """The chosen sequences as one packed batch on `device`."""
    ids: list[int] = []
    positions: list[Tensor] = []
    targets: list[Tensor] = []
    boundaries = [0]
    response_lengths = []
    for i in index:
        prompt, response = sequences[i].prompt_ids, sequences[i].token_ids
        require(
            len(prompt) > 0,
            f"sequence {i} has an empty prompt, so its first token cannot be scored; start it with a "
            "beginning-of-sequence token.",
        )
        start, length = len(ids), len(prompt) + len(response)
        ids.extend(prompt)
        ids.extend(response)
        positions.append(torch.arange(length))
        first = start + len(prompt) - 1
        targets.append(torch.arange(first, first + len(response))[sampled_mask(sequences[i])])
        boundaries.append(start + length)
        response_lengths.append(len(targets[-1]))
    input_ids, target_positions = torch.tensor(ids), torch.cat(targets)
    rows = torch.repeat_interleave(torch.arange(len(response_lengths)), torch.tensor(response_lengths))
    target_ids = input_ids[target_positions + 1]
    lengths = [end - start for start, end in pairwise(boundaries)]

    def on_device(tensor: Tensor) -> Tensor:
        if torch.device(device).type == "cuda":
            tensor = tensor.pin_memory()  # a copy from other memory waits for all that the GPU has to do
        return tensor.to(device, non_blocking=True)

    return Packed(
        index=list(index),
        input_ids=on_device(input_ids[None]),
        position_ids=on_device(torch.cat(positions)[None]),
        cu_seqlens=on_device(torch.tensor(boundaries, dtype=torch.int32)),
        lengths=lengths,
        max_seqlen=max(lengths),
        targets=on_device(target_positions),
        target_ids=on_device(target_ids),
        sequence=on_device(rows),
        response_lengths=response_lengths,
    )
