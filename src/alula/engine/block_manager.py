"""Ownership of KV pages: a free list and reference counts."""


class BlockManager:
    """Allocates pages 1 .. count-1. Page 0 is the scratch page: inactive rows write to it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._references = [0] * count
        self.peak = 0

    @property
    def usable(self) -> int:
        return self.count - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return self.usable - self.free

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        self.peak = max(self.peak, self.in_use)
        return pages

    def share(self, pages: list[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def release(self, pages: list[int]) -> int:
        """Remove a reference from each page; returns the number of pages that became free."""
        freed = 0
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
                freed += 1
        return freed


def pages_for(tokens: int, page: int) -> int:
    """Pages of `page` tokens that hold `tokens`."""
    return -(-tokens // page)
