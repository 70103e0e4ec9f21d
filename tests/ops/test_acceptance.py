"""Acceptance against brute force on small vocabularies; the top-K bracket always contains the exact value."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.errors import SettingError
from alula.ops.acceptance import (
    acceptance,
    acceptance_bounds,
    bracketed_tail,
    chunked_acceptance,
    usable,
)


def overlap_by_hand(p_logits: list[float], q_logits: list[float], temperature: float = 1.0) -> float:
    def probabilities(logits: list[float]) -> list[float]:
        weights = [math.exp(x / temperature) for x in logits]
        return [w / sum(weights) for w in weights]

    return sum(min(a, b) for a, b in zip(probabilities(p_logits), probabilities(q_logits)))


def pair(seed: int, tokens: int, vocabulary: int, sharpness: float, shift: float):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64) * sharpness
    q = p + torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64) * shift
    return p, q


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_exact_equals_a_loop_for_logits_and_logprobs(temperature):
    p, q = pair(0, 7, 11, 2.0, 1.0)
    expected = [overlap_by_hand(a, b, temperature) for a, b in zip(p.tolist(), q.tolist())]
    torch.testing.assert_close(acceptance(p, q, temperature).tolist(), expected, rtol=0, atol=1e-6)
    again = acceptance(p.log_softmax(-1), q.log_softmax(-1), temperature)
    torch.testing.assert_close(again.tolist(), expected, rtol=0, atol=1e-6)


def test_exact_at_the_ends():
    p = torch.randn(3, 50)
    assert acceptance(p, p).tolist() == pytest.approx([1.0] * 3, abs=1e-6)
    apart = acceptance(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]))
    assert apart.item() == 0.0


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_change_nothing_and_heads_may_be_functions(chunk):
    torch.manual_seed(1)
    p_hidden, q_hidden, head = torch.randn(10, 8), torch.randn(10, 8), torch.nn.Linear(8, 23)
    weight = torch.randn(23, 8)
    whole = acceptance(p_hidden @ weight.T, head(q_hidden))
    torch.testing.assert_close(
        chunked_acceptance(p_hidden, weight, q_hidden, head, chunk=chunk), whole, rtol=0, atol=1e-6
    )


def test_chunked_never_builds_all_logits():
    rows = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return hidden

    hidden = torch.randn(10, 5)
    assert chunked_acceptance(hidden, head, hidden, head, chunk=3).shape == (10,)
    assert max(rows) == 3
    assert chunked_acceptance(hidden[:0], head, hidden[:0], head).shape == (0,)


def topk(logits: torch.Tensor, k: int):
    logprobs, ids = logits.log_softmax(-1).topk(k)
    return ids, logprobs


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(2, 60),
    k=st.integers(1, 60),
    other_k=st.integers(1, 60),
    sharpness=st.floats(0, 8),
    shift=st.floats(0, 4),
)
def test_bounds_contain_the_exact_value(seed, vocabulary, k, other_k, sharpness, shift):
    p, q = pair(seed, 4, vocabulary, sharpness, shift)
    k, other_k = min(k, vocabulary), min(other_k, vocabulary)
    exact = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
    lower, upper = acceptance_bounds(*topk(p, k), *topk(q, other_k), vocabulary)
    assert (lower <= exact + 1e-12).all()
    assert (exact <= upper + 1e-12).all()
    assert (lower >= -1e-12).all()
    assert (upper <= 1).all()
    if k == other_k == vocabulary:
        torch.testing.assert_close(lower, exact, rtol=0, atol=1e-12)
        torch.testing.assert_close(upper, exact, rtol=0, atol=1e-12)


def worst_and_best_overlap(p_listed: dict, q_listed: dict, vocabulary: int, units: int) -> tuple[float, float]:
    """Smallest and largest overlap over all completions of two lists, in steps of 1/units of mass."""

    def completions(listed: dict) -> list[list[int]]:
        cap = min(listed.values())
        found: list[list[int]] = []

        def fill(token: int, left: int, sofar: list[int]) -> None:
            if token == vocabulary:
                if left == 0:
                    found.append(sofar)
            elif token in listed:
                fill(token + 1, left - listed[token], [*sofar, listed[token]])
            else:
                for mass in range(min(cap, left) + 1):
                    fill(token + 1, left - mass, [*sofar, mass])

        fill(0, units, [])
        return found

    overlaps = [
        sum(min(a, b) for a, b in zip(p, q)) / units for p in completions(p_listed) for q in completions(q_listed)
    ]
    return min(overlaps), max(overlaps)


@pytest.mark.parametrize(
    ("p_listed", "q_listed", "vocabulary"),
    [
        ({0: 6, 1: 2}, {0: 5, 2: 3}, 7),  # room in the tail: both bounds loose and both attained
        ({0: 6, 1: 2}, {0: 6, 1: 2}, 8),
        ({0: 3, 1: 2}, {2: 3, 3: 2}, 8),
        ({0: 2, 1: 2}, {2: 2, 3: 2}, 6),  # no room: the tails must overlap
        ({0: 10}, {0: 4, 1: 2, 2: 2}, 6),
    ],
)
def test_bounds_are_attained(p_listed, q_listed, vocabulary):
    """Every completion of the lists lies inside, and (on the lattice) some completion reaches each end."""
    units = 10

    def listed(counts: dict) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(list(counts)), (torch.tensor(list(counts.values())).double() / units).log()

    lower, upper = acceptance_bounds(*listed(p_listed), *listed(q_listed), vocabulary)
    worst, best = worst_and_best_overlap(p_listed, q_listed, vocabulary, units)
    assert upper.item() == pytest.approx(best, abs=1e-9)
    assert lower.item() == pytest.approx(worst, abs=1e-9)


def test_flat_distributions_are_known_from_few_tokens():
    """Two uniform distributions: the smallest listed probability leaves the tails nowhere else to go."""
    flat = torch.zeros(1, 1000, dtype=torch.float64)
    lower, upper = acceptance_bounds(*topk(flat, 5), *topk(flat, 5), 1000)
    assert lower.item() == pytest.approx(1.0)
    assert upper.item() == pytest.approx(1.0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 40), st.floats(0.1, 6))
def test_the_tail_from_lists_is_a_bracket_or_refused(seed, k, sharpness):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(200, 40, generator=generator, dtype=torch.float64) * sharpness for _ in range(2))
    q = 0.9 * p + 0.1 * q
    lower, upper = acceptance_bounds(*topk(p, k), *topk(q, k), 40)
    exact = sorted(acceptance(p, q).tolist())[9]  # 5 % of 200 tokens
    if sorted(upper.tolist())[9] - sorted(lower.tolist())[9] >= 0.02:
        with pytest.raises(SettingError, match="measure it exactly"):
            bracketed_tail(lower, upper)
        return
    low, high = bracketed_tail(lower, upper)
    assert low - 1e-6 <= exact <= high + 1e-6
    assert high - low < 0.02


def test_usable():
    assert usable(0.960, 0.975)
    assert not usable(0.57, 0.97)
    assert usable(torch.tensor([0.5, 0.97]), torch.tensor([0.6, 0.98])).tolist() == [False, True]
    assert not usable(0.90, 0.95)
    assert usable(0.90, 0.95, limit=0.1)
