"""Which architectures the engine supports. Unsupported architectures raise at load time.

The engine replaces a decoder's attention and computes the logits itself, as `hidden @ head`. A model is supported if
every layer is full causal attention through transformers' `AttentionInterface`, the RoPE of a token depends only on its
position, and the head is a plain matrix product. The config shows most violations before any weight is read; a dry run
of the loaded model shows the rest.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel

from alula.errors import SettingError

STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
IGNORED_ARGUMENTS = {"scaling", "dropout", "is_causal", "position_ids", "use_cache", "output_router_logits"}
"""Arguments of the attention function that the engine implements, or that do not concern attention."""
_PROBE = "alula_dry_run"


def check_config(config: PreTrainedConfig) -> None:
    """Raise `SettingError` with the first reason why this architecture is not supported."""
    for reason in violations(config):
        raise _unsupported(config, reason)


def check_dry_run(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Run a few tokens through `twin` (the model's weights, its own config) and check the engine's assumptions.

    Every layer calls the attention function exactly once, causally, with keys and values of the same shape and without
    unknown arguments; the model's logits are its hidden states times its head.
    """
    layers: list[int] = []
    config = model.config  # not the model: the function registered below persists and would keep its weights alive

    def probe(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, None]:
        layers.append(module.layer_idx)
        unknown = sorted(k for k, v in settings.items() if v is not None and k not in IGNORED_ARGUMENTS)
        if unknown or attention_mask is not None:
            cause = ", ".join(unknown) or "a mask"
            raise _unsupported(config, f"layer {module.layer_idx} needs attention with {cause}")
        if not (getattr(module, "is_causal", True) and settings.get("is_causal", True)):
            raise _unsupported(config, f"layer {module.layer_idx} attends to later tokens")
        if key.shape != value.shape:
            raise _unsupported(config, f"layer {module.layer_idx} has keys and values of different sizes")
        groups = query.shape[1] // key.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_PROBE, probe)
    twin.config._attn_implementation = _PROBE
    positions = torch.arange(4, device=model.device)[None]
    inputs = {"input_ids": positions % model.config.vocab_size, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        hidden = twin.base_model(**inputs).last_hidden_state
        if layers != list(range(model.config.num_hidden_layers)):
            raise _unsupported(model.config, f"its attention function is called by layers {layers} only")
        expected = twin.get_output_embeddings()(hidden).float()
        logits = twin(**inputs).logits.float()
    if (logits - expected).abs().max() > 0.02 * expected.abs().max():
        raise _unsupported(model.config, "its logits are not its hidden states times its output head")


def _unsupported(config: PreTrainedConfig, reason: str) -> SettingError:
    name = (getattr(config, "architectures", None) or [type(config).__name__.removesuffix("Config")])[0]
    return SettingError(
        f"model {name}: {reason}, which the engine does not support; "
        "use a plain decoder with full attention, like Llama, Qwen2, Qwen3 or Mistral without a window."
    )


def violations(config: PreTrainedConfig) -> Iterator[str]:
    """The reasons why the engine does not support an architecture."""
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    if config.get_text_config() is not config:
        yield "it is more than a text decoder"
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if architecture is None:
        yield "it is not a causal language model"
    elif not architecture._supports_attention_backend:
        yield "its attention does not go through transformers' AttentionInterface"
    if getattr(config, "quantization_config", None) is not None:
        yield "its weights are quantized (load the original weights or a GGUF file)"

    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if layer_types:
        yield f"it has {', '.join(sorted(layer_types))} layers"
    for name in ("layers_block_type", "block_types", "attn_type_list", "hybrid_layer_ids"):
        if getattr(config, name, None):
            yield f"it has hybrid layers ({name})"
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        yield f"it has sliding-window layers (sliding_window={config.sliding_window})"
    for rope_type in sorted(_rope_types(getattr(config, "rope_parameters", None)) - STATIC_ROPE):
        yield f"its {rope_type} RoPE depends on more than the position"

    for name, neutral in (("logits_scaling", 1.0), ("logit_scale", 1.0), ("lm_head_multiplier", 1.0)):
        if getattr(config, name, None) not in (None, neutral):
            yield f"it scales its logits ({name}={getattr(config, name)})"
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, name, None):
            yield f"it caps its logits ({name}={getattr(config, name)})"


def _rope_types(rope: Any) -> set[str]:
    """The RoPE types in `rope_parameters`: one set of parameters, or one per layer type."""
    if not isinstance(rope, dict):
        return set()
    types = {rope["rope_type"]} if "rope_type" in rope else set()
    return types.union(*(_rope_types(value) for value in rope.values()))
