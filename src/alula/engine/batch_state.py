"""The state of every batch row on the device. Decoding advances it there; the host uploads what it planned.

Between host and device, without waiting: planned arrays go up, results come down behind what made them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from alula.engine.features import Features
from alula.engine.sequence import UNLIMITED, Sequence
from alula.sparsity.evict import build
from alula.sparsity.schedule import Schedule


class Rows:
    INTS = ("position", "kv_len", "remaining", "ring_size", "accumulates", "bin_width", "top_k", "free_from")

    def __init__(
        self, rows: int, width: int, steps: int, device: torch.device, dtype: torch.dtype, hidden: int
    ) -> None:
        self.count, self.steps, self.device = rows, steps, device
        self._hidden: dict[str, Any] = {"size": (rows, steps, hidden), "dtype": dtype, "device": device}
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.ints = torch.zeros(len(self.INTS), rows, dtype=torch.int32, device=device)
        self.floats = torch.zeros(2, rows, device=device)
        self.key = torch.zeros(rows, dtype=torch.int64, device=device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.live = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tokens = torch.ones(rows, dtype=torch.int32, device=device)
        """KV tokens that the current step's attention sees."""
        self.forced = torch.full((rows, steps), -1, dtype=torch.int64, device=device)
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self.out_token = torch.zeros(rows, steps, dtype=torch.int64, device=device)
        self.out_logprob = torch.zeros(rows, steps, device=device)
        self.out_acceptance = torch.zeros(rows, steps, device=device)
        self.generation = 0
        self._sizes = sizes(Features())
        self._allocate(*self._sizes)
        self._host_ints = np.zeros((len(self.INTS), rows), np.int32)
        self._host_floats = np.zeros((2, rows), np.float32)
        self._host_key = np.zeros(rows, np.int64)

    def _allocate(self, schedule_bins: int, banned: int, topk: int, teacher: int, hidden: int) -> None:
        rows, steps, device = self.count, self.steps, self.device
        self.budget = torch.full((rows, schedule_bins), UNLIMITED, dtype=torch.int32, device=device)
        self.banned = torch.full((rows, banned), -1, dtype=torch.int64, device=device)
        self.out_topk_id = torch.zeros(rows, steps, topk, dtype=torch.int64, device=device)
        self.out_topk_logprob = torch.zeros(rows, steps, topk, device=device)
        self.teacher = torch.zeros(**self._hidden) if teacher else None
        """The dense hidden states that predict the tokens of the chunk at hand."""
        self.out_hidden = torch.zeros(**self._hidden) if hidden else None
        self._host_budget = np.full((rows, schedule_bins), UNLIMITED, np.int32)
        self._host_banned = np.full((rows, banned), -1, np.int64)
        self._dirty = True

    def prepare(self, features: Features) -> None:
        """Fit the buffers whose size depends on the requests. They only grow, so that graphs captured for other
        requests stay valid: a run that measures between its rollouts captures each graph once."""
        needed = tuple(map(max, self._sizes, sizes(features)))
        if needed != self._sizes:
            self._sizes = needed
            self._allocate(*needed)
            self.generation += 1

    def __getattr__(self, name: str) -> Tensor:
        if name in Rows.INTS:
            return self.ints[Rows.INTS.index(name)]
        raise AttributeError(name)

    @property
    def temperature(self) -> Tensor:
        return self.floats[0]

    @property
    def top_p(self) -> Tensor:
        return self.floats[1]

    def enter(self, sequence: Sequence, key: int, page: int) -> None:
        """Note a sequence's settings for the row it was given."""
        row, sampling, sparsity = sequence.row, sequence.request.sampling, sequence.request.sparsity
        evictor = build(sparsity.evict) if sparsity.evict else None
        ints = dict.fromkeys(self.INTS, 0) | {
            "ring_size": evictor.queries if evictor else 0,
            "accumulates": int(evictor.accumulates) if evictor else 0,
            "bin_width": 1,
            "top_k": sampling.top_k,
            "free_from": sequence.prompt + sampling.min_new_tokens,
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
        self._host_key[row] = key
        self._host_banned[row] = -1
        if sampling.min_new_tokens:
            stop = sorted(sequence.request.stop)
            self._host_banned[row, : len(stop)] = stop
        self._dirty = True

    def upload(self, position: np.ndarray, kv_len: np.ndarray, remaining: np.ndarray, forced: np.ndarray) -> None:
        self._host_ints[0], self._host_ints[1], self._host_ints[2] = position, kv_len, remaining
        put(self.ints, self._host_ints)
        put(self.forced[:, : forced.shape[1]], forced)
        self.column.zero_()
        if self._dirty:
            put(self.floats, self._host_floats)
            put(self.key, self._host_key)
            put(self.budget, self._host_budget)
            put(self.banned, self._host_banned)
            self._dirty = False


def sizes(features: Features) -> tuple[int, ...]:
    return features.schedule_bins, features.banned, features.topk, features.teacher, features.hidden


def rollout_key(seed: int, prompt: int, sample: int) -> int:
    """A 64-bit key per rollout: splitmix64 over (seed, prompt, sample)."""
    key = 0
    for word in (seed, prompt, sample):
        key = (key + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key - (1 << 64) if key >> 63 else key


def sequence_key(sequence: Sequence) -> int:
    """The key of a rollout's random numbers."""
    request = sequence.request
    if request.key is not None:
        return request.key
    return rollout_key(request.sampling.seed, request.prompt_index, sequence.sample)


def put(target: Tensor, array: np.ndarray) -> None:
    """Copy to the device without waiting; a fresh pinned buffer each time, so that the host may go on writing."""
    source = torch.from_numpy(np.ascontiguousarray(array))
    if target.is_cuda:
        source = source.pin_memory()
    elif source.data_ptr() == array.ctypes.data:
        source = source.clone()
    target.copy_(source, non_blocking=True)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    out = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, device=device)
    put(out, array)
    return out


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, made in the stream's order; on CUDA it is there once the stream has passed."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


class Results:
    """Tensors on their way to the host: `arrays` waits for them, and for nothing launched later."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._hosted = {name: to_host(tensor) for name, tensor in tensors.items()}
        self._done = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._done = torch.cuda.Event()
            self._done.record()

    def arrays(self) -> dict[str, np.ndarray]:
        if self._done is not None:
            self._done.synchronize()
        return {name: tensor.numpy() for name, tensor in self._hosted.items()}
