import pytest
import torch

from alula.learner.logprobs import chunked_logprobs
from largest_tensor import LargestTensor


def problem(n=37, width=16, vocabulary=101, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, width, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (n,), generator=g)
    return hidden, weight, targets


def plain(hidden, weight, targets, temperature, bias=None):
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logp = (logits / temperature).log_softmax(-1)
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_equals_whole_with_gradients(chunk, temperature):
    hidden, weight, targets = problem()
    seed = torch.randn(len(targets), generator=torch.Generator().manual_seed(1))
    expected, entropy = plain(hidden.double(), weight.double(), targets, temperature)
    actual, actual_entropy = chunked_logprobs(hidden, weight, targets, temperature, chunk)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual_entropy, entropy.float(), atol=1e-5, rtol=1e-5)
    assert not actual_entropy.requires_grad
    wanted = torch.autograd.grad(expected, (hidden, weight), seed.double())
    got = torch.autograd.grad(actual, (hidden, weight), seed)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_bias_and_frozen_weight():
    hidden, weight, targets = problem(seed=5)
    bias = torch.randn(len(weight), requires_grad=True)
    weight = weight.detach()
    expected, _ = plain(hidden, weight, targets, 1.3, bias)
    actual, entropy = chunked_logprobs(hidden, weight, targets, 1.3, 10, bias, entropy=False)
    assert entropy is None
    for a, b in zip(
        torch.autograd.grad(actual.sum(), (hidden, bias)), torch.autograd.grad(expected.sum(), (hidden, bias))
    ):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_bfloat16_weight_gradient_does_not_lose_small_chunks():
    """2048 equal contributions, one per chunk: in bfloat16 their sum would stall at 256."""
    n, width = 2048, 4
    hidden = torch.ones(n, width, dtype=torch.bfloat16)
    weight = torch.zeros(7, width, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(n, dtype=torch.long)
    logprobs, _ = chunked_logprobs(hidden, weight, targets, chunk=1)
    (grad,) = torch.autograd.grad(logprobs.sum(), weight)
    torch.testing.assert_close(grad[0].float(), torch.full((width,), n * 6 / 7), rtol=4e-3, atol=0)


def test_full_logits_are_never_materialised():
    hidden, weight, targets = problem(n=512, width=8, vocabulary=640)
    with LargestTensor() as largest:
        logprobs, _ = chunked_logprobs(hidden, weight, targets, chunk=16)
        logprobs.sum().backward()
    assert largest.elements <= 16 * 640
    with LargestTensor() as whole:
        plain(hidden, weight, targets, 1.0)
    assert whole.elements == 512 * 640


def test_no_targets():
    hidden, weight, _ = problem()
    none = torch.empty(0, dtype=torch.long)
    logprobs, entropy = chunked_logprobs(hidden[:0], weight, none)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert weight.grad.abs().max() == 0
