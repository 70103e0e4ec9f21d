"""`alula train`: trains from a recipe, with settings on the command line, into a run folder."""

import os
from pathlib import Path
from typing import Annotated

import typer

from alula.cli.completion import complete_recipe, complete_setting
from alula.errors import DISK_FULL, RunFailed, require


def train(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE",
            help="YAML file of settings, the name of a recipe (see `alula recipes`), or the folder of a run.",
            autocompletion=complete_recipe,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings that override the recipe, such as learner.lr=1e-6.",
            autocompletion=complete_setting,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")] = False,
    auto_resume: Annotated[
        bool,
        typer.Option("--auto-resume", help="The same if it has a checkpoint, else start it; for restart loops."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Validate the recipe, print work and memory per step, and exit.")
    ] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            "--push-to-hub",
            metavar="USER/NAME",
            help="Upload the trained model to the Hugging Face hub; by default not.",
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository of --push-to-hub private.")] = False,
) -> None:
    """Train a model with sparse rollouts, from RECIPE."""
    from alula.config.load import load_config

    config = load_config(recipe, settings or [])
    require(push_to_hub is not None or not private, "--private: needs --push-to-hub; leave it out, or add that.")
    if push_to_hub is not None:
        from alula.run.push import check_push

        check_push(push_to_hub)
    if check:
        from alula.trainer.check import print_plan

        if os.environ.get("RANK", "0") == "0":  # torchrun starts one process per rank
            print_plan(config, resume="auto" if auto_resume else resume)
        return
    import torch.distributed

    from alula.run.checkpoint import Checkpoints
    from alula.trainer.trainer import Trainer

    try:
        finished = Trainer(config, resume="auto" if auto_resume else resume).run()
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        resume_hint = Checkpoints(Path(config.out) / "checkpoints").resume_hint()
        raise RunFailed(f"the disk of {config.out} is full. Free some space; {resume_hint}.") from error
    if finished and push_to_hub is not None and os.environ.get("RANK", "0") == "0":
        from alula.run.push import push

        typer.echo(f"uploaded to {push(Path(config.out) / 'model', push_to_hub, private)}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    raise typer.Exit(0 if finished else 130)
