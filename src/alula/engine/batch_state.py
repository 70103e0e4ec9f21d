"""The batch on the device: the state of every row, its features, and copies between host and device.

The host uploads what the scheduler planned; decode steps advance the state on the device. No copy waits: uploads are
queued before the steps that read them, results are copied back behind the steps that write them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alula.engine.sequence import BatchKind, Sequence
from alula.engine.virtual_memory import ReleasableBuffers
from alula.models.geometry import Geometry
from alula.ops.advance_rows import RowState
from alula.sparsity.footprint import UNLIMITED
from alula.sparsity.schedule import Schedule
from alula.sparsity.select import METHODS as SELECTORS
from alula.sparsity.select import Selector


@dataclass(frozen=True)
class BatchFeatures:
    """What requests need besides plain decoding. Decides buffer sizes and which CUDA graph runs."""

    ring: int = 0
    """Recent queries kept per row for evictors."""
    accumulated: int = 0
    """Tokens whose received attention is summed up, for evictors that need it (H2O)."""
    proposal: bool = False
    """Whether tokens are drawn from a filtered distribution: top-p, top-k or min_new_tokens."""
    topk: int = 0
    teacher: bool = False
    """Whether forced tokens are compared with the dense policy's hidden states."""
    hidden: bool = False
    """Whether hidden states are returned."""
    record_selected: bool = False
    schedule_bins: int = 1
    banned: int = 1
    """Stop tokens that `min_new_tokens` bans, at most."""
    stops: int = 0
    """Stop tokens that end a session's turn on the device, at most."""

    def __or__(self, other: "BatchFeatures") -> "BatchFeatures":
        """The features that serve both."""
        if self == other:
            return self
        names = [field.name for field in fields(self)]
        return BatchFeatures(**{name: max(getattr(self, name), getattr(other, name)) for name in names})

    @property
    def graph_key(self) -> tuple:
        """What changes a captured decode step."""
        switches = (self.ring, self.accumulated, self.proposal, self.teacher, self.hidden, self.stops)
        return (self.topk, *map(bool, switches))

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> "BatchFeatures":
        features: BatchFeatures | None = None
        for sequence in sequences:
            request = sequence.request
            sampling, evictor = request.sampling, request.evictor
            select, sums = request.sparsity.select, evictor is not None and evictor.accumulates
            needed = cls(
                ring=evictor.queries if evictor else 0,
                accumulated=sequence.max_kv_tokens() if sums else 0,
                proposal=bool(sampling.filtered or sampling.min_new_tokens),
                topk=sampling.topk_logprobs,
                teacher=request.teacher is not None,
                hidden=request.keep_hidden > 0,
                record_selected=bool(request.record and select),
                schedule_bins=len(select.budget.budgets) if select and isinstance(select.budget, Schedule) else 1,
                banned=max(1, len(request.stop)) if sampling.min_new_tokens else 1,
                stops=len(request.stop) if request.session else 0,
            )
            features = needed if features is None else features | needed
        return features or cls()


class StepSize(NamedTuple):
    """What a decode step is captured for."""

    rows: int
    kv_len: int
    """The most tokens that a row holds."""
    read_len: int
    """The most tokens that a layer reads of a row if it selects."""


class BatchState:
    """Buffers of all batch rows of one kind, at fixed addresses that captured CUDA graphs rely on.

    `ring` [layer, row, q_head, W, head_dim] keeps recent queries and `accumulated` fp32 [layer, row, kv_head, tokens]
    the attention received, for evictors that need them.
    """

    INTS = ("position", "kv_len", "remaining", "ring_size", "accumulates", "bin_width", "top_k", "stop_from")

    def __init__(
        self,
        kind: BatchKind,
        geometry: Geometry,
        rows: int,
        width: int,
        steps: int,
        device: torch.device,
        dtype: torch.dtype,
        hidden: int,
        resident: bool = True,
    ) -> None:
        self.kind, self.geometry, self.features = kind, geometry, BatchFeatures()
        self.selector: Selector | None = SELECTORS[kind.selector] if kind.selector else None
        self.rows, self.steps, self.device, self.dtype = rows, steps, device, dtype
        self._hidden: dict[str, Any] = {"size": (rows, steps, hidden), "dtype": dtype, "device": device}
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        """Page table."""
        self.ints = torch.zeros(len(self.INTS), rows, dtype=torch.int32, device=device)
        self.floats = torch.zeros(2, rows, device=device)
        """temperature and top_p"""
        self.key = torch.zeros(rows, dtype=torch.int64, device=device)
        """Key of each rollout's random numbers."""
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        """The last sampled token: input of the next step."""
        self.live = torch.zeros(rows, dtype=torch.int32, device=device)
        """1 for rows that decode in the current step, else 0."""
        self.ended = torch.zeros(rows, dtype=torch.int32, device=device)
        """1 for rows of sessions that sampled a stop token."""
        self.context_len = torch.ones(rows, dtype=torch.int32, device=device)
        """KV tokens that attention may read in the current step, the new one included."""
        self.forced = torch.full((rows, steps), -1, dtype=torch.int64, device=device)
        """Given tokens of the chunk (scoring); -1 where tokens are sampled."""
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        """The current step of the chunk: the column of `forced` to read and of `out_*` to write."""
        self.out_token = torch.zeros(rows, steps, dtype=torch.int64, device=device)
        self.out_logprob = torch.zeros(rows, steps, device=device)
        self.out_acceptance = torch.zeros(rows, steps, device=device)
        self.generation = 0
        """Counts allocations. Graphs captured before the last one hold invalid addresses."""
        self.buffers = ReleasableBuffers(device, resident)
        self.ring: Tensor | None = None
        self.accumulated: Tensor | None = None
        self._host_ints = np.zeros((len(self.INTS), rows), np.int32)
        self._host_floats = np.zeros((2, rows), np.float32)
        self._host_key = np.zeros(rows, np.int64)
        self._host_budget = np.full((rows, 0), UNLIMITED, np.int32)
        self._host_banned = np.full((rows, 0), -1, np.int64)
        self._host_stop = np.full((rows, 0), -1, np.int64)
        self._dirty = True
        """Whether settings of rows are yet to be uploaded."""
        self._allocate(self.features)

    def prepare(self, features: BatchFeatures, keep: bool) -> None:
        """Make room for requests with these features. Buffers never shrink, so graphs captured for other requests stay
        valid; they grow by copying. Without `keep` no row is in use, and features of earlier requests are dropped."""
        grown = self._sizes | features
        if grown != self._sizes:
            self.generation += 1  # first, and `_dirty` too: there may be no memory for all of it
            self._dirty = True
            self._allocate(grown)
        self.features = self.features | features if keep else features

    def _allocate(self, sizes: BatchFeatures) -> None:
        """The large buffers first: if they find no memory, nothing that running rows read has changed."""
        rows, steps, device, g = self.rows, self.steps, self.device, self.geometry
        self.ring = self._grown("ring", self.ring, (g.layers, rows, g.query_heads, sizes.ring, g.head_dim))
        sums = (g.layers, rows, g.kv_heads, sizes.accumulated)
        self.accumulated = self._grown("accumulated", self.accumulated, sums, torch.float32)
        self.teacher = torch.zeros(**self._hidden) if sizes.teacher else None
        """Dense hidden states that predict the tokens of the current chunk."""
        self.out_hidden = torch.zeros(**self._hidden) if sizes.hidden else None
        self.out_topk_id = torch.zeros(rows, steps, sizes.topk, dtype=torch.int64, device=device)
        self.out_topk_logprob = torch.zeros(rows, steps, sizes.topk, device=device)
        self._host_budget = widened(self._host_budget, sizes.schedule_bins, UNLIMITED)
        self._host_banned = widened(self._host_banned, sizes.banned, -1)
        self._host_stop = widened(self._host_stop, sizes.stops, -1)
        self.budget = torch.full((rows, sizes.schedule_bins), UNLIMITED, dtype=torch.int32, device=device)
        self.banned = torch.full((rows, sizes.banned), -1, dtype=torch.int64, device=device)
        self.stop = torch.full((rows, sizes.stops), -1, dtype=torch.int64, device=device)
        ring, summed = (0 if buffer is None else buffer.shape[3] for buffer in (self.ring, self.accumulated))
        self._sizes = replace(sizes, ring=ring, accumulated=summed)

    def _grown(
        self, name: str, old: Tensor | None, layout: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """The buffer `old` with the size of `layout` along axis 3, recent queries or tokens, and its content."""
        size = layout[3]
        if not size or (old is not None and old.shape[3] >= size):
            return old
        if old is not None:  # grow by half at least, so that few requests make it grow again
            size = max(size, old.shape[3] * 3 // 2)
            layout = (*layout[:3], size, *layout[4:])
        return self.buffers.allocate(name, layout, dtype or self.dtype, old)

    def set_sums(self, row: int, sums: Tensor) -> None:
        """Replace a row's attention sums by `sums` [L, Hkv, tokens]."""
        assert self.accumulated is not None
        self.accumulated[:, row] = 0
        self.accumulated[:, row, :, : sums.shape[2]] = sums

    def __getattr__(self, name: str) -> Tensor:
        if name in BatchState.INTS:
            return self.ints[BatchState.INTS.index(name)]
        raise AttributeError(name)

    @property
    def temperature(self) -> Tensor:
        return self.floats[0]

    @property
    def top_p(self) -> Tensor:
        return self.floats[1]

    def pages_read(self, rows: Iterable[int]) -> int:
        """The most pages that a selector may read of any of these rows."""
        return int(self._host_budget[list(rows)].max())

    def row_state(self, rows: int) -> RowState:
        """What decode steps advance, of the rows 0 .. rows-1."""
        names = ("position", "kv_len", "remaining", "live", "context_len", "token", "forced")
        buffers = {name: getattr(self, name)[:rows] for name in names}
        stops = {"stop": self.stop[:rows], "ended": self.ended[:rows]} if self.features.stops else {}
        return RowState(**buffers, column=self.column, **stops)

    def enter(self, sequence: Sequence, row: int, page: int) -> None:
        """Note a sequence's settings for a row; they are uploaded with the next chunk."""
        sampling, sparsity = sequence.request.sampling, sequence.request.sparsity
        evictor = sequence.request.evictor
        ints = dict.fromkeys(self.INTS, 0) | {
            "ring_size": evictor.queries if evictor else 0,
            "accumulates": int(evictor.accumulates) if evictor else 0,
            "bin_width": 1,
            "top_k": min(UNLIMITED, sampling.top_k),
            "stop_from": sequence.prompt_len + sequence.turn_start + sampling.min_new_tokens,
        }
        self._host_budget[row] = UNLIMITED
        if sparsity.select:
            budget = sparsity.select.budget
            if isinstance(budget, Schedule):
                ints["bin_width"] = budget.width
                pages = [min(UNLIMITED, -(-tokens // page)) for tokens in budget.budgets]
                self._host_budget[row] = pages + pages[-1:] * (self._host_budget.shape[1] - len(pages))
            else:
                self._host_budget[row] = min(UNLIMITED, -(-budget // page))
        self._host_ints[:, row] = [ints[name] for name in self.INTS]
        self._host_floats[:, row] = sampling.temperature, sampling.top_p
        self._host_key[row] = sequence.key
        self._host_banned[row] = -1
        if sampling.min_new_tokens:
            stop = sorted(sequence.request.stop)
            self._host_banned[row, : len(stop)] = stop
        self._host_stop[row] = -1
        if sequence.request.session:
            self._host_stop[row, : len(sequence.request.stop)] = sorted(sequence.request.stop)
        self._dirty = True

    def upload(self, position: np.ndarray, kv_len: np.ndarray, remaining: np.ndarray, forced: np.ndarray) -> None:
        """Copy the start of a chunk, and settings of rows that changed, to the device."""
        self._host_ints[0], self._host_ints[1], self._host_ints[2] = position, kv_len, remaining
        copy_to(self.ints, self._host_ints)
        copy_to(self.forced[:, : forced.shape[1]], forced)
        self.column.zero_()
        self.upload_settings()

    def upload_settings(self) -> None:
        """Copy settings of rows that changed to the device."""
        if self._dirty:
            copy_to(self.floats, self._host_floats)
            copy_to(self.key, self._host_key)
            copy_to(self.budget, self._host_budget)
            copy_to(self.banned, self._host_banned)
            copy_to(self.stop, self._host_stop)
            self._dirty = False


def widened(array: np.ndarray, columns: int, value: int) -> np.ndarray:
    """The array with more columns; a row's last value, if it has one, is repeated in them."""
    fill = array[:, -1:] if array.shape[1] else np.full((len(array), 1), value, array.dtype)
    return np.concatenate([array, np.repeat(fill, columns - array.shape[1], 1)], 1)


def copy_to(target: Tensor, array: np.ndarray) -> None:
    """Copy to the device without waiting, through a new pinned buffer each time, so that the host may reuse `array`."""
    source = torch.from_numpy(np.ascontiguousarray(array))
    if target.is_cuda:
        source = source.pin_memory()
    elif source.data_ptr() == array.ctypes.data:
        source = source.clone()
    target.copy_(source, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A new device tensor with the array's values, copied without waiting."""
    out = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, device=device)
    copy_to(out, array)
    return out


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, queued on the stream; on CUDA it is valid once the stream has reached it."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


class PendingResults:
    """Tensors being copied to the host. `arrays` waits for them, and for nothing launched later."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._copies = {name: to_host(tensor) for name, tensor in tensors.items()}
        self._done = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._done = torch.cuda.Event()
            self._done.record()

    def arrays(self) -> dict[str, np.ndarray]:
        if self._done is not None:
            self._done.synchronize()
        return {name: tensor.numpy() for name, tensor in self._copies.items()}
