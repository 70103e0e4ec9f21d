"""The slow, independent truth: a full forward pass of the plain Hugging Face model, with attention masks that replay
what a rollout's policy recorded. Nothing of the engine's arithmetic is used here.
"""

import bisect
import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from alula.engine.rollout import Rollout
from alula.models.load import LoadedModel
from alula.sparsity.evict.query_statistics import QueryStatistics


@dataclass
class Pass:
    """One forward pass: `visible` bool [layer, kv_head, query, key] goes in, the rest comes out."""

    visible: Tensor
    kv_dtype: str | None = None
    """how keys and values are rounded, vector by vector"""
    logits: Tensor | None = None
    queries: list[Tensor] = field(default_factory=list)
    """per layer [Hq, T, D], rotated"""
    keys: list[Tensor] = field(default_factory=list)
    """per layer [Hkv, T, D], rotated; as attention reads them"""
    values: list[Tensor] = field(default_factory=list)
    """per layer [Hkv, T, D]"""
    statistics: QueryStatistics | None = None
    """the engine's, for the evictor that needs them"""


_pass: list[Pass] = []


def masked_attention(module, query, key, value, mask, scaling, **_):
    """softmax(scaling · q kᵀ, where visible) v: one query head at a time."""
    now = _pass[-1]
    visible = now.visible[module.layer_idx]
    if now.kv_dtype:
        key, value = in_8_bits(key, now.kv_dtype), in_8_bits(value, now.kv_dtype)
    now.queries.append(query[0])
    now.keys.append(key[0])
    now.values.append(value[0])
    group = query.shape[1] // key.shape[1]
    heads = []
    for h in range(query.shape[1]):
        logits = scaling * query[0, h] @ key[0, h // group].T
        weights = logits.masked_fill(~visible[h // group], float("-inf")).softmax(-1)
        heads.append(weights @ value[0, h // group])
    return torch.stack(heads, 1)[None], None


AttentionInterface.register("oracle", masked_attention)

SUBNORMAL = [m * 2.0**-9 for m in range(8)]
NORMAL = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]  # that one is NaN
E4M3 = SUBNORMAL + NORMAL
"""All values of the format that are not negative, in the order of their codes."""


def in_8_bits(x: Tensor, kv_dtype: str) -> Tensor:
    """Each vector of the last dimension, rounded to integers or values of e4m3 times a power of two of its own."""
    vectors = [rounded(vector, kv_dtype) for vector in x.reshape(-1, x.shape[-1]).tolist()]
    return torch.tensor(vectors).view(x.shape).to(x.dtype)


def rounded(vector: list[float], kv_dtype: str) -> list[float]:
    most, closest = {"int8": (127, round), "fp8": (448, nearest_e4m3)}[kv_dtype]
    scale, largest = 2.0**-126, max(map(abs, vector))
    while largest > most * scale:
        scale *= 2
    return [math.copysign(scale * closest(abs(value) / scale), value) for value in vector]


def nearest_e4m3(value: float) -> float:
    """The nearest value of e4m3; of two equally near ones that with an even code."""
    above = bisect.bisect_left(E4M3, value)
    codes = [code for code in (above - 1, above) if 0 <= code < len(E4M3)]
    return E4M3[min(codes, key=lambda code: (abs(E4M3[code] - value), code % 2))]


@torch.no_grad()
def forward(model: PreTrainedModel, ids: list[int], visible: Tensor, *, kv_dtype: str | None = None) -> Pass:
    now = Pass(visible, kv_dtype)
    _pass.append(now)
    with attention(model, "oracle"):
        now.logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    _pass.pop()
    assert len(now.keys) == model.config.num_hidden_layers, "every layer went through the oracle"
    return now


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    before, model.config._attn_implementation = model.config._attn_implementation, name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def visible_keys(rollout: Rollout, layers: int, kv_heads: int, page: int) -> Tensor:
    """bool [layer, kv_head, T, T]: the keys that each query of the rollout saw, from its records."""
    prompt, length = len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout)
    visible = torch.ones(length, length, dtype=torch.bool).tril().repeat(layers, kv_heads, 1, 1)
    if rollout.history is not None:
        query = torch.arange(length)
        visible &= query[:, None] < rollout.history[:, :, None, :]
    for step, chosen in enumerate(rollout.selected or ()):
        for layer, blocks in enumerate(chosen):
            if blocks is not None:
                for head, read in enumerate(blocks.tolist()):
                    row = visible[layer, head, prompt + step]
                    held = row.nonzero()[:, 0].tolist()  # slots ascend in position
                    row[:] = False
                    row[[j for b in read for j in held[b * page : (b + 1) * page]]] = True
    return visible


def replay(model: PreTrainedModel, rollout: Rollout, page: int = 1, *, kv_dtype: str | None = None) -> Pass:
    config = model.config
    visible = visible_keys(rollout, config.num_hidden_layers, config.num_key_value_heads, page)
    return forward(model, rollout.prompt_ids + rollout.token_ids, visible, kv_dtype=kv_dtype)


def logprobs(seen: Pass, rollout: Rollout, temperature: float | None = None) -> Tensor:
    """Log-probs of the rollout's tokens: the token at position p is predicted at p − 1."""
    assert seen.logits is not None
    first = len(rollout.prompt_ids) - 1
    logits = seen.logits[first : first + len(rollout)] / (temperature or rollout.sampling.temperature or 1.0)
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """transformers' own generation."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def custom_model(
    group: int, *, kv_heads: int = 2, layers: int = 3, model_type: str = "llama", vocabulary: int = 96
) -> LoadedModel:
    """A tiny model with any group size, and a head dimension that is no power of two."""
    heads = group * kv_heads
    width = -(-48 // heads) * heads
    config = AutoConfig.for_model(
        model_type,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=12,
        hidden_size=width,
        intermediate_size=64,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        attention_bias=True,
    )
    torch.manual_seed(group)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return LoadedModel(model, None, f"group-{group}", (1,))
