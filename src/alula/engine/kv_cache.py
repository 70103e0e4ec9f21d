"""The KV cache's tensors, and the buffers that some policies need in addition."""

import math

import torch
from torch import Tensor

from alula.engine.block_manager import pages_for
from alula.engine.virtual_memory import ReleasableBuffer
from alula.errors import SettingError, require
from alula.models.geometry import Geometry
from alula.sparsity.select import Selector

SUMMARISED_BYTES = 1 << 28
"""Keys are summarised in chunks of at most this many bytes."""


class KVCache:
    """keys, values [layer, page, kv_head, slot, head_dim]. Every (layer, head) keeps its own tokens, but the same
    number of them, so one page table serves all.

    Allocated when a request first needs them: `summaries` [layer, page, kv_head, 1|2, head_dim] for
    selectors, `ring` [layer, row, q_head, W, head_dim] of recent queries and `accumulated` fp32
    [layer, row, kv_head, tokens] attention for evictors.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        scaling: float,
        pages: int,
        page: int,
        rows: int,
        device: torch.device,
    ) -> None:
        self.geometry, self.dtype, self.scaling = geometry, dtype, scaling
        self.page, self.rows, self.device = page, rows, device
        layout = (geometry.layers, pages, geometry.kv_heads, page, geometry.head_dim)
        self._buffers: dict[str, ReleasableBuffer] = {}
        self.generation = 0
        """Counts allocations. Graphs captured before the last one hold invalid addresses."""
        both = self._allocate("kv", (2, *layout), dtype)
        self.keys, self.values = both[0], both[1]
        self.selector: Selector | None = None
        self.summaries: Tensor | None = None
        self.ring: Tensor | None = None
        self.accumulated: Tensor | None = None

    def prepare(self, *, selector: Selector | None, ring: int, accumulated_tokens: int) -> None:
        """Allocate the buffers that the requests of a call need in addition to KV."""
        g, page_count = self.geometry, self.keys.shape[1]
        if selector is not None:
            self.selector = selector
            if self.summaries is None or self.summaries.shape[3] != selector.vectors:
                layout = (g.layers, page_count, g.kv_heads, selector.vectors, g.head_dim)
                self.summaries = self._allocate("summaries", layout, self.dtype)
        if ring and (self.ring is None or self.ring.shape[3] < ring):
            self.ring = self._allocate("ring", (g.layers, self.rows, g.query_heads, ring, g.head_dim), self.dtype)
        if accumulated_tokens and (self.accumulated is None or self.accumulated.shape[3] < accumulated_tokens):
            sums = (g.layers, self.rows, g.kv_heads, accumulated_tokens)
            self.accumulated = self._allocate("accumulated", sums, torch.float32)

    def _allocate(self, name: str, layout: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._buffers.pop(name, None)
        buffer = self._buffers[name] = ReleasableBuffer(math.prod(layout) * dtype.itemsize, self.device)
        self.generation += 1
        return buffer.tensor.view(dtype).view(layout)

    @property
    def resident(self) -> bool:
        return all(buffer.resident for buffer in self._buffers.values())

    def summarise(self, pages: Tensor) -> None:
        """Write the summaries of full pages that were not filled token by token."""
        assert self.selector is not None
        assert self.summaries is not None
        if len(pages):
            each = len(pages) * self.page * self.geometry.kv_token_bytes // (2 * self.geometry.layers)
            together = max(1, SUMMARISED_BYTES // each)
            for first in range(0, self.geometry.layers, together):  # a prompt's pages are many, an eviction's few
                layers = slice(first, first + together)
                summaries = self.selector.summarise(self.keys[layers, pages])
                self.summaries[layers, pages] = summaries.to(self.summaries.dtype)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def sleep(self) -> None:
        for buffer in self._buffers.values():
            buffer.release()

    def wake(self) -> None:
        for buffer in self._buffers.values():
            buffer.restore()


def pool_pages(
    kv_memory: str | int | None, geometry: Geometry, page: int, max_rows: int, max_length: int, device: torch.device
) -> tuple[int, int]:
    """The number of pages of the KV pool, and the most KV tokens of one sequence."""
    memory = parse_bytes(kv_memory) if kv_memory is not None else default_memory(device)
    pages = pages_in(memory, geometry, page)
    longest = min(max_length, (pages - 1) * page)
    if kv_memory is None:
        pages = min(pages, ample_pages(max_rows, longest, page))
    return pages, longest


def ample_pages(rows: int, longest: int, page: int) -> int:
    """Pages that `rows` sequences of `longest` tokens can fill, counted twice: an evicting sequence compacts into new
    pages while its prompt is still shared. A larger pool would only take longer to wake."""
    pages = pages_for(longest, page)
    return rows * 2 * (pages + 1) + pages + 64


def default_memory(device: torch.device) -> int:
    """80 % of the free memory of a GPU; 1 GiB on the CPU."""
    if device.type != "cuda":
        return 1 << 30
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * 0.8)


def pages_in(memory: int, geometry: Geometry, page: int) -> int:
    """Pages that fit into `memory` bytes."""
    pages = memory // (page * geometry.kv_token_bytes)
    require(
        pages >= 4,
        f"kv_memory={memory} bytes holds {pages} pages of {page} tokens ({page * geometry.kv_token_bytes} bytes each); "
        "give it at least 4 pages.",
    )
    return pages


def parse_bytes(text: str | int | float) -> int:
    """'60GiB', '512MiB', '1.5e9' or a number of bytes."""
    if isinstance(text, (int, float)):
        return int(text)
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
    for unit, factor in units.items():
        if text.strip().endswith(unit):
            number, scale = text.strip().removesuffix(unit), factor
            break
    else:
        number, scale = text, 1
    try:
        return int(float(number) * scale)
    except ValueError:
        raise SettingError(f"kv_memory={text!r}: write a size such as 60GiB, 512MiB or a number of bytes.") from None
