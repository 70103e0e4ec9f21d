"""Which models the engine serves exactly. Every other one is refused by name: never run, and run wrongly.

The engine replaces a decoder's attention by its own and computes the logits itself, as `hidden @ head`. So a
model qualifies when every layer is full causal attention through transformers' `AttentionInterface`, RoPE of a
position depends on nothing but that position, and the head is a plain matrix product. Settings that say
otherwise are found in the config, before any weight is read; a dry run of the loaded model finds the rest.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel

from alula.errors import SettingError

STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
PLAIN_ATTENTION_SETTINGS = {"scaling", "dropout", "is_causal", "position_ids", "use_cache"}
_PROBE = "alula_dry_run"


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise `SettingError` with the first reason for which this architecture cannot be served exactly."""
    for reason in _reasons(config):
        raise _refusal(config, reason)


def refuse_after_dry_run(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Run a few tokens through `twin` (the model's weights, its own config) and check what the engine assumes.

    Every layer calls the attention function exactly once, causally, with keys and values of one shape and with
    no setting that the engine does not know; and the model's logits are its hidden states times its head.
    """
    calls: list[int] = []
    problems: list[str] = []

    def probe(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        calls.append(module.layer_idx)  # type: ignore[arg-type]
        strange = sorted(
            k for k, v in settings.items() if v is not None and k not in PLAIN_ATTENTION_SETTINGS
        )
        if strange:
            problems.append(f"layer {module.layer_idx} asks for attention with {', '.join(strange)}")
        if not getattr(module, "is_causal", True):
            problems.append(f"layer {module.layer_idx} attends to later tokens")
        if key.shape != value.shape:
            problems.append(f"layer {module.layer_idx} has keys and values of different sizes")
            return query.transpose(1, 2), None
        heads = query.shape[1] // key.shape[1]
        return value.repeat_interleave(heads, dim=1).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_PROBE, probe)
    twin.config._attn_implementation = _PROBE
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    positions = torch.arange(4, device=model.device)[None]
    with torch.no_grad():
        hidden = twin.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        called = list(calls)
        logits = twin(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        head = twin.get_output_embeddings()
        expected = head(hidden).float()
    if called != list(range(model.config.num_hidden_layers)):
        problems.insert(0, "not every layer attends, once, through transformers' AttentionInterface")
    if (logits - expected).abs().max() > 0.02 * expected.abs().max():
        problems.append("its logits are not its hidden states times its output head")
    if problems:
        raise _refusal(model.config, problems[0])


def _refusal(config: PreTrainedConfig, reason: str) -> SettingError:
    name = (getattr(config, "architectures", None) or [type(config).__name__.removesuffix("Config")])[0]
    return SettingError(
        f"model {name}: {reason}, which the engine cannot serve exactly; "
        "use a plain decoder with full attention, like Llama, Qwen2, Qwen3 or Mistral without a window."
    )


def _reasons(config: PreTrainedConfig) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    if config.get_text_config() is not config:
        yield "it has parts beside a text decoder"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield "it is not a causal language model"
    elif not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_attention_backend:
        yield "its attention does not go through transformers' AttentionInterface"
    if getattr(config, "quantization_config", None) is not None:
        yield "its weights are quantised (load the original weights or a GGUF file)"

    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if layer_types:
        yield f"it has {', '.join(sorted(layer_types))} layers"
    for name in ("layers_block_type", "block_types", "attn_type_list", "hybrid_layer_ids"):
        if getattr(config, name, None):
            yield f"it has hybrid layers ({name})"
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        yield f"it has sliding-window layers (sliding_window={config.sliding_window})"
    for rope_type in sorted(_rope_types(getattr(config, "rope_parameters", None)) - STATIC_ROPE):
        yield f"its {rope_type} RoPE turns a token by more than its position"

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
    own = {rope["rope_type"]} if "rope_type" in rope else set()
    return own.union(*(_rope_types(value) for value in rope.values()))
