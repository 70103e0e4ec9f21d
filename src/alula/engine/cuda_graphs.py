"""CUDA graphs: how work is captured, and which captures are kept."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

CAPTURE_BYTES = 1 << 30
"""Free memory that capturing wants."""

MAX_GRAPHS = 256
"""Captures that are kept; the one unused for longest is dropped."""


class CUDAGraphs:
    """Captured work by key: the owner of the buffers that it reads, their generation, and what else tells it apart. A
    graph holds addresses, so that those of an older generation are invalid. All share one memory pool."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.device = device
        self._captured: OrderedDict[tuple, Any] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if enabled else None
        self._stream = torch.cuda.Stream(device) if enabled else None

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: tuple) -> bool:
        return key in self._captured

    def __getitem__(self, key: tuple) -> Any:
        self._captured.move_to_end(key)
        return self._captured[key]

    def __setitem__(self, key: tuple, captured: Any) -> None:
        self._captured[key] = captured
        if len(self._captured) > MAX_GRAPHS:
            self._captured.popitem(last=False)

    def values(self) -> list[Any]:
        return list(self._captured.values())

    def clear(self) -> None:
        self._captured.clear()

    def drop(self, owner: Hashable, current: int | None = None) -> None:
        """Drop the graphs on an owner's buffers, except those of the `current` generation."""
        for key in [k for k in self._captured if k[0] == owner and k[1] != current]:
            del self._captured[key]

    def capture(
        self, key: tuple, work: Callable[[], Any], warm_up: Callable[[], Any]
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of `work`, and what `work` returned; the caller keeps it under the key. `warm_up` runs first: it
        compiles and loads the kernels."""
        self.drop(*key[:2])  # graphs on buffers that were reallocated since
        if not self._captured:
            self._pool = torch.cuda.graph_pool_handle()
        if torch.cuda.mem_get_info(self.device)[0] < CAPTURE_BYTES:
            torch.cuda.empty_cache()  # not each time: memory that is given back takes long to get again
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                warm_up()
                graph.capture_begin(pool=self._pool)
                try:
                    result = work()
                finally:
                    graph.capture_end()
        finally:  # what ran on it may write pages that are given to others next
            torch.cuda.current_stream().wait_stream(stream)
        return graph, result
