"""Low-rank adapters through peft: attaching them, switching them off, and the weights with them merged in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alula.distributed import full_tensor
from alula.errors import SettingError
from alula.learner.learner_config import LoRA

ADAPTER = "default"


def attach(model: PreTrainedModel, lora: LoRA) -> None:
    """Freeze the model and put adapters into its linear layers, in place. They start as no change at all.

    They keep the model's dtype, since the optimizer holds float32 masters of them.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise SettingError("lora needs the package peft: pip install 'alula[peft]'.") from error
    targets = [name for name, module in _linears(model)]
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(lora.seed)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.to(model.dtype)


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The policy before training."""
    layers = list(_adapted(model))
    for _, layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for _, layer in layers:
            layer.enable_adapters(True)


def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and full values as of the model without adapters: W + (alpha / rank) B A where there is one."""
    layers = dict(_adapted(model))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".")
        owner, adapted = owner.removesuffix(".base_layer"), owner.endswith(".base_layer")
        value = full_tensor(parameter.detach())
        if adapted and leaf == "weight":
            layer = layers[owner]
            a, b = (full_tensor(m[ADAPTER].weight.detach()).float() for m in (layer.lora_A, layer.lora_B))
            value = (value.float() + layer.scaling[ADAPTER] * (b @ a)).to(value.dtype)
        yield f"{owner}.{leaf}", value


def _linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module
