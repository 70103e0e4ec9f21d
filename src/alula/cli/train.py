"""`alula train`: trains from a recipe, with settings on the command line, into a run folder."""

import errno
import os
from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="YAML file of settings (docs/training.md), or the folder of a run.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that override the recipe, such as learner.lr=1e-6."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Validate the recipe, print work and memory per step, and exit.")
    ] = False,
) -> None:
    """Train a model with sparse rollouts, from RECIPE."""
    from alula.config.load import load_config

    config = load_config(recipe, settings or [])
    if check:
        from alula.trainer.memory_plan import print_plan

        if os.environ.get("RANK", "0") == "0":  # torchrun starts one process per rank
            print_plan(config, resume=resume)
        return
    import torch.distributed

    from alula.trainer.trainer import Trainer

    try:
        finished = Trainer(config, resume=resume).run()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        typer.echo(f"alula: the disk of {config.out} is full; free some space and run again with --resume.", err=True)
        raise typer.Exit(1) from error
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    raise typer.Exit(0 if finished else 130)
