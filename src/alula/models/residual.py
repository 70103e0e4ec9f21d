"""A 16-bit decoder whose residual stream is float32.

    x₀ = float32(embedding),    x ← x + branch(round(norm(x))),    hidden = round(norm(x))

Products read and write 16 bits as before; only the sum over layers is no longer rounded at each of them, which is the
largest part of what two kernels' orders of addition make of a token's log-prob (docs/benchmarks.md). transformers'
layers add `residual + branch`, which gives float32 by itself once the embedding does. What reads the stream gives the
products their 16 bits back by a hook of its own: the norms, and RoPE, whose cosines take the dtype of what it is shown.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alula.errors import require

_MARK = "alula_wide_residual"


def widen_residual(model: PreTrainedModel) -> None:
    """Keep the stream of a 16-bit model in float32, in place; an architecture that would not do so is refused.

    A float32 model has a float32 stream already: nothing happens.
    """
    if model.dtype != torch.float32:
        _hook(model)
        _refuse_after_dry_run(model)


def widen_like(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Widen `twin`, of the same class and dtype, where `model` is wide."""
    if residual_of(model) is not None:
        _hook(twin)


def residual_of(model: PreTrainedModel) -> str | None:
    """`float32` where the stream is wider than the weights, None where it is theirs."""
    return "float32" if getattr(model, _MARK, False) else None


def _hook(model: PreTrainedModel) -> None:
    narrow = _cast(model.dtype)
    decoder = model.get_decoder()
    model.get_input_embeddings().register_forward_hook(_cast(torch.float32))
    for name, module in decoder.named_modules():
        # Norms inside attention read 16 bits and are left as they are by it.
        if "norm" in type(module).__name__.lower() or name.endswith("rotary_emb"):
            module.register_forward_hook(narrow)
    setattr(model, _MARK, True)


def _cast(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    """One function for all modules: a copy of a model keeps it, and all layers compile to the same code."""

    def hook(module: nn.Module, inputs: Any, out: Any) -> Any:
        return tuple(each.to(dtype) for each in out) if isinstance(out, tuple) else out.to(dtype)

    return hook


@torch.no_grad()
def _refuse_after_dry_run(model: PreTrainedModel) -> None:
    """Run a few tokens: every layer must give float32, and every product read 16 bits."""

    def need(holds: bool, reason: str) -> None:
        require(
            holds,
            f"residual=float32: {type(model).__name__} {reason}; leave it out, or use dtype=float32.",
        )

    def layer_gives(module: nn.Module, inputs: Any, out: Any) -> None:
        need((out if isinstance(out, Tensor) else out[0]).dtype == torch.float32, "rounds it between its layers")

    def product_reads(module: nn.Module, inputs: Any) -> None:
        need(inputs[0].dtype == model.dtype, "has products that read it without a norm before them")

    decoder: Any = model.get_decoder()
    probes = [layer.register_forward_hook(layer_gives) for layer in decoder.layers]
    linears = [module for module in decoder.modules() if isinstance(module, nn.Linear)]
    probes += [module.register_forward_pre_hook(product_reads) for module in linears]
    positions = torch.arange(4, device=model.device)[None]
    try:
        found = decoder(input_ids=positions % model.config.vocab_size, position_ids=positions, use_cache=False)
        need(found.last_hidden_state.dtype == model.dtype, "does not end in a norm")
    except RuntimeError as error:  # an operator that takes all its operands in one dtype
        need(False, f"cannot read it ({str(error).splitlines()[0]})")
    finally:
        for probe in probes:
            probe.remove()
