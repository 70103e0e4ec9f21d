"""Memory plan of `alula train --check`: memory and tokens per step, from settings and the shape of the model alone."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from alula.config.run import RunConfig
from alula.distributed import resolve_device
from alula.engine.block_manager import BlockManager, pages_for
from alula.engine.engine import default_lookahead
from alula.engine.kv_cache import check_kv_dtype, longest_in, pages_in, parse_bytes
from alula.engine.schedule_plan import KVNeed
from alula.engine.scheduler import Scheduler
from alula.engine.sequence import Request, Sequence
from alula.errors import SettingError, in_section
from alula.learner.activations import activation_bytes
from alula.mismatch.control.monitor import Monitor
from alula.mismatch.leaderboard.kv_bytes import row_state_bytes, summary_bytes
from alula.models.experts import expert_parameters
from alula.models.geometry import Geometry
from alula.models.load import short_name
from alula.models.lora import Adapter, linears, targeted
from alula.models.residual import widen_residual
from alula.rewards.scoring import check as check_rewards
from alula.rollouts.job import Job
from alula.settings import DistillSettings
from alula.sparsity.footprint import most_held
from alula.sparsity.policy import Sparsity, check_schedules
from alula.trainer.longest_sequences import KVNeedOf, Policies, check_kv_pool, check_positions, longest_sequence
from alula.trainer.preflight import load_first_adapter, load_model_config
from alula.trainer.run_data import Data

PROMPT_GUESS = 256
"""Assumed tokens per prompt, if neither the data nor `data.max_prompt_tokens` gives a number."""
USABLE = 0.9
"""Share of the free memory that a plan may use: the CUDA context, captured graphs and one layer's activations are not
counted."""


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes in bytes per rank, counts per step."""

    ranks: int
    nodes: int
    workers: int
    """Rollout workers with GPUs of their own; 0: every rank generates its share."""
    shards: int
    """Ranks that share one copy of the learner's state."""
    parameters: int
    experts: int
    """Parameters of a mixture's experts."""
    weights: int
    engine_copy: int
    """The engine's copy of the weights; 0 if it reads the learner's."""
    worker_weights: int
    """The weights in a rollout worker, for LoRA with the base that adapters are merged into; 0 without workers."""
    sparse_copy: int
    """Copy of the linear layers for the sparse policy, with its adapter merged in."""
    adapter: int
    """The sparse policy's adapter, with its masters, moments and gradients."""
    trained: int
    """Trained parameters, of all shards."""
    masters: int
    moments: int
    gradients: int
    reference: int
    published: int
    """Weights that every engine receives per step; 0 if it reads the learner's."""
    logits: int
    """One chunk of positions, and their gradient."""
    activations: int
    """Kept for the backward pass of one micro-batch; not counted (0) for a mixture without checkpointing."""
    layer_inputs: int
    """Activations per token that checkpointing keeps."""
    all_activations: int | None
    """Activations per token without checkpointing; None for a mixture, whose routing decides."""
    longest: int
    """Tokens of the longest sequence."""
    prompt: int
    """Tokens assumed per prompt."""
    geometry: Geometry
    kv_dense: int
    """All rollouts that run together, at full length, with dense KV."""
    kv_sparse: int
    """The same under the run's sparsity."""
    row_state: int
    """Recent queries and attention sums that the run's evictor keeps for every row."""
    summary_share: float
    """Size of the selector's page summaries, as a share of the KV pool."""
    rollouts: int
    running: int
    """Rollouts that run together."""
    most_tokens: int
    """Generated per step, if every answer had full length."""
    update_tokens: int
    """Tokens through the model per optimizer step, at most."""

    @property
    def learning(self) -> int:
        """Total while the run learns; the KV pool is released for that time."""
        return (
            self.weights
            + self.engine_copy
            + (0 if self.workers else self.sparse_copy)
            + self.adapter
            + self.masters
            + self.moments
            + self.gradients
            + self.reference
            + self.logits
            + self.activations
        )

    def activations_of(self, checkpointing: bool, token_budget: int) -> int | None:
        """Kept for the backward pass of one micro-batch; None if that is not known. A longer sequence is a micro-batch
        by itself."""
        per_token = self.layer_inputs if checkpointing else self.all_activations
        return None if per_token is None else per_token * max(token_budget, self.longest)

    def generating(self, kv_memory: str | int | None) -> int:
        """Total while the run generates, after the learner has freed what only it needs; with workers, that of one."""
        pool = parse_bytes(kv_memory) if kv_memory else self.kv_sparse
        return self.beside_kv + pool + int(self.summary_share * pool)

    def kv_room(self, memory: float) -> float:
        """The largest KV pool while the run generates; not positive if the rest does not fit."""
        return (memory - self.beside_kv) / (1 + self.summary_share)

    @property
    def beside_kv(self) -> int:
        """What stays in memory beside the KV pool while the run generates."""
        if self.workers:
            return self.worker_weights + self.sparse_copy + self.row_state
        return self.learning - self.gradients - self.logits - self.activations + self.row_state


def plan_memory(
    config: RunConfig, ranks: int = 1, data: Data | None = None, *, nodes: int = 1, workers: int = 0
) -> MemoryPlan:
    """The plan of a run with `ranks` learners on `nodes` nodes, and `workers` rollout workers on other GPUs.

    Also raises whatever the start of the run would reject. `data` is given if tokenized.
    """
    check_settings(config)
    sparsity, model_config = config.sparsity, load_model_config(config.model.source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    adapter = load_first_adapter(config, model)
    parameters = sum(p.numel() for p in model.parameters())
    lora = config.learner.lora
    trained = lora_parameters(model, lora.rank, ["all"]) if lora else parameters
    text = model_config.get_text_config()
    check_positions(config, model_config, data)
    width = 4 if dtype_of(config) == "float32" else 2
    geometry = replace(Geometry.of(model, config.engine.kv_dtype), value_bytes=width)
    kv_token = geometry.kv_token_bytes
    layer_inputs = geometry.layers * text.hidden_size * (4 if config.model.residual else width)

    s = config.sampling
    rollouts = s.prompts * s.n
    running = min(config.engine.max_rows, -(-rollouts // (workers or ranks)))
    prompt = longest_prompt(data) or config.data.max_prompt_tokens or PROMPT_GUESS
    longest = prompt + config.most_generated(prompt)
    held = most_held(sparsity.evict, prompt, longest)
    monitor = Monitor(config.monitor, sparsity, lambda rollouts: [], longest, config.control)
    check_pool(config, model_config, geometry, monitor.densest, data)
    shares_weights = ranks == 1 and lora is None and config.rollouts.backend == "local"
    has_copy = config.distill is not None if workers else not shares_weights  # the distiller needs whole weights
    is_master = width == 4
    shards = ranks // nodes if config.learner.shard == "node" else ranks
    experts = expert_parameters(model)
    model.to(getattr(torch, dtype_of(config)))
    if config.model.residual:
        widen_residual(model)
    plan = MemoryPlan(
        ranks=ranks,
        nodes=nodes,
        workers=workers,
        shards=shards,
        parameters=parameters,
        experts=experts,
        weights=parameters * width if ranks == 1 else parameters * 4 // shards,
        engine_copy=parameters * width if has_copy else 0,
        worker_weights=parameters * width * (2 if lora else 1) if workers else 0,
        sparse_copy=linear_parameters(model) * width if config.distill else 0,
        adapter=adapter_parameters(model, config.distill, adapter) * (16 if is_master else width + 16),
        trained=trained,
        masters=0 if is_master or ranks > 1 else trained * 4,
        moments=8 * trained // shards,
        gradients=4 * trained // shards,
        reference=parameters * width // shards if config.objective.kl > 0 and not lora else 0,
        published=0 if shares_weights and not workers else (trained if lora and workers else parameters) * width,
        logits=2 * 4 * config.learner.logprob_chunk * text.vocab_size,
        activations=0,
        layer_inputs=layer_inputs,
        all_activations=None if experts else activation_bytes(model),
        longest=longest,
        prompt=prompt,
        geometry=geometry,
        kv_dense=running * longest * kv_token,
        kv_sparse=running * held * kv_token,
        row_state=config.engine.max_rows * row_state_bytes(geometry, sparsity.evict, held) if sparsity.evict else 0,
        summary_share=summary_bytes(geometry, sparsity.select) / (config.page * kv_token) if sparsity.select else 0.0,
        rollouts=rollouts,
        running=running,
        most_tokens=rollouts * config.most_sampled(),
        update_tokens=-(-rollouts // config.learner.updates) * longest,
    )
    learner = config.learner
    return replace(plan, activations=plan.activations_of(learner.checkpoints_activations, learner.tokens) or 0)


def check_settings(config: RunConfig) -> None:
    """Raise for rewards, schedules and a KV dtype that the run could not use."""
    try:
        with in_section("rewards", "rewards.use"):
            check_rewards(config.rewards.use)
    except SettingError:
        raise
    except Exception as error:  # from the module of a reward
        raise SettingError(f"rewards.use: {type(error).__name__} in a reward's module: {error}; correct it.") from error
    for policy in config.policies():
        check_schedules(policy, short_name(config.model.source))
    with in_section("engine"):
        check_kv_dtype(config.engine.kv_dtype, getattr(torch, dtype_of(config)))


def check_pool(config: RunConfig, model_config: Any, geometry: Geometry, densest: Sparsity, data: Data | None) -> None:
    """Raise for a KV pool of a given size that cannot hold the run's longest sequences."""
    if not config.engine.kv_memory:
        return
    with in_section("engine"):
        pages = pages_in(parse_bytes(config.engine.kv_memory), geometry, config.page)
    if data is not None:
        need_of = planned_need(config, pages, longest_sequence(config, model_config, *data))
        candidate = config.policies()[1:]
        check_kv_pool(config, need_of, Policies(config.sparsity, densest, *candidate), *data)


def separate_workers(config: RunConfig) -> int:
    """Rollout workers on GPUs of their own."""
    rollouts = config.rollouts
    return rollouts.workers if rollouts.backend == "ray" and not rollouts.colocated else 0


def longest_prompt(data: Data | None) -> int | None:
    """Tokens of the longest prompt of tokenized data."""
    if data is None:
        return None
    training, held_out = data
    return max(len(example.prompt_ids or ()) for dataset in (training, *held_out) for example in dataset)


def linear_parameters(model: Any) -> int:
    return sum(p.numel() for _, linear in linears(model) for p in linear.parameters())


def lora_parameters(model: Any, rank: int, targets: Iterable[str]) -> int:
    layers = [model.get_submodule(name) for name in targeted(model, targets)]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def adapter_parameters(model: Any, distill: DistillSettings | None, first: Adapter | None) -> int:
    """A given first adapter keeps its rank and targets, whatever the settings say."""
    if distill is None:
        return 0
    if first is None:
        return lora_parameters(model, distill.rank, distill.targets)
    return sum(a.numel() + b.numel() for a, b in first.weights.values())


def planned_need(config: RunConfig, pages: int, longest: int) -> KVNeedOf:
    """What jobs need in the run's engine, which is not built: its KV pool has `pages` pages, and the run's longest
    sequence `longest` tokens."""
    e, page = config.engine, config.page
    rows = min(e.max_rows, max(e.buckets or [e.max_rows]))
    scheduler = Scheduler(
        BlockManager(pages),
        page=page,
        rows=rows,
        width=pages_for(min(e.max_length or longest, longest_in(pages, page)), page),
        lookahead=e.lookahead or default_lookahead(rows, cuda=device_type(config) == "cuda"),
    )

    def need_of(job: Job) -> KVNeed:
        return scheduler.need(Sequence(Request(0, list(job.prompt_ids), job.sampling, job.sparsity, frozenset()), 0))

    return need_of


def device_type(config: RunConfig) -> str:
    return (torch.device(config.model.device) if config.model.device else resolve_device()).type


def dtype_of(config: RunConfig) -> str:
    return config.model.dtype or ("bfloat16" if device_type(config) == "cuda" else "float32")
