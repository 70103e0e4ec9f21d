"""SplitMix64 (Steele et al., 2014): a counter-based 64-bit hash, for Python integers and for int64 tensors."""

from torch import Tensor

MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """The hash of an integer, as an unsigned 64-bit integer."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def splitmix64_tensor(x: Tensor) -> Tensor:
    """The same on int64, whose products wrap like unsigned ones. Constants are those above as signed numbers."""
    x = x - 0x61C8864680B583EB
    x = (x ^ logical_shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ logical_shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ logical_shift(x, 31)


def logical_shift(x: Tensor, bits: int) -> Tensor:
    """Right shift that fills with zeros; torch's shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
