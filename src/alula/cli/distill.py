"""`alula distill`: train the sparse policy's adapter on a fixed model, from prompts."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alula.cli import options as shared
from alula.errors import require
from alula.files import check_same_settings, count_text

if TYPE_CHECKING:
    from alula.data import Dataset
    from alula.distill.distiller import Distiller
    from alula.distill.standalone import RolloutOptions
    from alula.engine.engine import Engine
    from alula.sparsity.policy import Sparsity


def distill(
    model: shared.Model,
    data: shared.Prompts,
    sparsity: shared.Sparsity,
    steps: Annotated[int, typer.Option(help="Batches of rollouts.")] = 50,
    prompts: Annotated[int, typer.Option(help="Prompts per step.")] = 64,
    samples: Annotated[int, typer.Option(help="Rollouts per prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 1024,
    temperature: shared.Temperature = 1.0,
    held_out: Annotated[int, typer.Option(help="Prompts set aside to measure acceptance on.")] = 64,
    rank: Annotated[int, typer.Option(help="Rank of the adapter.")] = 16,
    alpha: Annotated[float | None, typer.Option(help="Scale times rank; by default twice the rank.")] = None,
    targets: Annotated[str, typer.Option(help="Layers with an adapter, separated by commas, or all.")] = "all",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-4,
    minibatches: Annotated[int, typer.Option(help="Optimizer steps per batch of rollouts.")] = 4,
    token_budget: Annotated[int, typer.Option(help="Tokens per micro-batch.")] = 16384,
    adapter: Annotated[Path | None, typer.Option(help="Continue from this adapter.")] = None,
    width: Annotated[int, typer.Option("--bin", help="Tokens per length bin of the tail.")] = 2000,
    seed: shared.Seed = 0,
    split: shared.Split = None,
    data_dir: shared.DataDir = None,
    prompt: shared.PromptTemplate = None,
    chat: shared.Chat = None,
    options: shared.TaskOptions = None,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
    residual: shared.Residual = None,
    page: shared.Page = 16,
    kv_dtype: shared.KVDtype = None,
    kv_memory: shared.KVMemory = None,
    max_rows: shared.MaxRows = 256,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")] = Path("distilled"),
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; the last step has one, too.")] = 10,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in the folder.")] = False,
) -> None:
    """Train a LoRA that only the sparse rollout uses, so that it agrees better with the dense policy.

    Writes the adapter (peft), metrics.jsonl and summary.json: acceptance on held-out prompts before and after.
    """
    from alula.settings import DistillSettings
    from alula.sparsity.policy import Sparsity

    policy = Sparsity.parse(sparsity)
    require(not policy.dense, "sparsity=dense: the dense policy is the teacher; give a sparse policy.")
    counts = {"steps": steps, "prompts": prompts, "samples": samples, "bin": width, "save_every": save_every}
    for name, value in counts.items():
        require(value >= 1, f"{name}={value}: must be at least 1.")
    settings = DistillSettings(
        rank=rank,
        alpha=2.0 * rank if alpha is None else alpha,
        targets=tuple(name.strip() for name in targets.split(",")),
        seed=seed,
        lr=lr,
        minibatches=minibatches,
        token_budget=token_budget,
    )
    from alula.cli.common import load_model_and_prompts, parse_task_options
    from alula.distill.distiller import Distiller
    from alula.distill.standalone import RolloutOptions
    from alula.engine.engine import Engine
    from alula.models.experts import expert_parameters, unadapted_experts
    from alula.models.lora import Adapter
    from alula.run.run_dir import check_folder

    rollouts = RolloutOptions(prompts, samples, max_new_tokens, temperature, seed)
    made_with = {
        "model": model,
        "sparsity": policy.describe(full=True),
        "schedules": schedules_of(policy),
        "held_out": held_out,
        "bin": width,
        **asdict(rollouts),
        "data": ", ".join(data),
        "data_dir": path_text(data_dir),
        "split": split,
        "prompt": prompt,
        "chat": chat,
        "options": parse_task_options(options or []),
        "residual": residual,
        "rank": rank,
        "alpha": settings.alpha,
        "targets": ",".join(settings.targets),
        "adapter": path_text(adapter),
        "kv_dtype": kv_dtype,
    }
    check_folder(out, new=not resume, option="--out FOLDER")
    loaded, dataset = load_model_and_prompts(
        model, data, split, data_dir, prompt, chat, options or [], device, dtype, residual, seed
    )
    training, test_set = dataset.split(held_out, seed)
    test = [list(example.prompt_ids or ()) for example in test_set]
    initial = None if adapter is None else Adapter.load(adapter)
    distiller = Distiller(loaded.model, settings, adapter=initial, base_model=model)
    left_out = unadapted_experts(expert_parameters(loaded.model), loaded.model.num_parameters(), "alula distill")
    if left_out:
        typer.echo(" ".join(left_out), err=True)
    work = Distillation(out, distiller, policy, rollouts, steps, width, save_every, made_with, resume)
    engine = Engine(
        loaded,
        page=policy.page(page),
        kv_dtype=kv_dtype,
        kv_memory=kv_memory,
        max_rows=max_rows,
        sparse_adapter=distiller.adapter(),
    )
    engine.check(policy)
    summary = {"model": model, "sparsity": policy.describe(), "steps": steps, "held_out": len(test)}
    summary |= work.run(engine, training, test)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    show(summary)
    typer.echo(
        f"Adapter written to {out / 'adapter'}. Use it with distill.adapter={out / 'adapter'} in a run, "
        "--sparse-adapter in alula calibrate, eval and serve, or Engine.load(..., sparse_adapter=...) in Python."
    )


class Distillation:
    """Trains the adapter, measures it before and after, and writes the folder `out`. With `resume` it continues from
    the folder's last checkpoint, which must have been `made_with` the same settings."""

    def __init__(
        self,
        out: Path,
        distiller: "Distiller",
        policy: "Sparsity",
        rollouts: "RolloutOptions",
        steps: int,
        width: int,
        save_every: int,
        made_with: dict[str, Any],
        resume: bool,
    ) -> None:
        from alula.run.checkpoint import Checkpoints

        self.out, self.distiller, self.policy, self.rollouts = out, distiller, policy, rollouts
        self.steps, self.width, self.save_every = steps, width, save_every
        self.made_with, self.resume = made_with, resume
        self.checkpoints = Checkpoints(out / "checkpoints", keep=1)
        self.done = 0
        """Steps that were taken before."""
        self.before: dict[str, Any] | None = None
        """Acceptance before the first step."""
        if (last := self.checkpoints.begin(resume)) is not None:
            self._load(last)

    def _load(self, path: Path) -> None:
        state, hint = self.checkpoints.state(path), "use the same setting, or another --out"
        check_same_settings(str(self.out), state["made_with"], self.made_with, hint)
        self.done, self.before = state["step"], state["before"]
        require(
            self.done <= self.steps, f"steps={self.steps}: {self.out} has already taken {self.done}; raise --steps."
        )
        self.checkpoints.load(path, self.distiller.tensors())
        self.distiller.resume(state["distiller"])
        typer.echo(f"continuing after step {self.done}", err=True)

    def run(self, engine: "Engine", training: "Dataset", test: list[list[int]]) -> dict[str, Any]:
        """Take the steps that are left; returns the acceptance on `test` before and after."""
        from alula.distill.standalone import distill_prompts
        from alula.run.run_dir import MetricsWriter

        resume_from = (self.done or -1) if self.resume else None
        with MetricsWriter(self.out, total_steps=self.steps, resume_from=resume_from) as writer:

            def finish_step(step: int, row: dict[str, float]) -> None:
                writer.log(step, row)
                kl, seconds = row["distill/kl"], row["time/rollout"] + row["time/distill"]
                typer.echo(f"step {step}/{self.steps}  KL {kl:.5f}  {seconds:.1f} s", err=True)
                if step % self.save_every == 0 or step == self.steps:
                    self._save(step)

            if self.before is None:
                self.before = self._acceptance(engine, test)
            distill_prompts(
                engine, self.distiller, self.policy, training, self.steps, self.rollouts, finish_step, self.done
            )
            self.distiller.adapter().save(self.out / "adapter")
            return {"before": self.before, "after": self._acceptance(engine, test)}

    def _save(self, step: int) -> None:
        state = {
            "distiller": self.distiller.state(),
            "step": step,
            "before": self.before,
            "made_with": self.made_with,
        }
        self.checkpoints.save(step, self.distiller.tensors(), state)

    def _acceptance(self, engine: "Engine", test: list[list[int]]) -> dict[str, Any]:
        """Acceptance on the held-out prompts, over all tokens and by length."""
        from alula.distill.standalone import measure
        from alula.mismatch.calibrate.file import tail_to_dict

        acceptance = measure(engine, self.distiller, self.policy, test, self.rollouts, seed=-1)
        tails = tail_to_dict(acceptance.tails(self.width))
        return acceptance.metrics() | {"tokens": len(acceptance.alpha), "by_length": tails}


def schedules_of(policy: "Sparsity") -> list[list[Any]]:
    """Budgets and bin width of the policy's schedules, whose text is only a name."""
    from alula.sparsity.schedule import Schedule

    budgets = [part.budget for part in (policy.evict, policy.select) if part is not None]
    return [[list(budget.budgets), budget.width] for budget in budgets if isinstance(budget, Schedule)]


def path_text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def show(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{summary['sparsity']}, {count_text(summary['held_out'], 'held-out prompt')}")
    for name in ("", "before", "after"):
        table.add_column(name, justify="left" if not name else "right")
    for label, name in (
        ("acceptance, 5th percentile", "acceptance_tail"),
        ("acceptance, mean", "acceptance_mean"),
        ("KL(sparse ‖ dense)", "kl"),
    ):
        table.add_row(label, *(f"{summary[when][name]:.4f}" for when in ("before", "after")))
    Console().print(table)
