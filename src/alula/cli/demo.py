"""`alula demo`: all of Alula at small scale, on a CPU."""

from pathlib import Path
from typing import Annotated

import typer

from alula.cli import options as shared
from alula.files import size_text


def demo(
    out: Annotated[Path, typer.Option(help="Folder for models, runs and the report.")] = Path("runs/demo"),
    seed: shared.Seed = 0,
    steps: Annotated[int | None, typer.Option(help="Training steps of each run, by default 25.")] = None,
) -> None:
    """Train a tiny model with dense rollouts, uncorrected sparse rollouts, and four corrections.

    The model is built first. It can follow pointers step by step, looking each one up in its context, or guess. Under
    a small KV budget the chain fails more often than the guess, so an uncorrected run learns to guess, and the dense
    policy, which is the one being trained, forgets what it could do.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from alula.demo.run import run_demo

    arms = run_demo(out, seed=seed, steps=steps, say=typer.echo)
    title = "Held-out accuracy of the dense policy, and the last rollouts"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))  # fits 80 columns
    for column in ("run", "accuracy", "reward", "length", "KV saved", "peak KV", "vetoed", "time"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for arm in arms:
        table.add_row(
            arm.name.partition("-")[2],
            f"{arm.before:.0%} → {arm.after:.0%}",
            f"{arm.reward:.2f}",
            f"{arm.length:.0f}",
            f"{arm.kv_saved:.0%}",
            size_text(arm.kv_bytes_peak),
            f"{arm.vetoed:.0%}",
            f"{arm.seconds:.0f} s",
        )
    typer.echo()
    Console().print(table)
    typer.echo(
        "KV saved counts the tokens of a rollout, peak KV the pages in use. Dense rollouts share a prompt's pages, "
        "and here the prompt is as long as the answer, so evicting saves no memory. With longer answers it does."
    )
    typer.echo(f"Open {out / 'report.html'}: held-out accuracy and response length show the difference.")
