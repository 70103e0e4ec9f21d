"""`alula bench`: engine speed on this machine, compared with the memory-bandwidth floor."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from alula.cli import options as shared
from alula.cli.common import check_output_file, shared_page
from alula.errors import SettingError
from alula.files import size_text

ROOM = 64
"""Extra tokens of length, for steps that are launched ahead."""
PIPE_WIDTH = 120


def bench(
    model: shared.Model,
    batch: Annotated[list[int] | None, typer.Option(help="Rows (repeatable); by default 64.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="KV tokens per row (repeatable); by default 1024.")] = None,
    sparsity: shared.Sparsities = None,
    rollouts: Annotated[
        int, typer.Option(help="Also time full rollouts of this many new tokens, from prompts of --context tokens.")
    ] = 0,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
    kv_dtype: shared.KVDtype = None,
    kv_memory: shared.KVMemory = None,
    page: shared.Page = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the records here, as JSON.")] = None,
) -> None:
    """Time decode steps (and full rollouts): milliseconds, the floor, percent of it, tokens/s, KV bytes.

    The floor is the bytes that must move (weights, KV that the policy reads) divided by the measured copy bandwidth.
    A step under an evictor is timed with the most KV that it holds at that length: budget + buffer.
    """
    from alula.sparsity.policy import Sparsity

    policies = [Sparsity.parse(text) for text in sparsity or ["dense"]]
    page = shared_page(policies, page)
    batches, contexts = batch or [64], context or [1024]
    for name, values, least in (("batch", batches, 1), ("context", contexts, 1), ("rollouts", [rollouts], 0)):
        if min(values) < least:
            raise SettingError(f"--{name} {min(values)}: must be at least {least}.")
    check_output_file(out)
    from alula.bench.ceilings import measure_ceilings
    from alula.bench.decode import decode_step
    from alula.bench.decode import rollouts as full_rollouts
    from alula.engine.engine import Engine
    from alula.models.load import load_model

    loaded = load_model(model, device=device, dtype=dtype)
    # Random KV is not limited by the model's positions.
    longest = max(getattr(loaded.model.config, "max_position_embeddings", 0), max(contexts) + rollouts + ROOM)
    engine = Engine(
        loaded, page=page, kv_dtype=kv_dtype, kv_memory=kv_memory, max_rows=max(batches), max_length=longest
    )
    ceilings = measure_ceilings(engine.device)
    records: list[dict[str, Any]] = []
    for policy in policies:
        for rows in batches:
            for tokens in contexts:
                records.append(decode_step(engine, rows, tokens, policy, ceilings))
                if rollouts:
                    if engine.device.type == "cuda":
                        full_rollouts(engine, rows, tokens, rollouts, policy)  # compiles, and captures its graphs
                    records.append(full_rollouts(engine, rows, tokens, rollouts, policy))
    if out is not None:
        summary = {"bandwidth": ceilings.bandwidth, "matrix": ceilings.matrix, "records": records}
        out.write_text(json.dumps(summary, indent=1) + "\n")
    if as_json:
        for record in records:
            typer.echo(json.dumps(record))
        return
    show(records, engine.name + (f", {kv_dtype} KV" if kv_dtype else ""), ceilings.bandwidth)


def show(records: list[dict[str, Any]], name: str, bandwidth: float) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{name}, copy bandwidth {bandwidth / 1e12:.2f} TB/s", box=SIMPLE)
    for column in ("", "sparsity", "batch", "context", "ms", "floor ms", "of floor", "tokens/s", "KV"):
        table.add_column(column, justify="left" if column in ("", "sparsity") else "right")
    for r in records:
        if r["kind"] == "decode step":
            table.add_row(
                "step",
                r["sparsity"],
                f"{r['batch']}",
                f"{r['context']}",
                f"{r['ms']:.2f}",
                f"{r['floor_ms']:.2f}",
                f"{r['of_floor']:.0%}",
                f"{r['tokens_per_s']:,.0f}",
                size_text(r["kv_bytes"]),
            )
        else:
            table.add_row(
                f"rollouts + {r['new_tokens']}",
                r["sparsity"],
                f"{r['batch']}",
                f"{r['prompt']}",
                f"{r['seconds'] * 1e3:,.0f}",
                "",
                "",
                f"{r['tokens_per_s']:,.0f}",
                size_text(r["kv_peak_bytes"]),
            )
    console = Console()
    (console if console.is_terminal else Console(width=PIPE_WIDTH)).print(table)
