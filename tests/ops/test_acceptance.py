"""Acceptance against brute force on small vocabularies."""

import math

import pytest
import torch

from alula.ops.acceptance import acceptance, chunked_acceptance


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
    expected = acceptance(p_hidden @ weight.T, head(q_hidden))
    torch.testing.assert_close(
        chunked_acceptance(p_hidden, weight, q_hidden, head, chunk=chunk), expected, rtol=0, atol=1e-6
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
