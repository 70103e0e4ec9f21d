"""The sparse policy's attention as one operator that `torch.compile` does not look into, with its gradient.

A compiled layer serves all layers and all micro-batches, so what differs between them comes as tensors: the layer's
number, and a ticket for the `View`, which is looked up here, in the forward pass and again in the backward one.
"""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from alula.distill.attention import kernel
from alula.distill.attention.tiles import look
from alula.distill.attention.visibility import View

_views: WeakValueDictionary[int, View] = WeakValueDictionary()
_numbers = count()


def ticket(view: View) -> Tensor:
    """Good for as long as somebody holds the view."""
    number = next(_numbers)
    _views[number] = view
    return torch.tensor(number)


@torch.library.custom_op("alula::attend_opaquely", mutates_args=())
def attend_opaquely(
    q: Tensor, k: Tensor, v: Tensor, view: Tensor, layer: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D], contiguous -> [T, Hq, D], and what the gradient needs, [Hq, T]"""
    return kernel.attention_forward(q, k, v, *look(_views[int(view)], int(layer), q, k), scaling)


@attend_opaquely.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, view: Tensor, layer: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("alula::attend_opaquely_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    view: Tensor,
    layer: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    seen = look(_views[int(view)], int(layer), q, k)
    return kernel.attention_backward(gradient.contiguous(), q, k, v, out, lse, *seen, scaling)


@_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    view: Tensor,
    layer: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, view, layer, out, lse = ctx.saved_tensors
    return (*_backward(gradient, q, k, v, out, lse, view, layer, ctx.scaling), None, None, None)


attend_opaquely.register_autograd(_gradient, setup_context=_setup)
