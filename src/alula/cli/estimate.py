"""`alula estimate`: how a recipe's step divides on a cluster, in turn and one step off."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alula.cli.completion import complete_recipe, complete_setting
from alula.errors import SettingError, require

if TYPE_CHECKING:
    from alula.trainer.step_plan import StepPlan, StepPlanner


def estimate(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE",
            help="YAML file of settings, the name of a recipe, or the folder of a run.",
            autocompletion=complete_recipe,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that override the recipe.", autocompletion=complete_setting),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs per node.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    gpu: Annotated[str, typer.Option(help="h200, h100 or a100.")] = "h200",
    network: Annotated[float, typer.Option(min=0.1, help="Gbit/s between a node and the others, one way.")] = 400.0,
    length: Annotated[
        int | None, typer.Option(min=1, help="Mean tokens of an answer; by default all have full length.")
    ] = None,
) -> None:
    """Estimate the seconds of rollouts, scoring, updates and weight transfer in a step of RECIPE.

    Two layouts are compared: every GPU generates and then learns; or some GPUs generate while the others learn, in the
    fastest division. No GPU, weights or data are needed. Rewards and evaluations are not counted.
    """
    from alula.config.load import load_config
    from alula.trainer.step_plan import MEMORY, Cluster, DoesNotFit, StepPlanner

    require(gpu in MEMORY, f"--gpu {gpu}: known: {', '.join(MEMORY)}.")
    config = load_config(recipe, settings or [])
    if config.model.dtype is None:
        config = load_config(recipe, [*(settings or []), "model.dtype=bfloat16"])
    planner = StepPlanner(config, Cluster(gpu, nodes, gpus, network * 1e9 / 8), length)
    try:
        together = planner.together()
    except DoesNotFit as error:
        typer.echo(f"all GPUs in turn: {error}")
        together = None
    apart = planner.apart()
    if together or apart:
        print_table(planner, together, apart)
    else:
        raise SettingError(f"--nodes {nodes} --gpus {gpus}: no division of these GPUs fits; use more, or learner.lora.")


def print_table(planner: "StepPlanner", together: "StepPlan | None", apart: "StepPlan | None") -> None:
    from rich.console import Console

    from alula.files import size_text
    from alula.run.console import seconds
    from alula.trainer.check import new_table

    config, cluster, s = planner.config, planner.cluster, planner.config.sampling
    table = new_table(f"seconds of a step on {cluster.nodes} × {cluster.gpus} {cluster.gpu}, and memory per GPU")
    rows: dict[str, list[str]] = {}

    def add(plan: "StepPlan", title: str, step: float) -> None:
        for name, text in (
            ("", title),
            ("rollouts", seconds(plan.rollouts)),
            ("scoring", seconds(plan.score)),
            ("updates", seconds(plan.update)),
            ("weights", f"{'at most ' if plan.workers else ''}{seconds(plan.weights)}"),
            ("step", seconds(step)),
            ("memory, learning", size_text(plan.learning_bytes)),
            ("memory, generating", size_text(plan.generating_bytes)),
        ):
            rows.setdefault(name, []).append(text)

    if together:
        add(together, "all in turn", together.in_turn)
    if apart:
        division = f"{apart.learners} learn, {apart.workers} generate"
        add(apart, f"{division},\nin turn", apart.in_turn)
        add(apart, f"{division},\none step off", apart.one_step_off)
    for _ in rows[""][1:]:
        table.add_column()
    for name, cells in rows.items():
        table.add_row(name, *cells, end_section=name in ("", "weights", "step"))
    console = Console()
    console.print(table)
    answers = f"{s.prompts * s.n:,} rollouts under {config.sparsity.describe()}, mean {planner.mean:,} tokens"
    console.print(f"{answers}, at most {planner.most:,}.", highlight=False)
    console.print("The costs of one H200 are compared with measured steps in docs/scale-out.md.", highlight=False)
    for line in planner.extrapolated():
        console.print(f"  extrapolated: {line}", highlight=False)
