"""The KV cache's tensors, and the buffers that some policies need in addition."""

import os

import torch
from torch import Tensor

from alula.engine.block_manager import pages_for
from alula.engine.virtual_memory import ReleasableBuffers
from alula.errors import SettingError, require
from alula.files import size_text
from alula.models.geometry import Geometry
from alula.ops import eight_bits
from alula.ops.compact import PagedKeys
from alula.ops.summarise_pages import summarise_pages
from alula.ops.write_tokens import write_tokens
from alula.sparsity.evict.query_statistics import QueryStatistics
from alula.sparsity.select import METHODS as SELECTORS


class KVCache:
    """keys, values [layer, page, kv_head, slot, head_dim]. Every (layer, head) keeps its own tokens, but the same
    number of them, so one page table serves all. `summaries` [layer, page, kv_head, 1|2, head_dim], by selector, are
    allocated when a request first needs them. With `geometry.kv_dtype` keys and values are quantised
    (`alula.ops.eight_bits`), and `scales` uint8 [2, layer, page, kv_head, slot] are those of keys and of values;
    `dtype` stays the model's.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        scaling: float,
        pages: int,
        page: int,
        device: torch.device,
    ) -> None:
        self.geometry, self.dtype, self.scaling = geometry, dtype, scaling
        self.page, self.device = page, device
        layout = (geometry.layers, pages, geometry.kv_heads, page, geometry.head_dim)
        self.buffers = ReleasableBuffers(device)
        stored = dtype if geometry.kv_dtype is None else eight_bits.DTYPES[geometry.kv_dtype]
        both = self.buffers.allocate("kv", (2, *layout), stored)
        self.keys, self.values = both[0], both[1]
        self.scales: Tensor | None = None
        self.parts = [self.keys, self.values]
        """All that moves with a page: [layer, page, ...] each. torch moves quantised values as bytes."""
        if geometry.kv_dtype is not None:
            self.scales = self.buffers.allocate("scales", (2, *layout[:-1]), torch.uint8)
            self.parts = [part.view(torch.uint8) for part in self.parts] + [*self.scales]
        self.summaries: dict[str, Tensor] = {}
        self.query_statistics: QueryStatistics | None = None
        """What TriAttention knows of the model's queries."""

    def prepare(self, selector: str | None) -> None:
        """Allocate the summaries of a selector."""
        if selector is not None and selector not in self.summaries:
            g = self.geometry
            layout = (g.layers, self.keys.shape[1], g.kv_heads, SELECTORS[selector].vectors, g.head_dim)
            self.summaries[selector] = self.buffers.allocate(selector, layout, self.dtype)

    @property
    def resident(self) -> bool:
        return self.buffers.resident

    def summarise(self, method: str, pages: Tensor) -> None:
        """Write a selector's summaries of full pages that were not filled token by token."""
        scales = None if self.scales is None else self.scales[0]
        summarise_pages(self.keys, pages, self.summaries[method], SELECTORS[method], scales)

    def write(self, layer: int, page: Tensor, slot: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [T, Hkv, D] of tokens in their slots; returns them as they will be read."""
        scales = None if self.scales is None else self.scales[:, layer]
        return write_tokens(key, value, page, slot, self.keys[layer], self.values[layer], scales)

    def read(self, layer: int, page: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, Hkv, D] of tokens."""
        stored = [part[layer][page, :, slot] for part in self.parts]
        if self.scales is None:
            return stored[0], stored[1]
        key, value, *exponents = stored
        quantised = (key.view(self.keys.dtype), value.view(self.values.dtype))
        read = [eight_bits.dequantise(x, exponent, self.dtype) for x, exponent in zip(quantised, exponents)]
        return read[0], read[1]

    def paged(self, which: int, table: Tensor, n: int) -> PagedKeys:
        """The first n keys (0) or values (1) of the sequences with the pages `table`, for an evictor."""
        scales = None if self.scales is None else self.scales[which]
        return PagedKeys((self.keys, self.values)[which], table, n, scales, self.dtype)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        for part in self.parts:
            part[:, target] = part[:, source]


def check_kv_dtype(kv_dtype: str | None, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Raise for a KV dtype that the model's dtype or the device does not allow."""
    names = " or ".join(eight_bits.DTYPES)
    require(
        kv_dtype is None or kv_dtype in eight_bits.DTYPES,
        f"kv_dtype={kv_dtype}: must be {names}, or left out for the model's dtype.",
    )
    if kv_dtype is not None:
        require(
            dtype != torch.float16,
            f"kv_dtype={kv_dtype}: its scales exceed the range of a float16 model; load it with dtype=bfloat16.",
        )
    if kv_dtype == "fp8":
        require(
            device is None or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9),
            f"kv_dtype={kv_dtype}: this GPU has no 8-bit floats (compute capability 8.9 or above); use int8.",
        )


def pool_pages(
    kv_memory: str | int | None, geometry: Geometry, page: int, max_rows: int, max_length: int, device: torch.device
) -> tuple[int, int]:
    """The number of pages of the KV pool, and the most KV tokens of one sequence."""
    memory = parse_bytes(kv_memory) if kv_memory is not None else default_memory(device)
    total = total_memory(device)
    require(memory <= total, f"kv_memory={kv_memory}: {device} has {size_text(total)} in all; lower it.")
    pages = pages_in(memory, geometry, page)
    longest = min(max_length, longest_in(pages, page))
    if kv_memory is None:
        pages = min(pages, ample_pages(max_rows, longest, page))
    return pages, longest


def longest_in(pages: int, page: int) -> int:
    """The longest dense sequence that a pool can run: one page stays empty, and one is for the copy of a page that the
    sequence shares."""
    return (pages - 2) * page


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


def total_memory(device: torch.device) -> int:
    """All memory of a device, used or free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def pages_in(memory: int, geometry: Geometry, page: int) -> int:
    """Pages that fit into `memory` bytes."""
    pages = memory // (page * geometry.kv_token_bytes)
    require(
        pages >= 4,
        f"kv_memory={memory} bytes holds {pages} pages of {page} tokens ({page * geometry.kv_token_bytes} bytes each); "
        f"give it at least 4 pages, {4 * page * geometry.kv_token_bytes} bytes.",
    )
    return pages


def parse_bytes(text: str | int | float, setting: str = "kv_memory") -> int:
    """'60GiB', '512MiB', '1.5e9' or a number of bytes."""
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
    number, scale = str(text).strip(), 1
    for unit, factor in units.items():
        if number.endswith(unit):
            number, scale = number.removesuffix(unit), factor
            break
    try:
        return int(float(number) * scale)
    except (ValueError, OverflowError):  # of infinity
        raise SettingError(f"{setting}={text!r}: write a size such as 60GiB, 512MiB or a number of bytes.") from None
