"""Ragged batches for the tests of corrections and losses, as plain lists and as flat fp64 tensors."""

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass
class Batch:
    """dense, sparse, new, reference: log-probs of each rollout's tokens; advantages: one per rollout."""

    dense: list[list[float]]
    sparse: list[list[float]]
    new: list[list[float]]
    reference: list[list[float]]
    advantages: list[float]

    @property
    def rollouts(self) -> int:
        return len(self.dense)

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.dense]

    @property
    def sequence(self) -> Tensor:
        return torch.tensor([i for i, length in enumerate(self.lengths) for _ in range(length)], dtype=torch.int64)

    def log_ratios(self) -> list[list[float]]:
        return [[d - s for d, s in zip(dense, sparse)] for dense, sparse in zip(self.dense, self.sparse)]


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def padded(rows: list[list[float]], fill: float = -77.0) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows) + 1
    values = [row + [fill] * (width - len(row)) for row in rows]
    mask = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(mask)


def _log_xi(rng: random.Random, spread: float, bad: float) -> float:
    """Mostly mild, sometimes exactly 0, sometimes catastrophic, now and then beyond the clamp at 20."""
    draw = rng.random()
    if draw < bad:
        return rng.choice([-9.5, -12.0, -9.1, 3.0, -25.0, 22.0])
    return 0.0 if draw > 0.9 else rng.gauss(0, spread)


def random_batch(lengths: list[int], seed: int, spread: float, bad: float) -> Batch:
    rng = random.Random(seed)
    sparse = [[-rng.expovariate(0.7) for _ in range(length)] for length in lengths]
    dense = [[s + _log_xi(rng, spread, bad) for s in row] for row in sparse]
    new = [[d + rng.choice([0.0, rng.gauss(0, 0.4), 1.6]) for d in row] for row in dense]
    reference = [[n + rng.gauss(0, 0.5) for n in row] for row in new]
    return Batch(dense, sparse, new, reference, [rng.choice([0.0, rng.gauss(0, 1)]) for _ in lengths])


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
    spread, bad = draw(st.sampled_from([0.002, 0.3, 0.8])), draw(st.sampled_from([0.0, 0.15]))
    return random_batch(lengths, draw(st.integers(0, 10**6)), spread, bad)
