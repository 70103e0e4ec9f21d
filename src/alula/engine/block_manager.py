"""Who owns which page of the KV cache: a free list and reference counts, nothing else."""


class PagePool:
    """Pages 1 .. count-1 are handed out; page 0 is nobody's: rows that are not live write there."""

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

    def references(self, page: int) -> int:
        return self._references[page]

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        self.peak = max(self.peak, self.in_use)
        return pages

    def share(self, pages: list[int]) -> None:
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def drop(self, pages: list[int]) -> int:
        """Give up one reference to each page; returns how many went back to the pool."""
        freed = 0
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
                freed += 1
        return freed


def pages_for(tokens: int, page: int) -> int:
    return -(-tokens // page)
