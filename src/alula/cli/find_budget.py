"""What `alula calibrate --vetoed` measures, prints and writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from alula.mismatch.calibrate.calibrate import Grid
from alula.mismatch.calibrate.find_budget import Smallest, below, check_limit, rungs, smallest
from alula.mismatch.calibrate.label import family_label, label
from alula.mismatch.calibrate.verify import Verification, verify
from alula.sparsity.schedule import Schedule

if TYPE_CHECKING:
    from alula.cli.calibrate import Engines
    from alula.engine.engine import Engine
    from alula.mismatch.calibrate.calibrate import Text
    from alula.mismatch.calibrate.file import Configuration
    from alula.mismatch.measure import Bins


def ladders_of(
    families: "Sequence[Configuration]", budgets: tuple[int, ...] | None, length: int, limit: float, prompts: int
) -> "list[tuple[Configuration, tuple[int, ...]]]":
    """Every family with the budgets to try, ascending; what cannot be shown or held is refused."""
    check_limit(limit, prompts)
    if budgets is None:
        return [(family, rungs(family, length)) for family in families]
    return [(family, Grid((family,), budgets).budgets) for family in families]


def run_vetoed(
    engines: "Engines",
    text: "Text",
    ladders: "Sequence[tuple[Configuration, tuple[int, ...]]]",
    limit: float,
    bins: "Bins",
    sweep: bool,
    out: Path,
    progress: bool,
) -> int:
    """Find the smallest budget of every family, write and print it; exit code 1 where no family has one."""
    found: list[Smallest] = []
    for family, ladder in ladders:
        engine = engines.with_page(family.block or 16)

        def measured(budget: int, family: "Configuration" = family, engine: "Engine" = engine) -> Verification:
            schedule = Schedule((budget,) * bins.count, bins.width)
            one = verify(
                engine,
                schedule,
                family.sparsity(budget),
                text,
                None,
                quantile=bins.quantile,
                confidence=bins.confidence,
                progress=progress,
            )
            typer.echo(f"{label(family.sparsity(budget))}: {shares(one, limit)}")
            return one

        found.append(smallest(family, ladder, limit, measured, sweep=sweep))
        out.write_text(json.dumps([one.to_dict() for one in found], indent=1) + "\n")
    typer.echo(f"\n{table(found)}\n")
    for one in found:
        for said in remarks(one):
            typer.echo(said)
    if not sweep:
        typer.echo(
            "Only these budgets were measured; a larger one mostly has fewer vetoes, but need not (--sweep "
            "measures all)."
        )
    typer.echo(f"{out}: {verdict(found)}")
    return int(all(one.budget is None for one in found))


def shares(one: Verification, limit: float) -> str:
    share, (lower, upper) = one.vetoed, one.vetoed.interval
    held = f"{'below' if below(one, limit) else 'not below'} {100 * limit:g}%" if one.kv.sparse else "never sparse"
    return (
        f"vetoed {share.count} of {share.of}, {share.value:.1%} ({lower:.1%} to {upper:.1%}), {held}. "
        f"{one.kv.describe()}"
    )


def table(found: Sequence[Smallest]) -> str:
    lines = [
        "| compressor | smallest budget | vetoed | 95% interval | tail | KV saved | KV not read | evictions "
        "| measured |",
        "|---|---:|---:|---|---:|---:|---:|---:|---|",
    ]
    for one in found:
        tried = ", ".join(f"{budget}: {v.vetoed.value:.1%}" for budget, v in sorted(one.tried.items()))
        numbers = "none | | | | | |"
        if one.budget is not None:
            v = one.tried[one.budget]
            lower, upper = v.vetoed.interval
            numbers = (
                f"{one.budget} | {v.vetoed.value:.1%} | {lower:.1%}-{upper:.1%} | {v.tail.overall:.4f} "
                f"| {v.kv.saved:.1%} | {v.kv.not_read:.1%} | {v.kv.evictions}"
            )
        lines.append(f"| {family_label(one.family)} | {numbers} | {tried} |")
    return "\n".join(lines)


def remarks(one: Smallest) -> list[str]:
    """What the table does not say: why there is none, and what may do with less."""
    name = family_label(one.family)
    if one.budget is None:
        return [f"{name}: {why_none(one)}"]
    if one.budget == min(one.tried):
        return [f"{name}: {one.budget} is the smallest budget that was to be tried; smaller --budgets may do."]
    share = one.tried[max(budget for budget in one.tried if budget < one.budget)].vetoed
    needed = share.prompts_to_tell_from(one.limit)
    if needed is None or share.value > one.limit or needed > 10 * share.of // share.samples:  # a hair from the limit
        return []
    return [f"{name}: the next smaller budget may do, which --prompts {needed} would show if its share stays."]


def why_none(one: Smallest) -> str:
    failing = [budget for budget, found in one.tried.items() if not below(found, one.limit)]
    dense = [budget for budget, found in one.tried.items() if found.kv.sparse == 0]
    if not failing:
        least = min(dense)
        return one.tried[least].kv.never_sparse(f"budget {least}", one.family.sparsity(least))
    said = f"budget {max(failing)} is not shown to hold"
    if dense:
        return f"{said} and {min(dense)} was never sparse; name --budgets between them, or a longer --length."
    return f"{said}, the largest to be tried; name larger --budgets, or another compressor."


def verdict(found: Sequence[Smallest]) -> str:
    use = [label(one.family.sparsity(one.budget)) for one in found if one.budget is not None]
    if not any(v.kv.sparse for one in found for v in one.tried.values()):
        return "no budget was sparse, so nothing was tested."
    if not use:
        return f"no budget that was sparse has confidently less than {100 * found[0].limit:g}% of its rollouts vetoed."
    return f"begin with {' or '.join(use)}; --verify it with another --seed, on other rollouts."
