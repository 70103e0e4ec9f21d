"""Moves the state of sequences between their rows and pages on the device and memory outside of them."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alula.cgroups import CGROUPS, OWN_CGROUP, memory_left
from alula.engine.batch_state import BatchState, to_device, to_host
from alula.engine.model_runner import ModelRunner
from alula.engine.schedule_plan import Move, SwapOut
from alula.engine.sequence import Saved, Sequence
from alula.models.geometry import Geometry

PIECE_BYTES = 32 << 20
"""Swapped pages are copied in pieces of at most this size: pinned memory comes in powers of two, and pieces of one size
are used again by sequences of any length."""


@torch.inference_mode()
def swap_out(runner: ModelRunner, out: SwapOut) -> None:
    """Copy all KV of a sequence to host memory, and its row's state if it has a row."""
    saved, cache = out.sequence.saved, runner.cache
    if saved is None:  # it was dropped or ended after the plan
        return
    pages = to_device(np.asarray(out.pages, np.int64), runner.device)
    saved.parts = [[to_host(part[:, piece]) for piece in pages.split(piece_pages(part))] for part in cache.parts]
    if out.row is not None:
        state = runner.batches[out.sequence.request.kind]
        save_row(state, out.sequence, out.row, out.kv_len, saved)
        saved.token = state.token[out.row].clone()
    if saved.ring is not None:
        saved.ring = to_host(saved.ring)
    if saved.attention_sums is not None:
        saved.attention_sums = to_host(saved.attention_sums)


@torch.inference_mode()
def park(runner: ModelRunner, sequence: Sequence) -> None:
    """Copy the row's state of a session whose turn has ended; its KV stays in its pages."""
    assert sequence.row is not None
    sequence.saved = Saved()
    save_row(runner.batches[sequence.request.kind], sequence, sequence.row, sequence.kv_len, sequence.saved)


@torch.inference_mode()
def move_rows(runner: ModelRunner, moves: list[Move]) -> None:
    """Move the state of sequences to other rows."""
    for kind in {move.sequence.request.kind for move in moves}:
        state, of_kind = runner.batches[kind], [move for move in moves if move.sequence.request.kind == kind]
        source = to_device(np.asarray([move.source for move in of_kind]), runner.device)
        target = to_device(np.asarray([move.target for move in of_kind]), runner.device)
        state.token[target], state.ended[target] = state.token[source], state.ended[source]
        for buffer in (state.ring, state.accumulated):
            if buffer is not None:
                buffer[:, target] = buffer[:, source]
        for move in of_kind:
            state.enter(move.sequence, move.target, runner.cache.page)


def save_row(state: BatchState, sequence: Sequence, row: int, kv_len: int, saved: Saved) -> None:
    """Copy what the evictor needs: recent queries and attention sums."""
    evictor = sequence.request.evictor
    if evictor is not None and evictor.queries:
        saved.ring = state.ring[:, row, :, : evictor.queries].clone()  # type: ignore[index]
    if evictor is not None and evictor.accumulates:
        saved.attention_sums = state.accumulated[:, row, :, :kv_len].clone()  # type: ignore[index]


@torch.inference_mode()
def restore(runner: ModelRunner, sequence: Sequence) -> None:
    """Give a sequence its state back, in its new row and pages."""
    cache, state, saved, row = runner.cache, runner.batches[sequence.request.kind], sequence.saved, sequence.row
    assert saved is not None
    assert row is not None

    def on_device(tensor: Tensor) -> Tensor:
        return tensor.to(runner.device, non_blocking=True)

    if saved.parts:
        pages = to_device(np.asarray(sequence.pages, np.int64), runner.device)
        # a page allocated ahead of its tokens may have been saved: only pages that hold tokens come back
        for part, stored in zip(cache.parts, saved.parts):
            for held, piece in zip(stored, pages.split(piece_pages(part))):
                part[:, piece] = on_device(held)[:, : len(piece)]
        if state.kind.selector is not None:
            cache.summarise(state.kind.selector, pages[: sequence.kv_len // cache.page])
    if saved.ring is not None:
        state.ring[:, row, :, : saved.ring.shape[2]] = on_device(saved.ring)  # type: ignore[index]
    if saved.attention_sums is not None:
        state.set_sums(row, on_device(saved.attention_sums))  # type: ignore[arg-type]
    if saved.token is not None:
        state.token[row] = saved.token
    state.ended[row] = 0
    state.enter(sequence, row, cache.page)
    sequence.saved = None


def host_bytes(sequence: Sequence, geometry: Geometry, page: int, itemsize: int, pinned: bool) -> int:
    """Host memory that a swapped sequence takes. Pinned memory is allocated in powers of two."""
    evictor, pages = sequence.request.evictor, len(sequence.pages)
    vectors = page * geometry.layers * geometry.kv_heads
    page_bytes = 2 * [vectors * geometry.vector_bytes]
    if geometry.kv_dtype is not None:
        page_bytes = 2 * [vectors * geometry.head_dim] + 2 * [vectors]  # values, and their scales
    parts = []
    for each in page_bytes:
        full, rest = divmod(pages, pages_in_piece(each))
        parts += full * [pages_in_piece(each) * each] + [rest * each]
    if evictor is not None and evictor.queries:
        parts.append(geometry.layers * geometry.query_heads * evictor.queries * geometry.head_dim * itemsize)
    if evictor is not None and evictor.accumulates:
        parts.append(geometry.layers * geometry.kv_heads * sequence.kv_len * 4)
    return sum(1 << (part - 1).bit_length() if pinned else part for part in parts if part)


def pages_in_piece(page_bytes: int) -> int:
    return max(1, PIECE_BYTES // page_bytes)


def piece_pages(part: Tensor) -> int:
    """Pages of one of `KVCache.parts` that are copied at once."""
    return pages_in_piece(part[:, 0].nbytes)


def pin_with_threads() -> None:
    """Let torch pin host memory with several threads, three times as fast as with one: the first swaps wait for it.
    Nothing is changed where the environment has settings of torch's allocator."""
    set_ = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_ is not None and not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        set_("pinned_use_cuda_host_register:True,pinned_num_register_threads:8")


def default_swap_memory() -> int:
    """A quarter of the available host memory, divided among the ranks that torchrun started on this machine."""
    return available_memory() // (4 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroups: Path = CGROUPS, process: Path = OWN_CGROUP) -> int:
    """Bytes of host memory that can be allocated now: what the system has available, within the process' cgroups."""
    if not meminfo.exists():  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    available = int(line.split()[1]) * 1024
    left = memory_left(cgroups, process)
    return available if left is None else min(available, left)
