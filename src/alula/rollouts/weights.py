"""Weights as a few large byte buffers, which Ray's object store moves far faster than many tensors."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BUCKET_BYTES = 256 << 20
ALIGNED = 16
"""Tensors begin at multiples of this, so that they can be read in place."""

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class Piece:
    """A tensor in a bucket, or a part of one that is too large for the rest of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    """Where it begins in the tensor, in bytes."""
    offset: int
    """Where it begins in the bucket."""
    bytes: int


def pack(
    parameters: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[list[Piece], Bytes]]:
    """Buckets of at most `bucket_bytes`. A bucket is valid until the next one is requested: they share memory."""
    bucket = torch.empty(bucket_bytes // ALIGNED * ALIGNED, dtype=torch.uint8)
    pieces: list[Piece] = []
    used = 0
    for name, tensor in parameters:
        flat, first = tensor.detach().contiguous().reshape(-1).view(torch.uint8), 0
        while first < len(flat):
            if used == len(bucket):
                yield pieces, bucket.numpy()
                pieces, used = [], 0
            size = min(len(flat) - first, len(bucket) - used)
            bucket[used : used + size].copy_(flat[first : first + size])
            pieces.append(Piece(name, tensor.dtype, tuple(tensor.shape), first, used, size))
            first, used = first + size, min(len(bucket), -(-(used + size) // ALIGNED) * ALIGNED)
    if pieces:
        yield pieces, bucket[:used].numpy()


def unpack(buckets: Iterable[tuple[list[Piece], Bytes]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in their order. One that lies in a single bucket is a view of it."""
    joined: Tensor | None = None
    for pieces, data in buckets:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the store's memory is read-only, and only read
            bucket = torch.from_numpy(data)
        for piece in pieces:
            part = bucket[piece.offset : piece.offset + piece.bytes]
            size = int(np.prod(piece.shape, dtype=np.int64)) * piece.dtype.itemsize
            if piece.bytes < size:
                if piece.first == 0:
                    joined = torch.empty(size, dtype=torch.uint8)
                assert joined is not None
                joined[piece.first : piece.first + piece.bytes].copy_(part)
                if piece.first + piece.bytes < size:
                    continue
                part = joined
            yield piece.name, part.view(piece.dtype).view(piece.shape)
