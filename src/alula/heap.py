"""Garbage collections without the objects that were there before.

A full collection visits every object of the process. Once models are compiled, it takes half a second. The engine makes
no cyclic garbage, but it makes many objects, which start collections, and its device waits meanwhile.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_holders = 0


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave the objects that are alive now out of all collections inside the `with` block."""
    global _holders
    _holders += 1
    gc.freeze()
    try:
        yield
    finally:
        _holders -= 1
        if not _holders:
            gc.unfreeze()
