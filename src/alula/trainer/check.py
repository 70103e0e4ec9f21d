"""`alula train --check`: validates a run without its weights and prints its work, memory, speed and sparsity."""

import os
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from alula.config.run import RunConfig
from alula.files import count_text, size_text
from alula.rollouts.build import check_backend
from alula.run.checkpoint import Resume
from alula.run.console import duration, seconds
from alula.run.sinks import check_sinks
from alula.settings import ControlSettings
from alula.sparsity.policy import DENSE, Budget
from alula.trainer.check_environment import check_environment
from alula.trainer.host_plan import host_rows, traffic_rows
from alula.trainer.learner_fit import choose, open_settings, with_choice
from alula.trainer.memory_plan import (
    USABLE,
    MemoryPlan,
    device_type,
    dtype_of,
    plan_memory,
    separate_workers,
)
from alula.trainer.preflight import Preflight, check_run_folder, load_model_config
from alula.trainer.speed_plan import SpeedPlan, kv_memory, measure, plan_speed
from alula.trainer.start_warnings import start_warnings


def print_plan(config: RunConfig, console: Console | None = None, *, resume: Resume = False) -> None:
    """Check the run and print its plan. Raises whatever the run would reject."""
    console, workers = console or Console(), separate_workers(config)
    preflight = Preflight(config)
    ranks, nodes = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"))
    free = free_memory(config)
    plan = plan_memory(config, ranks, preflight.tokenized, nodes=nodes, workers=workers)
    if free is not None and open_settings(config.learner):
        config = with_choice(config, choose(config.learner, plan, free))
        plan = plan_memory(config, ranks, preflight.tokenized, nodes=nodes, workers=workers)
    environment = [
        *preflight.try_rewards(),
        *check_environment(config, preflight.training, preflight.tokenizer),
    ]
    check_sinks(config.logging.sinks)
    check_backend(config)
    console.print(work_table(config, plan, preflight, environment))
    console.print(memory_table(config, plan, preflight.tokenized is not None))
    console.print(host_table(config, plan))
    kv_bytes = 0.0 if free is None or plan.learning > USABLE * free else kv_memory(config, plan, free)
    # otherwise the run does not fit, as the table of memory says; `alula estimate` covers workers
    if not workers and kv_bytes > plan.kv_dense / plan.running:
        speed = plan_speed(config, plan, measure(config), kv_bytes, ranks)
        console.print(speed_table(config, speed, torch.cuda.get_device_name()))
    console.print(sparsity_table(config))
    model = load_model_config(config.model.source)
    for warning in start_warnings(config, model, plan.prompt, plan.geometry.layers, plan.experts, plan.parameters):
        console.print(Text(f"{warning.message} {warning.advice}", style="bold"))
    check_run_folder(config, resume)  # last, so that the plan of an existing run can be read


def work_table(config: RunConfig, plan: MemoryPlan, preflight: Preflight, environment: list[tuple[str, str]]) -> Table:
    s, objective = config.sampling, config.objective
    scoring = "dense, every rollout"
    if objective.skips_scoring(device_type(config)):
        scoring = "dense, only rollouts that the first optimizer step does not compute"
    table = new_table("work per step")
    for name, text in (*preflight.describe_data(), *environment):
        table.add_row(name, text)
    table.add_row("rollouts", f"{count_text(s.prompts, 'prompt')} × {s.n} = {plan.rollouts:,}")
    table.add_row("generated tokens", f"at most {plan.most_tokens:,} ({config.most_sampled():,} each)")
    table.add_row("scoring", scoring + (" + reference (KL)" if objective.kl else ""))
    table.add_row("optimizer steps", f"{config.learner.updates}, each at most {plan.update_tokens:,} tokens")
    table.add_row("micro-batches", f"{config.learner.tokens:,} tokens")
    table.add_row("run", f"{count_text(config.steps, 'step')}, {config.steps * plan.rollouts:,} rollouts")
    return table


def memory_table(config: RunConfig, plan: MemoryPlan, tokenized: bool) -> Table:
    sharded = f", {plan.ranks} ranks in shards of {plan.shards}" if plan.ranks > 1 else ""
    title = f"memory per rank, {plan.parameters / 1e6:,.1f} M parameters, {dtype_of(config)}{sharded}"
    table = new_table(title, justify="right")
    kept = "layer inputs" if config.learner.checkpoints_activations else "activations"
    for what, size in (
        ("weights", plan.weights),
        ("weights, the engine's copy", plan.engine_copy),
        ("weights, in every rollout worker", plan.worker_weights),
        ("linear layers, the sparse policy's copy", plan.sparse_copy),
        ("adapter of the sparse policy, its moments and gradients", plan.adapter),
        ("float32 masters", plan.masters),
        ("Adam moments", plan.moments),
        ("gradients", plan.gradients),
        ("reference policy", plan.reference),
        (f"logits of {config.learner.logprob_chunk:,} positions", plan.logits),
        (f"{kept} of {config.learner.tokens:,} tokens", plan.activations),
    ):
        if size:
            table.add_row(what, size_text(size))
    longest, sparsity = plan.prompt + config.most_generated(plan.prompt), config.sparsity
    pool = config.engine.kv_memory or "twice what its rows need, if available"
    stored = f"; engine.kv_dtype: {config.engine.kv_dtype}" if config.engine.kv_dtype else ""
    table.add_row(f"KV pool (engine.kv_memory: {pool}{stored})", "")
    table.add_row(f"  {count_text(plan.running, 'rollout')} of {longest:,} tokens, dense", size_text(plan.kv_dense))
    if not sparsity.dense:
        table.add_row(f"  the same under {sparsity.describe()}", size_text(plan.kv_sparse))
    if plan.row_state:
        rows = count_text(config.engine.max_rows, "row")
        table.add_row(f"recent queries and attention sums of {rows}", size_text(plan.row_state))
    if plan.summary_share:
        table.add_row("page summaries", f"{100 * plan.summary_share:.1f} % of the KV pool")
    if tokenized:
        table.add_row(f"  including the longest prompt: {plan.prompt:,} tokens", "")
    elif config.data.max_prompt_tokens is None:
        table.add_row(f"  prompts assumed to have {plan.prompt} tokens; data.max_prompt_tokens sets a limit", "")
    for what, text in totals(config, plan, free_memory(config)):
        table.add_row(what, text)
    return table


def free_memory(config: RunConfig) -> int | None:
    """Free bytes on the GPU that the run would use; None if it would run on the CPU."""
    if config.model.device == "cpu" or not torch.cuda.is_available():
        return None
    index = torch.device(config.model.device or "cuda").index
    return torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")) if index is None else index)[0]


def totals(config: RunConfig, plan: MemoryPlan, free: int | None) -> list[tuple[str, str]]:
    """The last rows of the memory table."""
    of_worker = ", a worker" if plan.workers else ""
    rows = [
        ("total, learning (KV pool released)", size_text(plan.learning)),
        (f"total, generating{of_worker}", size_text(plan.generating(config.engine.kv_memory))),
    ]
    if not plan.activations:
        rows.append(("  activations of a mixture not counted: learner.activation_checkpointing is off", ""))
    if free is not None:
        rows.append((f"  {verdict(config, plan, free)}", f"{size_text(free)} free"))
    elif config.model.dtype is None:
        rows.append(("  in float32, as on this CPU; model.dtype=bfloat16 shows what a GPU would hold", ""))
    return rows


def verdict(config: RunConfig, plan: MemoryPlan, free: int) -> str:
    """Whether the plan fits, or else the setting to lower: the one with the largest part of the excess."""
    limit, generating = int(USABLE * free), plan.generating(config.engine.kv_memory)
    if plan.learning - plan.logits - plan.activations > limit:
        return "does not fit: use more ranks, learner.lora, or a smaller model"
    if plan.learning > limit:
        return f"does not fit: lower learner.{'token_budget' if plan.activations > plan.logits else 'logprob_chunk'}"
    if generating <= limit:
        return "fits"
    if config.engine.kv_memory:
        return "does not fit: lower engine.kv_memory"
    together = int(plan.kv_room(limit) * plan.running // max(plan.kv_sparse, 1))
    if together < 1:
        return "does not fit: lower sampling.max_new_tokens, or use a smaller budget"
    return f"fits {together:,} of the {plan.running:,} rollouts at a time; the others wait"


def host_table(config: RunConfig, plan: MemoryPlan) -> Table:
    table = new_table("host memory per node, and bytes that move per step", justify="right")
    for what, text in (*host_rows(config, plan), *traffic_rows(config, plan)):
        table.add_row(what, text)
    return table


def speed_table(config: RunConfig, speed: SpeedPlan, device: str) -> Table:
    table = new_table(f"speed on {device}: an estimate, with every answer at full length")
    rollouts, answer = speed.rollouts, config.sampling.max_new_tokens
    rate = f"{rollouts.tokens_per_second:,.0f} tokens/s, {rollouts.rows} rollouts at a time"
    table.add_row("rollouts", f"{seconds(rollouts.seconds)}, {rate}")
    table.add_row("scores", seconds(speed.score))
    table.add_row("updates", seconds(speed.update))
    steps = f"all {config.steps:,} steps" if config.steps > 1 else "1 step"
    table.add_row("step", f"{seconds(speed.step)}, {steps} {duration(config.steps * speed.step)}")
    ratio = speed.sparse.tokens_per_second / speed.dense.tokens_per_second
    name = speed.sparsity.describe()
    table.add_row("sparse rollouts", f"{ratio:.2f} × dense with {answer:,} tokens ({name})")
    if speed.pays_from is None:
        table.add_row("  pay from", "no length tried, at these rollouts per step and this memory: train densely")
    else:
        table.add_row("  pay from", f"about {speed.pays_from:,} answer tokens on")
    return table


def sparsity_table(config: RunConfig) -> Table:
    sparsity, every = config.sparsity, config.eval.every
    table = new_table("what is sparse")
    table.add_row("rollouts", sparsity.describe() if sparsity != DENSE else "nothing: a dense run")
    if evict := sparsity.evict:
        protected = "the whole prompt, " if evict.protect_prompt else ""
        table.add_row(
            "  evicted",
            f"to {budget_text(evict.budget)} whenever the cache holds {evict.buffer} more; always kept: "
            f"{protected}first {evict.sinks}, last {evict.window}",
        )
    if select := sparsity.select:
        table.add_row(
            "  read",
            f"{budget_text(select.budget)}, in blocks of {select.block}; dense layers: {select.dense_layers}",
        )
    if config.engine.kv_dtype:
        table.add_row("  stored", f"in 8 bits ({config.engine.kv_dtype}), in evaluations and rerolls too")
    table.add_row("correction", config.objective.correction.preset)
    if config.control.enabled and not sparsity.dense:
        table.add_row("controller", describe_control(config.control))
    interval = "step" if every == 1 else f"{every} steps"
    evaluated = f"dense{' and sparse' if config.eval.sparse else ''}, every {interval}" if every else "off"
    table.add_row("held-out evaluation", evaluated)
    return table


def budget_text(budget: Budget) -> str:
    if isinstance(budget, int):
        return f"{budget:,} KV tokens"
    return f"{min(budget.budgets):,} to {max(budget.budgets):,} KV tokens by length ({budget.name})"


def describe_control(control: ControlSettings) -> str:
    """The controller's limits, and its action on a violation."""
    limits = [f"at most {control.vetoed:.0%} vetoed"] if control.vetoed else []
    if control.tau or not limits:
        limits.append(f"a tail of {control.tau}" if control.tau else "the tail that the schedule was planned for")
    return f"{' and '.join(limits)}; on violation: {control.on_violation}"


def new_table(title: str, justify: Any = "left") -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify=justify)
    return table
