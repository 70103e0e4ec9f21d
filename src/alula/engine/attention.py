"""Where the model's own modules call the engine: one attention function for transformers' AttentionInterface.

The function is an opaque operator for `torch.compile`: it takes the layer's number as a tensor, because a Python
number would be compiled into every layer's code, and finds the cache through the runner that is active.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "alula"


class Attends(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D] of the step's new tokens -> [T, Hq, D]"""


_active: list[Attends] = []


@contextmanager
def active(runner: Attends) -> Iterator[None]:
    _active.append(runner)
    try:
        yield
    finally:
        _active.pop()


@torch.library.custom_op("alula::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float) -> Tensor:
    """[1, H, T, D] each -> [1, T, Hq, D]"""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _active[-1].attend(int(layer), q, k, v, scaling).unsqueeze(0)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    return attend(query, key, value, module.alula_layer, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)


def install(model: nn.Module) -> None:
    """Route a model's attention here."""
    model.config._attn_implementation = NAME  # type: ignore[union-attr]
    number_layers(model)


def number_layers(model: nn.Module) -> None:
    """Every attention module's number as a tensor. It stays on the CPU, where reading it costs nothing."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.alula_layer = torch.tensor(module.layer_idx)
