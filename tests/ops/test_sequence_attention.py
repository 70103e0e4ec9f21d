"""Attention one sequence at a time, against one softmax per sequence: padding, boundaries, gradients, compilation."""

import pytest
import torch

from alula.ops.packed_attention import _per_sequence, packed_attention
from alula.ops.sequence_attention import LONG, one_by_one, padded, sequence_attention


def packed(lengths, heads, dim, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    tensors = [
        torch.randn(total, h, dim, generator=generator).to(device, dtype) for h in (heads[0], heads[1], heads[1])
    ]
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    return [t.requires_grad_() for t in tensors], boundaries


def compare(lengths, heads, dim, dtype, device, tolerance, layout=lambda x: x, scaling=0.3):
    (q, k, v), boundaries = packed(lengths, heads, dim, dtype, device)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = _per_sequence(*wide, boundaries, boundaries, scaling, None)
    actual, lse = sequence_attention(layout(q), layout(k), layout(v), boundaries, scaling)
    assert lse.shape == q.shape[:2]
    assert all(x.is_contiguous() for x in (actual, lse)), "compiled callers rely on these strides"
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    seed = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).to(actual)
    found = torch.autograd.grad(actual, (q, k, v), seed)
    for a, b in zip(found, torch.autograd.grad(expected, wide, seed.double())):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_equals_a_softmax_per_sequence(heads):
    compare([1, 300, 256, 257], heads, 8, torch.float32, "cpu", 1e-4)


@pytest.mark.parametrize("count", [1, 3])
def test_sequences_of_one_padded_length_are_taken_together(count):
    compare([512] * count, (4, 2), 8, torch.float32, "cpu", 1e-4)


def test_any_layout_of_the_heads():
    compare([40, 300], (4, 2), 8, torch.float32, "cpu", 1e-4, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))


def test_a_sequence_does_not_see_its_neighbours():
    (q, k, v), boundaries = packed([300, 280], (4, 2), 8, torch.float32, "cpu")
    together = sequence_attention(q, k, v, boundaries, 0.3)[0]
    alone = sequence_attention(q[:300], k[:300], v[:300], boundaries[:2], 0.3)[0]
    assert torch.equal(together[:300], alone)


def test_lengths_are_padded_to_few_shapes():
    assert [padded(n) for n in (1, 256, 257, 2048, 2049, 4097, 8192)] == [256, 256, 512, 2048, 2304, 4608, 8192]
    assert all(n <= padded(n) < 1.125 * n for n in range(2048, 40000))
    assert len({padded(n) for n in range(1, 32769)}) == 8 + 4 * 8


def test_compiles_with_the_function_around_it():
    (q, k, v), boundaries = packed([20, 300], (4, 2), 8, torch.float32, "cpu")

    def around(q, k, v, boundaries):
        return packed_attention(q * 2, k, v, boundaries.int(), 300, 0.3, one_by_one=boundaries).sin()

    expected = torch.autograd.grad(around(q, k, v, boundaries).sum(), (q, k, v))
    compiled = torch.compile(around, dynamic=True, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(q, k, v, boundaries).sum(), (q, k, v)), expected):
        torch.testing.assert_close(a, b)


def test_only_long_sequences_on_hopper_are_taken_one_by_one():
    assert one_by_one([LONG], 128, torch.bfloat16, torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [((16, 8), 128), ((9, 3), 64)])
def test_cudnn_equals_a_softmax_per_sequence(heads, dim):
    for lengths in ([3000, 1, 4100, 700], [4096, 4096]):
        compare(lengths, heads, dim, torch.bfloat16, "cuda", 0.06, scaling=dim**-0.5)


@pytest.mark.gpu
def test_choice_by_length():
    device = torch.device("cuda")
    assert one_by_one([300] * 50, 128, torch.bfloat16, device) is None
    if torch.cuda.get_device_capability() >= (9, 0):
        assert one_by_one([8192, 300], 128, torch.bfloat16, device).tolist() == [0, 8192, 8492]
