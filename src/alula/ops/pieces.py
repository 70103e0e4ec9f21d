"""How paged attention cuts a context into pieces, each reduced by one program before all are merged.

Long pieces have little to merge; short ones make enough programs to occupy a device. A piece is therefore as long as it
can be while rows of this length make enough programs, within bounds. With many rows, contexts up to the longest piece
are one piece: the rows alone occupy the device. The programs of quantised KV are smaller, so that more are enough.
"""

from typing import NamedTuple

from alula.ops.dispatch import tl, triton

SHORTEST, LONGEST = 128, 1024
PROGRAMS, PROGRAMS_QUANTISED = 512, 1024
MANY, MANY_QUANTISED = 128, 1024
"""rows × KV heads that are many"""


class Pieces(NamedTuple):
    row_heads: int
    """rows × KV heads"""
    whole: int
    """the length up to which a context is one piece"""
    programs: int = PROGRAMS
    """that occupy a device"""

    @classmethod
    def of(cls, row_heads: int, selected: bool = False, quantised: bool = False) -> "Pieces":
        """Where pages are selected, other rows may read more of them, and there is something to merge in any case."""
        many, programs = (MANY_QUANTISED, PROGRAMS_QUANTISED) if quantised else (MANY, PROGRAMS)
        return cls(row_heads, LONGEST if row_heads >= many and not selected else SHORTEST, programs)

    @property
    def constants(self) -> dict[str, int]:
        """Those of `piece_length`."""
        doublings = (LONGEST // SHORTEST).bit_length() - 1
        return {"WHOLE": self.whole, "SHORTEST": SHORTEST, "DOUBLINGS": doublings, "PROGRAMS": self.programs}

    def length(self, count: int) -> int:
        """Tokens of a piece of a context of `count` tokens."""
        piece = SHORTEST
        while piece < LONGEST and count // SHORTEST * self.row_heads >= 2 * piece // SHORTEST * self.programs:
            piece *= 2
        return self.whole if count <= self.whole else piece

    def most(self, count: int) -> int:
        """The largest number of pieces of contexts of up to `count` tokens: that of the longest, or of the longest
        with shorter pieces."""
        ends, piece = [count], SHORTEST
        while piece < LONGEST:
            piece *= 2
            ends.append(-(-piece // SHORTEST * self.programs // self.row_heads) * SHORTEST - 1)
        return max(-(-end // self.length(end)) for end in ends if 0 < end <= count)


@triton.jit
def piece_length(
    count,
    row_heads,
    WHOLE: tl.constexpr,
    SHORTEST: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """`Pieces.length` of contexts of `count` tokens."""
    programs = count // SHORTEST * row_heads
    piece = SHORTEST
    for doubling in tl.static_range(1, DOUBLINGS + 1):
        piece = tl.where(programs >= (1 << doubling) * PROGRAMS, SHORTEST << doubling, piece)
    return tl.where(count <= WHOLE, WHOLE, piece)
