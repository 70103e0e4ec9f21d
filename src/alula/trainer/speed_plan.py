"""Speed estimate of `alula train --check`: seconds per step and tokens per second, from a cost model on this GPU.

The cost of a decode step is the roofline of its work on the measured matrix rate and copy bandwidth, and latencies per
layer. All answers are assumed to have full length. Time for rewards, evaluations and checkpoints is not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from alula.bench.ceilings import Ceilings, measure_ceilings
from alula.config.run import RunConfig
from alula.engine.kv_cache import parse_bytes
from alula.mismatch.plan.cost import AnalyticCost, Hardware, generation_cost, largest_batch
from alula.models.geometry import Geometry
from alula.sparsity.policy import DENSE, Evict, Sparsity
from alula.trainer.memory_plan import USABLE, MemoryPlan

LAYER_MS = 0.033
"""Latency of one layer's kernels in a captured decode step, whatever their size."""
EVICTION_LAYER_MS = 0.5
"""The same for an eviction of all rows under rkv 512+128: from 0.3 (SmolLM2-135M, 512 rows) to 0.7 (qwen3-1.7b)."""
PREFILL_SHARE = 0.66
"""Share of the matrix rate that a packed prefill reaches; 64 prompts of 1,024 tokens reach 0.71."""
UPDATE_SHARE, SCORE_SHARE, LEARNER_EXTRA = 0.58, 0.68, 150e6
"""Updates and scoring reach these shares of the matrix rate; a token costs as much as with that many parameters more,
which is what small layers lose. Fitted, like the latency, to measured steps (benchmarks/steps.py compares)."""
PAYS = 1.05
"""Sparse rollouts pay if they are this much faster than dense ones."""
LENGTHS = [round(256 * 2 ** (power / 4)) for power in range(33)]
"""Answer lengths to try: 256 to 65,536 tokens."""
EXAMPLE = Sparsity(evict=Evict("rkv", budget=512, buffer=128))
"""The policy that a dense run is compared with."""


@dataclass(frozen=True)
class Generation:
    """The rollouts of one step on one rank."""

    seconds: float
    rows: int
    """Rollouts that run together."""
    tokens_per_second: float


@dataclass(frozen=True)
class SpeedPlan:
    sparsity: Sparsity
    """The run's policy; for a dense run the example."""
    rollouts: Generation
    """Under the run's policy."""
    dense: Generation
    sparse: Generation
    """Under `sparsity`."""
    score: float
    update: float
    pays_from: int | None
    """Answer length from which on sparse rollouts are faster than dense ones; None if they never are."""

    @property
    def step(self) -> float:
        return self.rollouts.seconds + self.score + self.update


class RolloutCost:
    """Cost of a rank's rollouts at any length, with as many rows as the KV memory holds."""

    def __init__(self, geometry: Geometry, ceilings: Ceilings, kv_bytes: float, prompts: int, rollouts: int, rows: int):
        hardware = Hardware(ceilings.matrix / 1e12, ceilings.bandwidth / 1e12)
        self.cost = AnalyticCost(geometry, hardware, layer_ms=LAYER_MS, eviction_layer_ms=EVICTION_LAYER_MS)
        self.prefill = 2 * geometry.parameters * prompts / (PREFILL_SHARE * ceilings.matrix)
        """Seconds per token of the prompts, which the rollouts of a group share."""
        self.kv_bytes, self.count, self.rows = kv_bytes, rollouts, rows

    def of(self, sparsity: Sparsity, prompt: int, answer: int) -> Generation:
        fits = largest_batch(self.cost, sparsity, kv_bytes=self.kv_bytes, prompt=prompt, new_tokens=answer)
        rows = min(self.rows, fits)
        one_batch = generation_cost(self.cost, sparsity, batch=rows, prompt=prompt, new_tokens=answer)
        seconds = one_batch.ms / 1e3 * max(1.0, self.count / rows) + self.prefill * prompt
        return Generation(seconds, rows, self.count * answer / seconds)


def plan_speed(config: RunConfig, plan: MemoryPlan, ceilings: Ceilings, kv_bytes: float, ranks: int = 1) -> SpeedPlan:
    """The estimate for a device with these ceilings and this much memory for KV."""
    geometry, answer = plan.geometry, config.sampling.max_new_tokens
    per_rank = -(-plan.rollouts // ranks)
    prompts = -(-config.sampling.prompts // ranks)
    cost = RolloutCost(geometry, ceilings, kv_bytes, prompts, per_rank, plan.running)
    sparsity = EXAMPLE if config.sparsity.dense else config.sparsity
    dense, sparse = (cost.of(policy, plan.prompt, answer) for policy in (DENSE, sparsity))
    score, update = learner_seconds(config, geometry, ceilings, [plan.prompt + answer] * per_rank)
    return SpeedPlan(
        sparsity=sparsity,
        rollouts=dense if config.sparsity.dense else sparse,
        dense=dense,
        sparse=sparse,
        score=score,
        update=update,
        pays_from=pays_from(cost, sparsity, plan.prompt),
    )


def learner_seconds(
    config: RunConfig, geometry: Geometry, ceilings: Ceilings, lengths: Sequence[int]
) -> tuple[float, float]:
    """Scoring and updates of one rank, whose sequences have these lengths, prompts included."""
    attention = geometry.layers * geometry.attention_width * sum(n * n for n in lengths)  # causal: half of all pairs
    forward = 2 * ((geometry.parameters + LEARNER_EXTRA) * sum(lengths) + attention) / ceilings.matrix
    return scoring_passes(config) * forward / SCORE_SHARE, 3 * forward / UPDATE_SHARE


def scoring_passes(config: RunConfig) -> float:
    """Forward passes over every rollout before the updates: the policy's, and the reference's."""
    scored = 1 - 1 / config.learner.updates if config.objective.skips_scoring("cuda") else 1
    return scored + (config.objective.kl > 0)


def pays_from(cost: RolloutCost, sparsity: Sparsity, prompt: int) -> int | None:
    """The shortest of `LENGTHS` from which on the policy is faster than dense; longer ones may not fit the memory."""
    first = None
    for answer in LENGTHS:
        try:
            ratio = (
                cost.of(sparsity, prompt, answer).tokens_per_second / cost.of(DENSE, prompt, answer).tokens_per_second
            )
        except ValueError:  # not even one dense sequence fits
            break
        first = None if ratio < PAYS else first or answer
    return first


def kv_memory(config: RunConfig, plan: MemoryPlan, free: int) -> float:
    """Bytes for KV on a device with this much free memory; not positive if the rest of the run does not fit."""
    if config.engine.kv_memory:
        return parse_bytes(config.engine.kv_memory)
    return plan.kv_room(USABLE * free)


def measure(config: RunConfig) -> Ceilings:
    """What this machine's GPU reaches."""
    ceilings = measure_ceilings(torch.device(config.model.device or "cuda"))
    torch.cuda.empty_cache()
    return ceilings
