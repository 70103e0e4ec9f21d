"""The sparse policy's attention as one custom operator, opaque to `torch.compile`, with its gradient.

One compiled layer serves all layers and all micro-batches, so what differs between them is passed as tensors: the
layer's number, and a handle of the `Visibility`, which is looked up here in the forward and in the backward pass.
"""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from alula.distill.attention import kernel
from alula.distill.attention.tiles import layer_visibility
from alula.distill.attention.visibility import Visibility

_visibilities: WeakValueDictionary[int, Visibility] = WeakValueDictionary()
_numbers = count()


def register(visibility: Visibility) -> Tensor:
    """A handle that is valid as long as the visibility is referenced elsewhere."""
    number = next(_numbers)
    _visibilities[number] = visibility
    return torch.tensor(number)


@torch.library.custom_op("alula::sparse_attention", mutates_args=())
def sparse_attention_op(
    q: Tensor, k: Tensor, v: Tensor, visibility: Tensor, layer: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D], contiguous -> [T, Hq, D], and log normalisers [Hq, T] for the gradient"""
    return kernel.attention_forward(
        q, k, v, *layer_visibility(_visibilities[int(visibility)], int(layer), q, k), scaling
    )


@sparse_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, visibility: Tensor, layer: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("alula::sparse_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visibility: Tensor,
    layer: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    visible = layer_visibility(_visibilities[int(visibility)], int(layer), q, k)
    return kernel.attention_backward(gradient.contiguous(), q, k, v, out, lse, *visible, scaling)


@_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visibility: Tensor,
    layer: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, visibility, layer, out, lse = ctx.saved_tensors
    return (*_backward(gradient, q, k, v, out, lse, visibility, layer, ctx.scaling), None, None, None)


sparse_attention_op.register_autograd(_gradient, setup_context=_setup)
