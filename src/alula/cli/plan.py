"""`alula plan`: the cheapest schedule whose tail stays above a threshold, and the cost of other thresholds."""

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from alula.cli.common import check_output_file
from alula.errors import SettingError, require
from alula.files import count_text

if TYPE_CHECKING:
    from alula.mismatch.calibrate.file import Calibration
    from alula.mismatch.plan.cost import CostModel
    from alula.mismatch.plan.plan import Plan, Workload
    from alula.mismatch.plan.tradeoff import Tradeoff


def plan(
    calibration: Annotated[Path, typer.Argument(help="File written by `alula calibrate`.")],
    tau: Annotated[
        float | None, typer.Option(help="Smallest tail allowed at any length; by default the dense floor - 0.085.")
    ] = None,
    timings: Annotated[
        Path | None,
        typer.Option(help="Decode steps timed on this machine by `alula bench`; the cost is fitted to them."),
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="Without timings: h200, h100 or a100, or TFLOPS,TB/s of another device.")
    ] = "h200",
    new_tokens: Annotated[
        int | None, typer.Option(help="Tokens generated per rollout; by default up to the calibrated length.")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Prompt tokens.")] = 0,
    batch: Annotated[int | None, typer.Option(help="Rows that decode together; by default 32.")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Instead of --batch: KV memory, such as 60GiB, which limits the rows.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the schedule; by default the name of its file.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Schedule file to write.")] = Path("schedule.json"),
) -> None:
    """Choose the cheapest schedule whose tail of acceptance is confidently above tau at every length.

    Writes the schedule, a plot of the calibrated tails with the choice (.tails.svg) and the Pareto front of threshold
    against speed (.pareto.svg); prints the cost of every threshold. The exit code is 2 if tau is out of reach.
    """
    from alula.mismatch.calibrate.file import Calibration
    from alula.mismatch.plan.plan import Workload
    from alula.mismatch.plan.plan import plan as build_plan
    from alula.mismatch.plan.plot import plot_pareto, plot_tails
    from alula.mismatch.plan.tradeoff import table

    check_workload(new_tokens, prompt, batch, kv_memory)
    tails = Calibration.load(calibration)
    check_output_file(out)
    cost = cost_of(tails, timings, hardware)
    if batch is None and kv_memory is None:
        batch = 32
    length = tails.bins * tails.width
    require(
        new_tokens is not None or prompt < length,
        f"--prompt {prompt}: the calibration ends at {length} tokens; use a shorter prompt, or set --new-tokens.",
    )
    work = Workload(new_tokens or length - prompt, prompt, batch, None if kv_memory is None else as_bytes(kv_memory))
    rows = thresholds(tails, cost, work, tau)
    typer.echo(table(rows) + "\n")
    out.with_suffix(".pareto.svg").write_text(plot_pareto(rows))
    chosen = build_plan(tails, cost, work, tau=tau, name=name or out.stem)
    out.with_suffix(".tails.svg").write_text(plot_tails(tails, chosen))
    chosen.schedule.save(out)
    typer.echo(describe(chosen, tails))
    typer.echo(
        f"{out}, {out.with_suffix('.tails.svg')} and {out.with_suffix('.pareto.svg')} written; "
        f"check it on its own rollouts with `alula calibrate MODEL --data ... --verify {out}`."
    )
    policy = chosen.family.policy(replace(chosen.schedule, name=str(out)))
    typer.echo(f"train with: {quote('sparsity=' + policy.describe())}")


def check_workload(new_tokens: int | None, prompt: int, batch: int | None, kv_memory: str | None) -> None:
    require(new_tokens is None or new_tokens >= 1, f"--new-tokens {new_tokens}: must be at least 1.")
    require(prompt >= 0, f"--prompt {prompt}: must be at least 0.")
    require(batch is None or batch >= 1, f"--batch {batch}: must be at least 1.")
    require(
        batch is None or kv_memory is None,
        f"--batch {batch} and --kv-memory {kv_memory}: give only one of them, since each sets the number of rows.",
    )


def cost_of(calibration: "Calibration", timings: Path | None, hardware: str) -> "CostModel":
    """A cost fitted to timings of this machine if given, else Sparrow's analytic form."""
    from alula.mismatch.plan.cost import AnalyticCost, Hardware, load_cost
    from alula.models.geometry import Geometry

    geometry = Geometry(**calibration.notes["shape"])
    if timings is not None:
        fitted = load_cost(timings, geometry)
        error = fitted.notes.get("median_error")
        typer.echo(f"cost fitted to {fitted.notes.get('timings')} steps of {timings}, median error {error:.1%}\n")
        return fitted
    if "," in hardware:
        try:
            tflops, bandwidth = map(float, hardware.split(","))
            require(tflops > 0 and bandwidth > 0, "both must be above 0")
        except ValueError:
            raise SettingError(f"--hardware {hardware}: write TFLOPS,TB/s, such as 989,4.8.") from None
        device = Hardware(tflops, bandwidth)
    else:
        device = Hardware.named(hardware)
    typer.echo(f"analytic cost for {hardware}; give --timings for one fitted to this machine\n")
    return AnalyticCost(geometry, device)


def as_bytes(text: str) -> float:
    from alula.engine.kv_cache import parse_bytes

    return parse_bytes(text)


def thresholds(calibration: "Calibration", cost: "CostModel", work: "Workload", tau: float | None) -> "list[Tradeoff]":
    """The cost of the usual thresholds, of `tau`, and of the strictest one that can be reached."""
    from alula.mismatch.plan.tradeoff import tradeoffs, usual_taus

    taus = {*usual_taus(calibration), *([] if tau is None else [tau])}
    reachable = {row.reachable for row in tradeoffs(calibration, cost, work, sorted(taus)) if row.plan is None}
    return tradeoffs(calibration, cost, work, sorted(taus | {value for value in reachable if 0 < value < 1}))


def describe(plan: "Plan", calibration: "Calibration") -> str:
    """The plan as text, with a table of its bins."""
    lines = [
        f"{plan.schedule.name}: {plan.family.describe()}, tau {plan.tau:.4f} (dense floor {plan.floor:.4f})",
        f"predicted {plan.speedup:.2f}x dense: {plan.sparse.tokens_per_second:,.0f} against "
        f"{plan.dense.tokens_per_second:,.0f} tokens/s, {plan.sparse.read_share:.0%} of the KV read, "
        f"{plan.sparse.peak_kv_bytes / 2**30:.2f} against {plan.dense.peak_kv_bytes / 2**30:.2f} GiB of KV, "
        f"{count_text(plan.sparse.batch, 'row')}",
        "",
        "| length | budget | tail | lower bound |",
        "|---:|---:|---:|---:|",
    ]
    for bin_ in plan.bins:
        where = f"{bin_.start}-{bin_.start + calibration.width}"
        shown = f"{bin_.tail.value:.4f} | {bin_.tail.lower:.4f}" if bin_.tail else "budget of the neighbouring bin |"
        lines.append(f"| {where} | {bin_.budget} | {shown} |")
    lines += [f"note: {warning}" for warning in plan.warnings]
    lines += [f"not chosen: {family} ({why})" for family, why in plan.alternatives]
    return "\n".join(lines)
