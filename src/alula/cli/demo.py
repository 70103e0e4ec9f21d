"""`alula demo`: the whole of Alula in small, on a CPU."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Where models, runs and the report go.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Everything random depends on it.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Training steps of each run, by default 25.")] = None,
) -> None:
    """Train a tiny model densely, naively sparse, with Sparse-RL's correction, with reroll and with a controller.

    The model is made on the spot: it can follow pointers step by step, looking each one up in its own context, or
    guess. Under a small KV budget the careful chain fails more often than the guess, so a naive run learns to guess,
    and the dense policy, which is what is trained, forgets what it could do.
    """
    from rich.console import Console
    from rich.table import Table

    from alula.demo.run import run_demo

    arms = run_demo(out, seed=seed, steps=steps, say=typer.echo)
    table = Table(title="Held-out accuracy of the dense policy, and the last rollouts")
    for column in ("run", "accuracy", "reward", "length", "KV saved", "vetoed", "time"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for arm in arms:
        table.add_row(
            arm.name.partition("-")[2],
            f"{arm.before:.0%} → {arm.after:.0%}",
            f"{arm.reward:.2f}",
            f"{arm.length:.0f}",
            f"{arm.kv_saved:.0%}",
            f"{arm.vetoed:.0%}",
            f"{arm.seconds:.0f} s",
        )
    typer.echo()
    Console().print(table)
    typer.echo(f"Open {out / 'report.html'}: held-out accuracy and response length tell the story.")
