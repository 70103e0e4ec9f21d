"""A float32 residual stream for 16-bit decoders.

    x₀ = float32(embedding),    x ← x + branch(round(norm(x))),    hidden = round(norm(x))

Matrix products still read and write 16 bits. Only the sum over layers is no longer rounded at each layer; that rounding
causes most of the difference in log-probs between two kernels (docs/benchmarks.md). transformers' layers compute
`residual + branch`, which is float32 once the embedding is. Hooks cast back to 16 bits wherever the stream is read: at
the norms, and at RoPE, whose cosines take the dtype of their input.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alula.errors import first_line, require

_MARK = "alula_wide_residual"


def widen_residual(model: PreTrainedModel) -> None:
    """Keep the residual stream of a 16-bit model in float32, in place. Raises if the architecture cannot.

    A float32 model is left as it is. One without weights (on the meta device) is not tried out.
    """
    if model.dtype != torch.float32:
        _hook(model)
        if model.device.type != "meta":
            _check_dry_run(model)


def widen_like(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Widen `twin`, of the same class and dtype, if `model` is widened."""
    if residual_of(model) is not None:
        _hook(twin)


def residual_of(model: PreTrainedModel) -> str | None:
    """`float32` if the stream is wider than the weights, else None."""
    return "float32" if getattr(model, _MARK, False) else None


def _hook(model: PreTrainedModel) -> None:
    narrow = _cast(model.dtype)
    decoder = model.get_decoder()
    model.get_input_embeddings().register_forward_hook(_cast(torch.float32))
    for name, module in decoder.named_modules():
        # Norms inside attention read 16 bits; the hook does not change them.
        if "norm" in type(module).__name__.lower() or name.endswith("rotary_emb"):
            module.register_forward_hook(narrow)
    setattr(model, _MARK, True)


def _cast(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    """One function for all modules, so that copies of a model keep it and all layers compile to the same code."""

    def hook(module: nn.Module, inputs: Any, out: Any) -> Any:
        return tuple(each.to(dtype) for each in out) if isinstance(out, tuple) else out.to(dtype)

    return hook


@torch.no_grad()
def _check_dry_run(model: PreTrainedModel) -> None:
    """Run a few tokens: every layer must return float32, and every product must read 16 bits."""

    def need(holds: bool, reason: str) -> None:
        require(
            holds,
            f"residual=float32: {type(model).__name__} {reason}; leave residual out, or use dtype=float32.",
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
        output = decoder(input_ids=positions % model.config.vocab_size, position_ids=positions, use_cache=False)
        need(output.last_hidden_state.dtype == model.dtype, "does not end in a norm")
    except RuntimeError as error:  # an operator that needs all operands in one dtype
        need(False, f"cannot read it ({first_line(error)})")
    finally:
        for probe in probes:
            probe.remove()
