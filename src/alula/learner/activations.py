"""Memory of the activations that a training forward keeps for its backward pass, counted on a model without weights."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, PreTrainedModel

NAME = "alula-counted"
TOKENS = 64
"""Counted at once; the count is proportional to them."""


class Attention(torch.autograd.Function):
    """Keeps what a flash-attention kernel keeps: its inputs, its output and the log-sum-exp of every query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, torch.empty(query.shape[:-1], device=query.device))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("only counted, never trained")


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """AttentionInterface: input [1, heads, tokens, dim], output [1, tokens, heads, dim]."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return Attention.apply(q, k, v), None  # type: ignore[no-untyped-call]


AttentionInterface.register(NAME, attend)


def activation_bytes(model: PreTrainedModel) -> int:
    """Bytes per token, for all layers, without activation checkpointing and without compilation, which keeps less.

    `model` is on the meta device and in the dtype of the training; its attention is replaced.
    """
    model.set_attn_implementation(NAME)
    own = {each.untyped_storage()._cdata for each in chain(model.parameters(), model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    positions = torch.arange(TOKENS, device="meta")[None]
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        graph = model.get_decoder()(input_ids=positions, position_ids=positions, use_cache=False)
    del graph  # until here it keeps all storages alive, so that no two have the same address
    return sum(storage.nbytes() for storage in kept.values()) // TOKENS
