"""`alula recipes`: list the recipes that come with the package, or print one."""

import shutil
import textwrap
from typing import Annotated

import typer

from alula.cli.completion import complete_recipe


def recipes(
    name: Annotated[str | None, typer.Argument(help="The recipe to print.", autocompletion=complete_recipe)] = None,
) -> None:
    """List the recipes that come with Alula, or print one: `alula recipes start > mine.yaml` makes a copy to edit."""
    from alula.config.recipes import first_sentence, recipe_names, recipe_path

    if name is not None:
        typer.echo(recipe_path(name).read_text(), nl=False)
        return
    names = recipe_names()
    indent = max(map(len, names)) + 2
    width = min(shutil.get_terminal_size().columns, 120)
    for known in names:
        line = known.ljust(indent) + first_sentence(recipe_path(known))
        typer.echo(textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False))
    typer.echo("\nRun one with `alula train NAME`; print one with `alula recipes NAME`.")
