"""Ownership of KV pages: a free list, reference counts, and prompt prefixes that are found again by their content."""

from collections import OrderedDict
from hashlib import blake2b

import numpy as np


class BlockManager:
    """Allocates pages 1 .. count-1. Page 0 is the scratch page: inactive rows write to it.

    A page may have a key: the content of the prompt prefix that ends with it. Such a page stays cached after its last
    reference is gone, and counts as free: when no other page is left, the one unused for longest is allocated.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._references = [0] * count
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Pages with a key and without a reference, longest unused first."""
        self.peak = 0

    @property
    def usable(self) -> int:
        return self.count - 1

    @property
    def free(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def in_use(self) -> int:
        return self.usable - self.free

    def allocate(self, count: int) -> list[int]:
        assert count <= self.free, f"{count} pages wanted, {self.free} free"
        while len(self._free) < count:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        self.peak = max(self.peak, self.in_use)
        return pages

    def share(self, pages: list[int]) -> None:
        """Add a reference to each page; a page without one must be cached."""
        for page in pages:
            if not self._references[page]:
                assert page in self._cached, f"page {page} is free"
                del self._cached[page]
            self._references[page] += 1
        self.peak = max(self.peak, self.in_use)

    def release(self, pages: list[int]) -> int:
        """Remove a reference from each page; returns the number of pages that became free."""
        freed = 0
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] -= 1
            if self._references[page] == 0:
                freed += 1
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)
        return freed

    # -- prefixes -----------------------------------------------------------------------------------------

    def remember(self, keys: list[bytes], pages: list[int]) -> None:
        """Give pages their keys, unless another page already has the same content."""
        for key, page in zip(keys, pages):
            if key not in self._page_of:
                self._page_of[key], self._key_of[page] = page, key

    def find(self, keys: list[bytes]) -> list[int]:
        """The cached pages of the longest known prefix."""
        pages = []
        for key in keys:
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def forget(self) -> None:
        """Forget all prefixes: their content is lost or outdated."""
        self._free += self._cached
        self._cached.clear()
        self._page_of.clear()
        self._key_of.clear()


def prefix_keys(tokens: list[int], page: int, source: str) -> list[bytes]:
    """A key for every full page: a hash of all tokens up to its end. `source` names what else decides the KV."""
    keys, key = [], source.encode()
    ids = np.asarray(tokens, np.int64)
    for start in range(0, len(tokens) - page + 1, page):
        key = blake2b(key + ids[start : start + page].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


def pages_for(tokens: int, page: int) -> int:
    """Pages of `page` tokens that hold `tokens`."""
    return -(-tokens // page)
