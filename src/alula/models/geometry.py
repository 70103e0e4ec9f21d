"""The sizes of a model that memory and speed depend on, computed in one place."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Geometry:
    parameters: int
    """Parameters that every decode step reads: an untied input embedding is looked up, not read."""
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_bytes: int = 2
    """Bytes of one weight, and of one value in the KV cache unless it is quantised."""
    kv_dtype: str | None = None
    """`int8` or `fp8` for a quantised KV cache: one byte per value, and one per vector for its scale."""

    def __str__(self) -> str:
        kv = self.kv_dtype or f"{8 * self.value_bytes}-bit"
        heads = f"{self.query_heads} query and {self.kv_heads} KV heads of width {self.head_dim}"
        return f"{self.parameters / 1e6:,.1f}M parameters, {self.layers} layers, {heads}, {kv} KV"

    @classmethod
    def of(cls, model: Any, kv_dtype: str | None = None) -> "Geometry":
        """The geometry of a Hugging Face causal LM."""
        config = model.config.get_text_config()
        looked_up = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
        heads = config.num_attention_heads
        return cls(
            parameters=sum(p.numel() for p in model.parameters()) - looked_up,
            layers=config.num_hidden_layers,
            query_heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim(config),
            value_bytes=next(model.parameters()).dtype.itemsize,
            kv_dtype=kv_dtype,
        )

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token, over all layers and heads."""
        vector = self.vector_bytes if self.kv_dtype is None else self.head_dim + 1
        return 2 * self.layers * self.kv_heads * vector

    @property
    def vector_bytes(self) -> int:
        """One head's key, value or page summary in the model's dtype."""
        return self.head_dim * self.value_bytes

    @property
    def kv_share(self) -> float:
        """`kv_token_bytes` as a share of what the model's dtype would take."""
        return self.kv_token_bytes / (2 * self.layers * self.kv_heads * self.vector_bytes)

    @property
    def attention_width(self) -> int:
        """Values of one token's queries in one layer, over all heads."""
        return self.query_heads * self.head_dim


def head_dim(config: Any) -> int:
    """Width of a head, from a model's configuration."""
    config = config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def attention_scaling(model: Any) -> float:
    """The factor that the model's attention multiplies its logits with."""
    scalings = (m.scaling for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling"))
    return next(scalings, Geometry.of(model).head_dim ** -0.5)


def max_positions(config: Any) -> int:
    """The longest text that a model reads; practically unlimited if its configuration names no limit."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", 1 << 20))
