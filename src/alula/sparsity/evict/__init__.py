"""Evictors: which cached tokens a sequence keeps when it has too many. One file per method."""

from dataclasses import fields
from typing import TYPE_CHECKING

from torch import Tensor

from alula.errors import require, unknown
from alula.ops.top_indices import top_indices
from alula.sparsity.evict.base import Cached, Evictor
from alula.sparsity.evict.h2o import H2O
from alula.sparsity.evict.keydiff import KeyDiff
from alula.sparsity.evict.knorm import Knorm
from alula.sparsity.evict.random import Random
from alula.sparsity.evict.rkv import RKV
from alula.sparsity.evict.snapkv import SnapKV
from alula.sparsity.evict.streaming import Streaming
from alula.sparsity.evict.tova import TOVA

if TYPE_CHECKING:
    from alula.sparsity.policy import Evict

__all__ = ["METHODS", "Cached", "Evictor", "build", "keep"]

METHODS: dict[str, type[Evictor]] = {
    "streaming": Streaming,
    "snapkv": SnapKV,
    "rkv": RKV,
    "h2o": H2O,
    "tova": TOVA,
    "keydiff": KeyDiff,
    "knorm": Knorm,
    "random": Random,
}
COMMON = ("budget", "buffer", "window", "sinks", "protect_prompt")


def build(evict: "Evict") -> Evictor:
    """The evictor that `evict` asks for."""
    if evict.method not in METHODS:
        raise unknown("evictor", evict.method, METHODS)
    method = METHODS[evict.method]
    options = [option.name for option in fields(method) if option.name != "window"]
    for name, _ in evict.options:
        if name not in options:
            raise unknown(f"setting of evictor {evict.method!r}:", name, [*options, *COMMON])
    return method(window=evict.window, **dict(evict.options))


def keep(scores: Tensor, *, count: int, sinks: int, window: int, protected: int = 0) -> Tensor:
    """The `count` slots that stay, per sequence, layer and head: scores [R, Hkv, n] -> int32 [R, Hkv, count].

    Ascending. The first max(sinks, protected) and the last `window` slots always stay; of the others the
    best-scored ones do, the lower slot where scores are equal. NaN counts as −inf, −0.0 equals 0.0.
    """
    rows, heads, n = scores.shape
    first = max(sinks, protected)
    require(
        first + window <= count <= n,
        f"cannot keep {count} of {n} tokens when the first {first} and the last {window} always stay.",
    )
    return top_indices(scores.flatten(0, 1), count, first, window).view(rows, heads, count)
