"""Configurations of published models, and of tiny models of the same families for tests and demos.

`shape:<name>` is a model of this configuration with random weights, enough for a benchmark without a download. The
values are those of the published `config.json` files. No heavy imports: the command line lists these names.
"""

from typing import Any

from alula.errors import unknown

Settings = dict[str, Any]


def _sizes(
    layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int, intermediate: int, vocab: int
) -> Settings:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
    }


def _rope(theta: float, **scaling: Any) -> Settings:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


_LLAMA3_ROPE = _rope(
    500_000.0,
    rope_type="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def _qwen2(max_positions: int, tied: bool, **sizes: int) -> Settings:
    return {
        "model_type": "qwen2",
        **_sizes(**sizes),
        **_rope(1_000_000.0),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    }


def _qwen3(tied: bool, **sizes: int) -> Settings:
    return {
        "model_type": "qwen3",
        **_sizes(**sizes, head_dim=128, vocab=151936),
        **_rope(1_000_000.0),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


def _experts(count: int, chosen: int, intermediate: int) -> Settings:
    """A mixture of experts in every layer."""
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": intermediate,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _tiny(model_type: str, heads: int, kv_heads: int, tied: bool) -> Settings:
    """Weights of std 1/sqrt(hidden) give attention scores of order 1; at 0.02 attention would be almost uniform."""
    return {
        "model_type": model_type,
        **_sizes(3, heads, kv_heads, head_dim=16, hidden=64, intermediate=64, vocab=128),
        **_rope(10_000.0),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "initializer_range": 0.125,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }


SHAPES: dict[str, Settings] = {
    "smollm2-135m": {
        "model_type": "llama",
        **_sizes(30, 9, 3, 64, 576, 1536, 49152),
        **_rope(100_000.0),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        **_sizes(16, 32, 8, 64, 2048, 8192, 128256),
        **_LLAMA3_ROPE,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen2.5-1.5b": _qwen2(
        131072,
        True,
        layers=28,
        heads=12,
        kv_heads=2,
        head_dim=128,
        hidden=1536,
        intermediate=8960,
        vocab=151936,
    ),
    "qwen2.5-3b": _qwen2(
        32768,
        True,
        layers=36,
        heads=16,
        kv_heads=2,
        head_dim=128,
        hidden=2048,
        intermediate=11008,
        vocab=151936,
    ),
    "qwen2.5-7b": _qwen2(
        131072,
        False,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        hidden=3584,
        intermediate=18944,
        vocab=152064,
    ),
    "qwen3-0.6b": _qwen3(True, layers=28, heads=16, kv_heads=8, hidden=1024, intermediate=3072),
    "qwen3-1.7b": _qwen3(True, layers=28, heads=16, kv_heads=8, hidden=2048, intermediate=6144),
    "qwen3-4b": _qwen3(True, layers=36, heads=32, kv_heads=8, hidden=2560, intermediate=9728),
    "qwen3-8b": _qwen3(False, layers=36, heads=32, kv_heads=8, hidden=4096, intermediate=12288),
    "qwen3-14b": _qwen3(False, layers=40, heads=40, kv_heads=8, hidden=5120, intermediate=17408),
    "qwen3-30b-a3b": {
        **_qwen3(False, layers=48, heads=32, kv_heads=4, hidden=2048, intermediate=6144),
        **_experts(128, 8, 768),
        "model_type": "qwen3_moe",
    },
    "tiny-llama": _tiny("llama", heads=4, kv_heads=4, tied=True),
    "tiny-qwen2": _tiny("qwen2", heads=6, kv_heads=2, tied=False),
    "tiny-qwen3": _tiny("qwen3", heads=4, kv_heads=2, tied=True),
    "tiny-qwen3-moe": {**_tiny("qwen3_moe", heads=4, kv_heads=2, tied=True), **_experts(8, 2, 32)},
    "tiny-mistral": {**_tiny("mistral", heads=8, kv_heads=2, tied=False), "sliding_window": None},
}


def shape(name: str) -> Settings:
    """The config values of a shape, including `model_type`."""
    if name not in SHAPES:
        raise unknown("shape", name, SHAPES)
    return SHAPES[name]
