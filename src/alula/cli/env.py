"""`alula env`: versions and hardware, for a bug report."""

import json

import typer


def env() -> None:
    """Print versions, system, processors and GPUs as JSON. Every run records the same in its environment.json."""
    from alula.run.environment import environment

    typer.echo(json.dumps(environment(), indent=2))
