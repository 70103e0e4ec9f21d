"""The state of every global random generator as JSON."""

import base64
import random
from typing import Any, cast

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state())
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_bytes(text) for text in state["cuda"]])


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
