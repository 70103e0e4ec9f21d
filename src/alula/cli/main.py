"""Command-line entry point. Only the called command is imported, so `alula --help` is instant."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any

import typer

from alula import __version__
from alula.cli.completion import typed_words
from alula.errors import DISK_FULL, RunFailed, SettingError

COMMANDS = {
    "generate": ("alula.cli.generate:generate", "Generate with a model, dense or under any sparsity."),
    "train": ("alula.cli.train:train", "Train a model with sparse rollouts, from a recipe."),
    "estimate": ("alula.cli.estimate:estimate", "Estimate a recipe's step on GPUs that you do not have yet."),
    "eval": ("alula.cli.eval:evaluate", "Evaluate models on data sets, dense or under any sparsity."),
    "recipes": ("alula.cli.recipes:recipes", "List the recipes that come with Alula, or print one."),
    "report": ("alula.cli.report:report", "Compare runs in one self-contained HTML page."),
    "watch": ("alula.cli.watch:watch", "Watch runs in a browser while they go on."),
    "env": ("alula.cli.env:env", "Print versions and hardware, for a bug report."),
    "demo": ("alula.cli.demo:demo", "Train a tiny model six ways on the CPU and compare them."),
    "serve": ("alula.cli.serve:serve", "Serve a model over HTTP, to clients of OpenAI and vLLM."),
    "bench": ("alula.cli.bench:bench", "Measure the engine on this machine."),
    "calibrate": ("alula.cli.calibrate:calibrate", "Measure how far a sparse policy is from the dense one."),
    "plan": ("alula.cli.plan:plan", "Choose the cheapest budget schedule that keeps the mismatch small."),
    "distill": ("alula.cli.distill:distill", "Pull the sparse policy towards the dense one (DistillSparse)."),
}
"""Name -> location of its function, and its line in the list of commands."""


def app(arguments: Sequence[str] | None = None) -> None:
    """Entry point. An invalid setting prints one message on standard error and exits with 2; a failed run, with 1."""
    if arguments is None:
        add_current_folder()
    words = list(sys.argv[1:] if arguments is None else arguments)
    called = next((word for word in words or typed_words() if not word.startswith("-")), None)
    try:
        build(called)(args=words, prog_name="alula")
    except (SettingError, RunFailed) as error:
        typer.echo(f"alula: {error}", err=True)
        sys.exit(2 if isinstance(error, SettingError) else 1)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        typer.echo(f"alula: {error.strerror}; free some space and run the command again.", err=True)
        sys.exit(1)


def add_current_folder() -> None:
    """Modules in the current folder can be imported, as with `python -m`: a reward may be `module:function`."""
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def build(called: str | None) -> typer.Typer:
    """The app with the called command in full, and the others as a name and a help line."""
    commands = typer.Typer(
        help="Reinforcement learning of reasoning LLMs with sparse rollouts.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    @commands.callback()
    def global_options(
        version: Annotated[
            bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None:
        pass

    for name, (where, line) in COMMANDS.items():
        module, _, function = where.partition(":")
        body = getattr(import_module(module), function) if name == called else placeholder(line)
        commands.command(name, help=line if name != called else help_text(body))(body)
    return commands


def help_text(command: Callable[..., Any]) -> str:
    """The docstring with one line per paragraph, which the terminal wraps."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(command.__doc__ or "").split("\n\n"))


def print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"alula {__version__}")
        raise typer.Exit


def placeholder(line: str) -> Callable[[], Any]:
    def command() -> None:
        raise AssertionError("a command that was not imported was called")

    command.__doc__ = line
    return command


if __name__ == "__main__":
    app()
