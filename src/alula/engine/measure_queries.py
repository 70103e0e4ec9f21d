"""Measures the statistics of a model's queries that TriAttention needs, in a dense pass over a text."""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.engine.attention import PrefillContext
from alula.engine.model_runner import ModelRunner
from alula.engine.prefill import boundaries, packed
from alula.engine.rollout import Rollout, Sampling
from alula.errors import require
from alula.models.geometry import Geometry
from alula.sparsity.evict.query_statistics import QueryStatistics

if TYPE_CHECKING:
    from alula.engine.engine_core import EngineCore

TEXT_PROMPTS = 16
"""Prompts whose dense answers are measured, where there are prompts."""
OWN_TEXT = (16, 128)
"""Rollouts and tokens of the text that is measured if none is given."""
PASS_TOKENS = 16384
"""Tokens of a pass: no setting of the engine, so that statistics follow from weights and text alone."""
FIXED = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose frequencies do not depend on the length."""


@dataclass
class MeasuringContext(PrefillContext):
    """A dense pass that sums up the queries, each turned back by the rotation of its position."""

    turn: Tensor | None = None
    """complex128 [T, F] the inverse rotation of every token"""
    sums: Tensor | None = None
    """complex128 [L, Hq, F] of q_f"""
    sizes: Tensor | None = None
    """fp64 [L, Hq, F] of |q_f|"""

    def keep_queries(self, layer: int, query: Tensor) -> None:
        first, second = query.double().chunk(2, -1)
        unrotated = torch.complex(first, second) * self.turn[:, None]  # type: ignore[index]
        self.sums[layer] += unrotated.sum(0)  # type: ignore[index]
        self.sizes[layer] += unrotated.abs().sum(0)  # type: ignore[index]


@torch.inference_mode()
def measure_queries(runner: ModelRunner, text: Many[Many[int]]) -> QueryStatistics:
    """Statistics over all tokens of `text`. A sparse adapter is in force."""
    require(len(text) > 0 and all(map(len, text)), "text: give at least one sequence, none of them empty.")
    frequencies, scaling = rope(runner.model)
    geometry, device = runner.cache.geometry, runner.device
    layout = (geometry.layers, geometry.query_heads, len(frequencies))
    sums = torch.zeros(layout, dtype=torch.complex128, device=device)
    sizes = torch.zeros(layout, dtype=torch.float64, device=device)
    for batch in batches(text):
        ids, positions = packed(batch, device)
        phase = positions[:, None].double() * -frequencies.to(device)
        turn = torch.polar(torch.full_like(phase, 1 / scaling), phase)
        ends = boundaries([len(sequence) for sequence in batch], device)
        runner.forward(ids, positions, MeasuringContext(runner.cache, *ends, turn=turn, sums=sums, sizes=sizes), True)
    count = sum(map(len, text))
    kept = tuple(tuple(map(int, sequence)) for sequence in text)
    mean, size = (sums / count).to(torch.complex64), (sizes / count).float()
    return QueryStatistics(frequencies.to(device), scaling, mean, size, kept)


def rope(model: PreTrainedModel) -> tuple[Tensor, float]:
    """Frequencies fp64 [F] and scaling of the model's rotary embedding."""
    embedding = getattr(model.base_model, "rotary_emb", None)
    kind = getattr(embedding, "rope_type", None)
    require(
        kind in FIXED,
        f"evict.method=triattention: the model's position embedding is {kind}; it needs a RoPE with fixed frequencies "
        f"({', '.join(FIXED)}).",
    )
    frequencies, dim = embedding.inv_freq, Geometry.of(model).head_dim  # type: ignore[union-attr]
    require(
        2 * len(frequencies) == dim,
        f"evict.method=triattention: the model rotates {2 * len(frequencies)} of {dim} dimensions; it needs all.",
    )
    return frequencies.double().cpu(), float(embedding.attention_scaling)  # type: ignore[union-attr]


def own_text(engine: "EngineCore") -> list[list[int]]:
    """Text that the dense policy writes after its first token: the same for the same weights."""
    start, eos = getattr(engine.model.config, "bos_token_id", None), engine.inputs.eos_ids
    prompt = [start if start is not None else eos[0] if eos else 0]
    rollouts, tokens = OWN_TEXT
    fitting = min(engine.runner.max_length, (engine.pool.usable - 1) * engine.page) - 1
    sampling = Sampling(n=rollouts, max_new_tokens=min(tokens, fitting), ignore_eos=True)

    def generate(prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        return sorted(engine.stream(engine.requests(prompts, sampling)), key=lambda rollout: rollout.sample_index)

    return dense_text(generate, [prompt], sampling)


def dense_text(
    generate: Callable[[list[list[int]], Sampling], Many[Rollout]], prompts: Many[Many[int]], sampling: Sampling
) -> list[list[int]]:
    """The first prompts with the answers of the dense policy, which `generate` returns."""
    answers = generate([list(prompt) for prompt in prompts[:TEXT_PROMPTS]], sampling)
    return [answer.prompt_ids + answer.token_ids for answer in answers]


def batches(text: Many[Many[int]]) -> list[list[list[int]]]:
    """Consecutive sequences of at most `PASS_TOKENS` tokens together, or a single longer one."""
    groups: list[list[list[int]]] = []
    for sequence in map(list, text):
        if groups and sum(map(len, groups[-1])) + len(sequence) <= PASS_TOKENS:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return groups
