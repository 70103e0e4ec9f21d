"""Evictors: which cached tokens a sequence keeps in an eviction. One file per method."""

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
from alula.sparsity.evict.rkv_code import RKVCode
from alula.sparsity.evict.snapkv import SnapKV
from alula.sparsity.evict.streaming import Streaming
from alula.sparsity.evict.tova import TOVA
from alula.sparsity.evict.triattention import TriAttention
from alula.sparsity.evict.vase import VaSE
from alula.sparsity.evict.vase_dkv import VaSEDKV

if TYPE_CHECKING:
    from alula.sparsity.policy import Evict, Sparsity

__all__ = ["METHODS", "Cached", "Evictor", "build", "check_settings", "keep", "needs_queries", "option_names"]

METHODS: dict[str, type[Evictor]] = {
    "streaming": Streaming,
    "snapkv": SnapKV,
    "rkv": RKV,
    "rkv-code": RKVCode,
    "h2o": H2O,
    "tova": TOVA,
    "keydiff": KeyDiff,
    "knorm": Knorm,
    "random": Random,
    "vase": VaSE,
    "vase-dkv": VaSEDKV,
    "triattention": TriAttention,
}
COMMON = ("buffer", "window", "sinks", "protect_prompt")
"""Settings that every method has, besides its budget."""


def build(evict: "Evict") -> Evictor:
    """The evictor for these settings."""
    check_settings(evict.method, (name for name, _ in evict.options))
    return METHODS[evict.method](window=evict.window, **dict(evict.options))


def needs_queries(sparsity: "Sparsity") -> bool:
    """Whether a policy's evictor needs statistics of the model's queries."""
    return sparsity.evict is not None and METHODS[sparsity.evict.method].calibrated


def check_settings(method: str, names: Iterable[str], *, common: Sequence[str] = COMMON, kind: str = "setting") -> None:
    """Raise for names that are neither options of the method nor in `common`."""
    known = [*option_names(method), *common]
    for name in names:
        if name not in known:
            raise unknown(f"{kind} of evictor {method!r}:", name, known)


def option_names(method: str) -> list[str]:
    if method not in METHODS:
        raise unknown("evictor", method, METHODS)
    return [option.name for option in fields(METHODS[method]) if option.name != "window"]


def keep(scores: Tensor, *, count: int, sinks: int, window: int, protected: int = 0) -> Tensor:
    """The `count` slots to keep, per sequence, layer and head: scores [R, Hkv, n] -> int32 [R, Hkv, count], ascending.

    The first max(sinks, protected) and the last `window` slots are always kept, then those with the highest scores;
    ties go to the lower slot. NaN counts as −inf, −0.0 equals 0.0.
    """
    rows, heads, n = scores.shape
    first = max(sinks, protected)
    require(
        first + window <= count <= n,
        f"budget: cannot keep {count} of {n} tokens if the first {first} and the last {window} are always kept.",
    )
    return top_indices(scores.flatten(0, 1), count, first, window).view(rows, heads, count)
