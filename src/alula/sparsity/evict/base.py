"""`Evictor`, the interface of an eviction method, and `Cached`, its input."""

from dataclasses import dataclass, fields

from torch import Tensor

from alula.errors import require
from alula.ops.compact import PagedKeys
from alula.sparsity.evict.query_statistics import QueryStatistics


@dataclass(frozen=True)
class Cached:
    """The KV of sequences about to be compacted, all of them n tokens long.

    R counts rows × layers, row after row; slots ascend in position. A key is stored as attention reads it:
    rotated at its original position.
    """

    paged: PagedKeys
    """the keys in the paged cache; R = C·L"""
    values: PagedKeys
    """the values, likewise"""
    queries: Tensor | None
    """[R, Hq, W, D] the last `Evictor.queries` rotated queries, in any order; None if that is 0"""
    attention: Tensor | None
    """fp32 [R, Hkv, n] attention received so far; None unless `Evictor.accumulates`"""
    scaling: float
    """the factor of the attention logits"""
    row_keys: Tensor | None
    """int64 [R] a random key per rollout, the same in all of its layers; None unless `Evictor.seeded`"""
    position: Tensor | None
    """int64 [R] the sequence's length, evicted tokens included; None unless `Evictor.seeded` or `calibrated`"""
    statistics: QueryStatistics | None
    """statistics of the model's queries; None unless `Evictor.calibrated`"""
    keep: int
    """tokens that the eviction keeps"""
    sinks: int
    """first tokens that are always kept"""
    protected: int
    """tokens of a protected prompt, which the budget does not count; 0 if it is not protected"""

    @property
    def keys(self) -> Tensor:
        """[R, Hkv, n, D] in the model's dtype, gathered at the first access"""
        return self.paged.gathered

    @property
    def shape(self) -> tuple[int, int, int]:
        """R, Hkv, n: the shape of the scores"""
        return self.paged.shape

    @property
    def layers(self) -> int:
        return self.paged.pool.shape[0]


@dataclass(frozen=True)
class Evictor:
    """A method that ranks cached tokens. Its fields are its options; `window` comes from `Evict`."""

    window: int

    accumulates = False
    """Whether it needs the attention that every key has received so far."""

    seeded = False
    """Whether it draws random numbers, which needs the rollout's key and length."""

    calibrated = False
    """Whether it needs statistics of the model's queries, and the sequence's length."""

    @property
    def queries(self) -> int:
        """How many recent queries it needs."""
        return 0

    def score(self, kv: Cached) -> Tensor:
        """fp32 [R, Hkv, n], higher = keep. Scores of the sinks and of the last `window` tokens are ignored.

        Each sequence's scores depend on its own KV only, never on batch composition.
        """
        raise NotImplementedError

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            is_integer = option.type in (int, "int")
            require(
                not isinstance(value, bool) and isinstance(value, int if is_integer else (int, float)),
                f"{option.name}={value!r}: must be a {'whole number' if is_integer else 'number'}.",
            )


def require_pooling(kernel: int) -> None:
    require(kernel >= 1 and kernel % 2 == 1, f"kernel={kernel}: the pooling width must be odd (1: no pooling).")
