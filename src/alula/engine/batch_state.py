"""The batch on the device: the state of every row, its features, and copies between host and device.

The host uploads what the scheduler planned; decode steps advance the state on the device. No copy waits: uploads are
queued before the steps that read them, results are copied back behind the steps that write them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alula.engine.sequence import Request, Sequence, evictor_for
from alula.errors import require
from alula.sparsity.footprint import UNLIMITED
from alula.sparsity.schedule import Schedule
from alula.sparsity.select import METHODS as SELECTORS
from alula.sparsity.select import Selector


@dataclass(frozen=True)
class BatchFeatures:
    """What the requests of one call need besides plain decoding. Decides buffer sizes and which CUDA graph runs."""

    selector: str | None = None
    dense_layers: int = 0
    ring: int = 0
    """Recent queries kept per row for evictors."""
    accumulates: bool = False
    """Whether an evictor needs the attention that every token received (H2O)."""
    proposal: bool = False
    """Whether tokens are drawn from a filtered distribution: top-p, top-k or min_new_tokens."""
    topk: int = 0
    teacher: bool = False
    """Whether forced tokens are compared with the dense policy's hidden states."""
    hidden: bool = False
    """Whether hidden states are returned."""
    adapted: bool = False
    """Whether the weights with the sparse adapter are used (`Engine(sparse_adapter=...)`)."""
    record_selected: bool = False
    schedule_bins: int = 1
    banned: int = 1
    """Stop tokens that `min_new_tokens` bans, at most."""

    @property
    def page_selector(self) -> Selector | None:
        return SELECTORS[self.selector] if self.selector else None

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "BatchFeatures":
        requests = list(requests)
        selects = {r.sparsity.select for r in requests if r.sparsity.select}
        kinds = {(s.method, s.dense_layers) for s in selects}
        require(
            len(kinds) <= 1,
            "select: one call can mix budgets, but not selectors or dense_layers; "
            f"got {sorted(kinds)}, use one call for each.",
        )
        evictors = [evictor_for(e) for e in {r.sparsity.evict for r in requests if r.sparsity.evict}]
        method, dense_layers = next(iter(kinds), (None, 0))
        samplings = {r.sampling for r in requests}
        return cls(
            selector=method,
            dense_layers=dense_layers,
            ring=max((e.queries for e in evictors), default=0),
            accumulates=any(e.accumulates for e in evictors),
            proposal=any(s.filtered or s.min_new_tokens for s in samplings),
            topk=max((s.topk_logprobs for s in samplings), default=0),
            teacher=any(r.teacher is not None for r in requests),
            hidden=any(r.keep_hidden > 0 for r in requests),
            record_selected=any(r.record and r.sparsity.select for r in requests),
            schedule_bins=max((len(s.budget.budgets) for s in selects if isinstance(s.budget, Schedule)), default=1),
            banned=max((len(r.stop) for r in requests if r.sampling.min_new_tokens), default=1),
        )


class BatchState:
    """Buffers of all batch rows, at fixed addresses that captured CUDA graphs rely on."""

    INTS = ("position", "kv_len", "remaining", "ring_size", "accumulates", "bin_width", "top_k", "stop_from")

    def __init__(
        self, rows: int, width: int, steps: int, device: torch.device, dtype: torch.dtype, hidden: int
    ) -> None:
        self.rows, self.steps, self.device = rows, steps, device
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
        self._sizes = buffer_sizes(BatchFeatures())
        self._allocate(*self._sizes)
        self._host_ints = np.zeros((len(self.INTS), rows), np.int32)
        self._host_floats = np.zeros((2, rows), np.float32)
        self._host_key = np.zeros(rows, np.int64)

    def _allocate(self, schedule_bins: int, banned: int, topk: int, teacher: int, hidden: int) -> None:
        rows, steps, device = self.rows, self.steps, self.device
        self.budget = torch.full((rows, schedule_bins), UNLIMITED, dtype=torch.int32, device=device)
        self.banned = torch.full((rows, banned), -1, dtype=torch.int64, device=device)
        self.out_topk_id = torch.zeros(rows, steps, topk, dtype=torch.int64, device=device)
        self.out_topk_logprob = torch.zeros(rows, steps, topk, device=device)
        self.teacher = torch.zeros(**self._hidden) if teacher else None
        """Dense hidden states that predict the tokens of the current chunk."""
        self.out_hidden = torch.zeros(**self._hidden) if hidden else None
        self._host_budget = np.full((rows, schedule_bins), UNLIMITED, np.int32)
        self._host_banned = np.full((rows, banned), -1, np.int64)
        self._dirty = True

    def prepare(self, features: BatchFeatures) -> None:
        """Grow the buffers whose size depends on the requests. They never shrink, so graphs captured for other requests
        stay valid: a run that measures between its rollouts captures each graph once."""
        needed = tuple(map(max, self._sizes, buffer_sizes(features)))
        if needed != self._sizes:
            self._sizes = needed
            self._allocate(*needed)
            self.generation += 1

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

    def enter(self, sequence: Sequence, page: int) -> None:
        """Note a sequence's settings for its row; they are uploaded with the next chunk."""
        row, sampling, sparsity = sequence.row, sequence.request.sampling, sequence.request.sparsity
        evictor = sequence.request.evictor
        ints = dict.fromkeys(self.INTS, 0) | {
            "ring_size": evictor.queries if evictor else 0,
            "accumulates": int(evictor.accumulates) if evictor else 0,
            "bin_width": 1,
            "top_k": sampling.top_k,
            "stop_from": sequence.prompt_len + sampling.min_new_tokens,
        }
        self._host_budget[row] = UNLIMITED
        if sparsity.select:
            budget = sparsity.select.budget
            if isinstance(budget, Schedule):
                ints["bin_width"] = budget.width
                pages = [-(-tokens // page) for tokens in budget.budgets]
                self._host_budget[row] = pages + pages[-1:] * (self._host_budget.shape[1] - len(pages))
            else:
                self._host_budget[row] = -(-budget // page)
        self._host_ints[:, row] = [ints[name] for name in self.INTS]
        self._host_floats[:, row] = sampling.temperature, sampling.top_p
        self._host_key[row] = sequence.key
        self._host_banned[row] = -1
        if sampling.min_new_tokens:
            stop = sorted(sequence.request.stop)
            self._host_banned[row, : len(stop)] = stop
        self._dirty = True

    def upload(self, position: np.ndarray, kv_len: np.ndarray, remaining: np.ndarray, forced: np.ndarray) -> None:
        """Copy the start of a chunk, and settings of rows that changed, to the device."""
        self._host_ints[0], self._host_ints[1], self._host_ints[2] = position, kv_len, remaining
        copy_to(self.ints, self._host_ints)
        copy_to(self.forced[:, : forced.shape[1]], forced)
        self.column.zero_()
        if self._dirty:
            copy_to(self.floats, self._host_floats)
            copy_to(self.key, self._host_key)
            copy_to(self.budget, self._host_budget)
            copy_to(self.banned, self._host_banned)
            self._dirty = False


def buffer_sizes(features: BatchFeatures) -> tuple[int, ...]:
    return features.schedule_bins, features.banned, features.topk, features.teacher, features.hidden


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
