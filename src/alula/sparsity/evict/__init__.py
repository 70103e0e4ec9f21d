"""Evictors: which cached tokens a sequence keeps when it has too many. One file per method."""

from collections.abc import Iterable, Sequence
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

__all__ = ["METHODS", "Cached", "Evictor", "build", "check_settings", "keep", "own_settings"]

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
COMMON = ("buffer", "window", "sinks", "protect_prompt")
"""What every method can be told by name; its budget has been given before."""


def build(evict: "Evict") -> Evictor:
    """The evictor that `evict` asks for."""
    check_settings(evict.method, (name for name, _ in evict.options))
    return METHODS[evict.method](window=evict.window, **dict(evict.options))


def check_settings(method: str, names: Iterable[str], *, common: Sequence[str] = COMMON, kind: str = "setting") -> None:
    """Refuse names that are neither the method's own nor `common`: those that may be given in the same place."""
    known = [*own_settings(method), *common]
    for name in names:
        if name not in known:
            raise unknown(f"{kind} of evictor {method!r}:", name, known)


def own_settings(method: str) -> list[str]:
    if method not in METHODS:
        raise unknown("evictor", method, METHODS)
    return [option.name for option in fields(METHODS[method]) if option.name != "window"]


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
