"""What `alula calibrate --verify` measures, prints and writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from alula.mismatch.calibrate.verify import Verification, verify
from alula.objective.veto import TOO_MANY, Share

if TYPE_CHECKING:
    from alula.cli.calibrate import Engines
    from alula.mismatch.calibrate.calibrate import Text
    from alula.sparsity.policy import Sparsity
    from alula.sparsity.schedule import Schedule


def run_verify(
    engines: "Engines",
    text: "Text",
    named: Sequence[tuple[str, "Schedule", "Sparsity"]],
    tau: float | None,
    quantile: float,
    confidence: float,
    out: Path,
    progress: bool,
) -> int:
    """Measure policies on rollouts of their own, write and print what was found; exit code 1 unless all hold."""
    code, written = 0, []
    for name, schedule, policy in named:
        engine = engines.with_page(policy.select.block if policy.select else 16)
        asked = schedule.notes.get("tau") if tau is None else tau
        found = verify(
            engine, schedule, policy, text, asked, quantile=quantile, confidence=confidence, progress=progress
        )
        written.append({"policy": name, **found.to_dict()})
        out.write_text(json.dumps(written if len(named) > 1 else written[0], indent=1) + "\n")
        heading = f"{name}\n\n" if len(named) > 1 else ""
        typer.echo(f"{heading}{found.table()}\n{found.kv.describe()}\n{vetoes(found)}")
        if found.kv.sparse == 0:
            typer.echo(found.kv.never_sparse(name, policy))
        typer.echo(f"{out}: {verdict(found)}")
        code = code if found.holds else 1
    return code


def vetoes(found: Verification) -> str:
    """The share of vetoed rollouts, and what to do about it."""
    share, (lower, upper) = found.vetoed, found.vetoed.interval
    said = (
        f"vetoed rollouts (some token with p_dense / p_sparse < 1e-4): {share.count} of {share.of}, "
        f"{share.value:.1%} ({lower:.1%} to {upper:.1%})."
    )
    if found.too_many_vetoed:
        said += (
            f"\nThat is more than {TOO_MANY:.0%}: so many answers are spoilt, whatever the tail says; use a "
            "larger budget, or objective.correction=reroll."
        )
    elif upper > TOO_MANY and found.kv.sparse:
        said += f"\n{not_told(share)}"
    return said


def not_told(share: Share) -> str:
    """What to do about a share that may be too large."""
    prompts, needed = share.of // share.samples, share.prompts_to_tell_from(TOO_MANY)
    said = f"{prompts} prompts do not tell that from {TOO_MANY:.0%}, which is too many: "
    if needed is None or share.value > TOO_MANY:
        return f"{said}use a larger budget."
    unit = 10 ** max(len(str(needed)) - 2, 0)
    enough = -(-needed // unit) * unit
    return f"{said}measure with --prompts {enough}, enough if the share stays, or use a larger budget."


def verdict(found: Verification) -> str:
    """What the bins say together of tau; those with too few prompts say nothing."""
    if found.kv.sparse == 0:
        return "nothing is judged, since the policy was never sparse."
    if found.tau is None:
        return "no tau was given, so the tail is not judged."
    width, judged = found.schedule.width, sum(bool(bin_.enough) for bin_ in found.tail)
    if found.violated:
        where = ", ".join(f"{j * width}-{(j + 1) * width}" for j in found.violated)
        return f"tau {found.tau:.4f} is violated at lengths {where}."
    bins = len(found.schedule.budgets)
    if judged == bins:
        return f"tau {found.tau:.4f} holds."
    if judged == 0:
        return f"tau {found.tau:.4f} is not judged: all {bins} bins have too few prompts; measure more with --prompts."
    return f"tau {found.tau:.4f} holds in {judged} of {bins} bins; the others have too few prompts to judge."
