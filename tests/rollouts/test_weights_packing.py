"""Weights as byte buffers: what comes out is what went in, however the buckets are cut."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from alula.rollouts.weights import ALIGNED, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64]
SHAPES = st.lists(st.integers(1, 7), max_size=3)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=8), st.integers(ALIGNED, 300))
def test_tensors_come_back_whole(kinds, bucket_bytes):
    tensors = {f"{i}": torch.randn(shape).mul(50).to(dtype) for i, (shape, dtype) in enumerate(kinds)}
    buckets = [(pieces, data.copy()) for pieces, data in pack(tensors.items(), bucket_bytes)]
    assert all(len(data) <= bucket_bytes for _, data in buckets)
    assert all(piece.offset % ALIGNED == 0 for pieces, _ in buckets for piece in pieces)
    found = dict(unpack(buckets))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.ndim else True
        assert found[name].shape == tensor.shape


def test_a_whole_tensor_is_read_in_place():
    [(pieces, data)] = [(pieces, data.copy()) for pieces, data in pack([("a", torch.arange(6.0))])]
    data.flags.writeable = False  # as in Ray's object store
    [(_, found)] = unpack([(pieces, data)])
    assert found.data_ptr() == data.ctypes.data
    assert found.tolist() == [0, 1, 2, 3, 4, 5]


def test_slices_of_larger_tensors_are_packed():
    table = torch.arange(12).view(3, 4)
    [(_, found)] = unpack([(pieces, data.copy()) for pieces, data in pack([("column", table[:, 1])])])
    assert found.tolist() == [1, 5, 9]
