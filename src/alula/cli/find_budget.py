"""`alula calibrate --vetoed`: finds the smallest budget with few vetoed rollouts, prints and writes the results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from alula.files import write_atomically
from alula.mismatch.calibrate.calibrate import Grid
from alula.mismatch.calibrate.find_budget import BudgetSearch, below_limit, budgets_to_try, check_limit, find_budget
from alula.mismatch.calibrate.verify import Verification, verify
from alula.sparsity.schedule import Schedule

if TYPE_CHECKING:
    from alula.cli.common import Engines
    from alula.engine.engine import Engine
    from alula.mismatch.calibrate.calibrate import TextSettings
    from alula.mismatch.measure import Bins
    from alula.sparsity.family import PolicyFamily
    from alula.sparsity.policy import Sparsity


@dataclass(frozen=True)
class FindBudgets:
    """The methods of --vetoed, each with the budgets to try, ascending."""

    ladders: Sequence[tuple["PolicyFamily", tuple[int, ...]]]
    limit: float
    bins: "Bins"
    sweep: bool

    @classmethod
    def of(
        cls,
        families: Sequence["PolicyFamily"],
        budgets: tuple[int, ...] | None,
        limit: float,
        bins: "Bins",
        *,
        length: int,
        prompts: int,
        sweep: bool,
    ) -> "FindBudgets":
        """Raises if so many prompts cannot show the limit, or if a budget is invalid."""
        check_limit(limit, prompts)
        if budgets is None:
            ladders = [(family, budgets_to_try(family, length)) for family in families]
        else:
            ladders = [(family, Grid((family,), budgets).budgets) for family in families]
        return cls(ladders, limit, bins, sweep)

    @property
    def policies(self) -> list["Sparsity"]:
        return [family.template for family, _ in self.ladders]

    def run(self, engines: "Engines", text: "TextSettings", out: Path, progress: bool) -> int:
        """Find the smallest budget of every family, write and print it; the exit code is 1 if no family has one."""
        results: list[BudgetSearch] = []
        for family, ladder in self.ladders:
            engine = engines.with_page(family.block or 16)
            measure = partial(self._measure, engine, text, family, progress=progress)
            results.append(find_budget(family, ladder, self.limit, measure, sweep=self.sweep))
            write_atomically(out, json.dumps([one.to_dict() for one in results], indent=1) + "\n")
        typer.echo(f"\n{table(results)}\n")
        for one in results:
            for remark in remarks(one):
                typer.echo(remark)
        if not self.sweep:
            typer.echo(
                "Only these budgets were measured; a larger one usually has fewer vetoes, but not always (--sweep "
                "measures all)."
            )
        typer.echo(f"{out}: {verdict(results)}")
        return int(all(one.budget is None for one in results))

    def _measure(
        self, engine: "Engine", text: "TextSettings", family: "PolicyFamily", budget: int, *, progress: bool
    ) -> Verification:
        bins, policy = self.bins, family.policy(budget)
        result = verify(
            engine,
            Schedule((budget,) * bins.count, bins.width),
            policy,
            text,
            None,
            quantile=bins.quantile,
            confidence=bins.confidence,
            progress=progress,
        )
        typer.echo(f"{policy.describe()}: {shares(result, self.limit)}")
        return result


def shares(one: Verification, limit: float) -> str:
    share, (lower, upper) = one.vetoed, one.vetoed.interval
    held = (
        f"{'below' if below_limit(one, limit) else 'not below'} {100 * limit:g}%" if one.kv.sparse else "never sparse"
    )
    return (
        f"vetoed {share.count} of {share.of}, {share.value:.1%} ({lower:.1%} to {upper:.1%}), {held}. "
        f"{one.kv.describe()}"
    )


def table(results: Sequence[BudgetSearch]) -> str:
    lines = [
        "| method | smallest budget | vetoed | 95% interval | tail | KV saved | KV not read | evictions | measured |",
        "|---|---:|---:|---|---:|---:|---:|---:|---|",
    ]
    for one in results:
        tried = ", ".join(f"{budget}: {v.vetoed.value:.1%}" for budget, v in sorted(one.tried.items()))
        numbers = "none | | | | | |"
        if one.budget is not None:
            v = one.tried[one.budget]
            lower, upper = v.vetoed.interval
            numbers = (
                f"{one.budget} | {v.vetoed.value:.1%} | {lower:.1%}-{upper:.1%} | {v.tail.overall:.4f} "
                f"| {v.kv.saved:.1%} | {v.kv.not_read:.1%} | {v.kv.evictions}"
            )
        lines.append(f"| {one.family.describe()} | {numbers} | {tried} |")
    return "\n".join(lines)


def remarks(one: BudgetSearch) -> list[str]:
    """Notes below the table: why there is no budget, or how a smaller one might be found."""
    name = one.family.describe()
    if one.budget is None:
        return [f"{name}: {why_none(one)}"]
    if one.budget == min(one.tried):
        return [f"{name}: {one.budget} is the smallest budget tried; a smaller one in --budgets may be enough."]
    share = one.tried[max(budget for budget in one.tried if budget < one.budget)].vetoed
    needed = share.prompts_to_tell_from(one.limit)
    if needed is None or share.value > one.limit or needed > 10 * share.of // share.samples:  # too close to the limit
        return []
    return [f"{name}: the next smaller budget may be enough; --prompts {needed} would show it if its share stays."]


def why_none(one: BudgetSearch) -> str:
    failing = [budget for budget, result in one.tried.items() if not below_limit(result, one.limit)]
    dense = [budget for budget, result in one.tried.items() if result.kv.sparse == 0]
    if not failing:
        least = min(dense)
        return one.tried[least].kv.never_sparse(f"budget {least}", one.family.policy(least))
    text = f"budget {max(failing)} is not shown to hold"
    if dense:
        return f"{text} and {min(dense)} was never sparse; set --budgets between them, or a longer --length."
    return f"{text}, the largest one tried; set larger --budgets, or another method."


def verdict(results: Sequence[BudgetSearch]) -> str:
    policies = [one.family.policy(one.budget).describe() for one in results if one.budget is not None]
    if not any(v.kv.sparse for one in results for v in one.tried.values()):
        return "no budget was sparse, so nothing was tested."
    if not policies:
        return f"no sparse budget has confidently less than {100 * results[0].limit:g}% of its rollouts vetoed."
    return f"start with {' or '.join(policies)}; --verify it with another --seed, on other rollouts."
