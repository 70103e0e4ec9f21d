"""What a recipe would do, from its settings and the model's shape alone: memory, tokens per step, what is sparse.

What a plan comes to while the run learns and while it generates, and whether that fits the GPU."""

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from alula.config.run import DistillSettings, RunConfig
from alula.config.settings import ControlSettings
from alula.distributed import resolve_device
from alula.engine.kv_cache import parse_bytes
from alula.errors import SettingError
from alula.files import size_text
from alula.mismatch.control.monitor import filled_in
from alula.models.geometry import Geometry
from alula.models.load import SHAPE, find_pretrained, short_name
from alula.models.lora import Adapter, check_fits, linears, targeted
from alula.models.shapes import SHAPES, shape
from alula.models.supported import refuse_unsupported
from alula.rewards.scoring import check as check_rewards
from alula.run.checkpoint import Checkpoints
from alula.run.run_dir import check_folder
from alula.sparsity.policy import DENSE, Sparsity, check_schedules, describe_budget
from alula.sparsity.schedule import Schedule
from alula.trainer.build import first_adapter, steps_taken
from alula.trainer.preflight import (
    ADVICE,
    Data,
    check_positions,
    describe_data,
    longest_prompt,
    made_for_another,
    read_by,
    read_data,
    tokenizer_at_hand,
    try_rewards,
)

PROMPT_GUESS = 256
"""Tokens that a prompt is counted with where neither the data nor `data.max_prompt_tokens` says it."""


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes per rank, counts per step."""

    parameters: int
    weights: int
    engine_copy: int
    """The engine's own weights; 0 where it reads the learner's."""
    sparse_copy: int
    """The sparse policy's own linear layers, which DistillSparse's adapter is merged into."""
    adapter: int
    """That adapter, φ, with its masters, moments and gradients."""
    masters: int
    moments: int
    gradients: int
    reference: int
    logits: int
    """Of one chunk of positions, and their gradient."""
    activations: int
    """Inputs of all layers for one micro-batch, what activation checkpointing keeps; 0 without it."""
    prompt: int
    """Tokens that a prompt is counted with."""
    kv_token: int
    """Keys and values of one token over all layers and heads."""
    kv_dense: int
    """All rollouts that run together, at full length."""
    kv_sparse: int
    """The same under the run's sparsity."""
    rollouts: int
    running: int
    most_tokens: int
    """Generated per step, if every answer were of full length."""
    update_tokens: int
    """Through the model per optimizer step, at most."""


def plan(config: RunConfig, ranks: int = 1, data: Data | None = None) -> Plan:
    """Raises what would be refused at the start of the run, too. `data` is given where its tokens are known."""
    check_rewards(config.rewards.use)
    sparsity = config.sparsity.build()
    for policy in config.policies():
        check_schedules(policy, short_name(config.model.source))
    model_config = shape_config(config.model.source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    adapter = begin_with(config, model)
    parameters = sum(p.numel() for p in model.parameters())
    lora = config.learner.lora
    trained = lora_parameters(model, lora.rank, ["all"]) if lora else parameters
    text = model_config.get_text_config()
    check_positions(config, model_config, data)
    width = 4 if dtype_of(config) == "float32" else 2
    geometry = replace(Geometry.of(model), value_bytes=width)
    kv_token = geometry.kv_token_bytes
    layer_inputs = geometry.layers * text.hidden_size * (4 if config.model.residual else width)

    s = config.sampling
    rollouts = s.prompts * s.n
    running = min(config.engine.max_rows, -(-rollouts // ranks))
    prompt = longest_prompt(data) or config.data.max_prompt_tokens or PROMPT_GUESS
    longest = prompt + s.max_new_tokens
    if config.control.enabled:
        filled_in(config.control, sparsity, longest)
    shared = ranks == 1 and lora is None
    own_master = width == 4
    return Plan(
        parameters=parameters,
        weights=parameters * width if ranks == 1 else parameters * 4 // ranks,
        engine_copy=0 if shared else parameters * width,
        sparse_copy=linear_parameters(model) * width if config.distill else 0,
        adapter=adapter_parameters(model, config.distill, adapter) * (16 if own_master else width + 16),
        masters=0 if own_master or ranks > 1 else trained * 4,
        moments=8 * trained // ranks,
        gradients=4 * trained // ranks,
        reference=parameters * width // ranks if config.objective.kl > 0 and not lora else 0,
        logits=2 * 4 * config.learner.logprob_chunk * text.vocab_size,
        activations=layer_inputs * config.learner.token_budget if config.learner.activation_checkpointing else 0,
        prompt=prompt,
        kv_token=kv_token,
        kv_dense=running * longest * kv_token,
        kv_sparse=running * held(sparsity, prompt, longest) * kv_token,
        rollouts=rollouts,
        running=running,
        most_tokens=rollouts * s.max_new_tokens,
        update_tokens=-(-rollouts // config.learner.updates) * longest,
    )


def begin_with(config: RunConfig, model: PreTrainedModel) -> Adapter | None:
    """The φ that the run is given; one that is not there, or not one of a model of this shape, is refused."""
    begin = first_adapter(config)
    if config.distill is None or begin is None:
        return None
    try:
        check_fits(model, begin)
    except SettingError as error:
        raise SettingError(
            f"distill.adapter={config.distill.adapter!r} does not fit model.source={config.model.source!r} "
            f"({str(error).rstrip('.')}); name one that was distilled from it."
        ) from error
    return begin


def shape_config(source: str) -> PreTrainedConfig:
    """The model's configuration without its weights: from a shape's name, a folder or the hub."""
    if source.startswith(SHAPE):
        settings = copy.deepcopy(shape(source.removeprefix(SHAPE)))
        found: PreTrainedConfig = AutoConfig.for_model(settings.pop("model_type"), **settings)
    else:
        try:
            found = AutoConfig.from_pretrained(**find_pretrained(source), trust_remote_code=False)
        except SettingError as error:
            raise SettingError(
                f"model.source={str(error).removeprefix('model ').rstrip('.')}; a bare shape has a plan, too: "
                f"model.source={SHAPE}{near_shape(source)}."
            ) from error
        except (OSError, ValueError) as error:
            reason = next(line.strip() for line in str(error).splitlines() if line.strip())
            raise SettingError(
                f"model.source={source!r}: its configuration cannot be read ({reason.rstrip('.')}); name a folder on "
                f"disk, or see the plan of a bare shape: model.source={SHAPE}{near_shape(source)}."
            ) from error
    refuse_unsupported(found)
    return found


def near_shape(source: str) -> str:
    """The shape that a hub id most likely is of."""
    name = source.rpartition("/")[2].lower().removesuffix("-instruct")
    return next(iter(get_close_matches(name, SHAPES, n=1, cutoff=0.0)))


def linear_parameters(model: Any) -> int:
    return sum(p.numel() for _, linear in linears(model) for p in linear.parameters())


def lora_parameters(model: Any, rank: int, targets: Iterable[str]) -> int:
    layers = [model.get_submodule(name) for name in targeted(model, targets)]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def adapter_parameters(model: Any, distill: DistillSettings | None, begin: Adapter | None) -> int:
    """A φ to begin with has a rank and targets of its own."""
    if distill is None:
        return 0
    if begin is None:
        return lora_parameters(model, distill.rank, distill.targets)
    return sum(a.numel() + b.numel() for a, b in begin.weights.values())


def dtype_of(config: RunConfig) -> str:
    device = config.model.device or resolve_device().type
    return config.model.dtype or ("bfloat16" if device == "cuda" else "float32")


def held(sparsity: Sparsity, prompt: int, longest: int) -> int:
    """The most KV tokens of one rollout: an evictor's ceiling; a selector keeps all."""
    evict = sparsity.evict
    if evict is None:
        return longest
    budget = max(evict.budget.budgets) if isinstance(evict.budget, Schedule) else evict.budget
    return min(longest, max(prompt, budget + evict.buffer + (prompt if evict.protect_prompt else 0)))


def check_out(config: RunConfig, resume: bool) -> None:
    """Refuse a folder that the run would refuse. Whether its checkpoints are whole is not looked at: they are large."""
    check_folder(Path(config.out), new=not resume)
    checkpoints = Checkpoints(Path(config.out) / "checkpoints").all()
    if resume and checkpoints:
        steps_taken(config, checkpoints[-1])


def print_plan(config: RunConfig, console: Console | None = None, *, resume: bool = False) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    data = read_data(config)
    read = read_by(tokenizer_at_hand(config), config, data)
    longest = longest_prompt(read)
    p, sparsity, console = plan(config, ranks, read), config.sparsity.build(), console or Console()
    try_rewards(config, data)
    s, correction = config.sampling, config.objective.correction
    work = table("work", "what", "per step")
    work.add_row("data", describe_data(config, data))
    work.add_row("rollouts", f"{s.prompts} prompts × {s.n} = {p.rollouts:,}")
    work.add_row("generated tokens", f"at most {p.most_tokens:,} ({s.max_new_tokens:,} each)")
    scoring = "none (one-update mode)" if config.objective.one_update else "dense, of every rollout"
    work.add_row("scoring", scoring + (" + reference (KL)" if config.objective.kl else ""))
    work.add_row("optimizer steps", f"{config.learner.updates}, each at most {p.update_tokens:,} tokens")
    work.add_row("micro-batches", f"{config.learner.token_budget:,} tokens")
    work.add_row("whole run", f"{config.steps:,} steps, {config.steps * p.rollouts:,} rollouts")
    console.print(work)

    counted = 0
    memory = table(f"memory per rank, {p.parameters / 1e6:,.1f} M parameters, {dtype_of(config)}", "what", "size")
    for what, size in (
        ("weights", p.weights),
        ("weights of the engine's own", p.engine_copy),
        ("linear layers of the sparse policy's own", p.sparse_copy),
        ("adapter of the sparse policy, its moments and gradients", p.adapter),
        ("float32 masters", p.masters),
        ("Adam moments", p.moments),
        ("gradients", p.gradients),
        ("reference policy", p.reference),
        (f"logits of {config.learner.logprob_chunk:,} positions", p.logits),
        (f"layer inputs of {config.learner.token_budget:,} tokens", p.activations),
    ):
        counted += size
        if size:
            memory.add_row(what, size_text(size))
    pool = config.engine.kv_memory or "twice what its rows need, if it is free"
    memory.add_row(f"KV pool (engine.kv_memory: {pool})", "")
    memory.add_row(f"  {p.running} rollouts of {p.prompt + s.max_new_tokens:,} tokens, dense", size_text(p.kv_dense))
    if not sparsity.dense:
        memory.add_row(f"  the same under {sparsity.describe()}", size_text(p.kv_sparse))
    if longest is not None:
        memory.add_row(f"  of which the longest prompt: {longest:,} tokens", "")
    elif config.data.max_prompt_tokens is None:
        memory.add_row(f"  prompts guessed at {p.prompt} tokens; data.max_prompt_tokens says it", "")
    for what, said in totals(config, p, counted, free_memory(config)):
        memory.add_row(what, said)
    console.print(memory)

    sparse = table("what is sparse", "what", "how")
    sparse.add_row("rollouts", sparsity.describe() if sparsity != DENSE else "nothing: a dense run")
    if e := sparsity.evict:
        protected = "the whole prompt, " if e.protect_prompt else ""
        sparse.add_row(
            "  evicted",
            f"down to {describe_budget(e.budget)} KV tokens at {e.buffer} more; always kept: "
            f"{protected}first {e.sinks}, last {e.window}",
        )
    if c := sparsity.select:
        sparse.add_row(
            "  read", f"{describe_budget(c.budget)} KV tokens in blocks of {c.block}; dense layers: {c.dense_layers}"
        )
    for message in made_for_another(config.policies(), shape_config(config.model.source)):
        sparse.add_row("  other model", f"{message} {ADVICE}")
    sparse.add_row("correction", correction.preset)
    if config.control.enabled and not sparsity.dense:
        sparse.add_row("controller", held_limits(config.control))
    every = config.eval.every
    sparse.add_row(
        "held-out evaluation",
        f"dense{' and sparse' if config.eval.sparse else ''}, every {every} steps" if every else "off",
    )
    console.print(sparse)
    check_out(config, resume)  # last, so that the plan of a run that is there already can be read


def held_limits(control: ControlSettings) -> str:
    """What the controller holds, and what it does about it."""
    limits = [f"at most {control.vetoed:.0%} vetoed"] if control.vetoed else []
    if control.tau or not limits:
        limits.append(f"a tail of {control.tau}" if control.tau else "the tail that the schedule was planned for")
    return f"{' and '.join(limits)}; on violation: {control.on_violation}"


def table(title: str, *columns: str) -> Table:
    found = Table(title=title, title_justify="left", show_header=False)
    for i, column in enumerate(columns):
        found.add_column(column, justify="left" if i == 0 or column != "size" else "right")
    return found


USABLE = 0.9
"""Share of the free memory that a plan may take: CUDA's own and one layer's activations are not counted."""


def free_memory(config: RunConfig) -> int | None:
    """Bytes that are free on the GPU that the run would take; None where it would run on the CPU."""
    if config.model.device == "cpu" or not torch.cuda.is_available():
        return None
    named = torch.device(config.model.device or "cuda").index
    return torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")) if named is None else named)[0]


def totals(config: RunConfig, plan: "Plan", counted: int, free: int | None) -> list[tuple[str, str]]:
    """Rows below the parts, of which `counted` is the sum without KV. The KV pool is lent to the learner, which frees
    what only it needs before the next rollouts."""
    pool = parse_bytes(config.engine.kv_memory) if config.engine.kv_memory else plan.kv_sparse
    generating = counted - plan.gradients - plan.logits - plan.activations + pool
    rows = [
        ("in all, learning (the KV pool is lent)", size_text(counted)),
        ("in all, generating", size_text(generating)),
    ]
    if not config.learner.activation_checkpointing:
        rows.append(("  activations not counted: learner.activation_checkpointing is off", ""))
    if free is not None:
        rows.append((f"  {verdict(config, plan, counted, generating, free)}", f"{size_text(free)} free"))
    elif config.model.dtype is None:
        rows.append(("  in float32, as on this CPU; model.dtype=bfloat16 shows what a GPU would hold", ""))
    return rows


def verdict(config: RunConfig, plan: "Plan", learning: int, generating: int, free: int) -> str:
    """Fits, or what to lower: whatever the largest part of the excess is."""
    limit = int(USABLE * free)
    if learning - plan.logits - plan.activations > limit:
        return "does not fit: use more ranks, learner.lora, or a smaller model"
    if learning > limit:
        return f"does not fit: lower learner.{'token_budget' if plan.activations > plan.logits else 'logprob_chunk'}"
    if generating <= limit:
        return "fits"
    if config.engine.kv_memory:
        return "does not fit: lower engine.kv_memory"
    together = (limit - generating + plan.kv_sparse) * plan.running // max(plan.kv_sparse, 1)
    if together < 1:
        return "does not fit: lower sampling.max_new_tokens, or use a smaller budget"
    return f"fits {together:,} of the {plan.running:,} rollouts at a time; the others wait"
