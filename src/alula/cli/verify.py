"""`alula calibrate --verify`: measures policies on their own rollouts, prints and writes the results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from alula.errors import require
from alula.files import write_atomically
from alula.mismatch.calibrate.verify import Verification, parse_target, verify
from alula.objective.veto import TOO_MANY, Share

if TYPE_CHECKING:
    from alula.cli.common import Engines
    from alula.mismatch.calibrate.calibrate import TextSettings
    from alula.mismatch.measure import Bins
    from alula.sparsity.policy import Sparsity
    from alula.sparsity.schedule import Schedule


@dataclass(frozen=True)
class VerifyPolicies:
    """The policies of --verify, each with the schedule whose bins it is measured in."""

    named: Sequence[tuple[str, "Schedule", "Sparsity"]]
    tau: float | None
    bins: "Bins"

    @classmethod
    def of(
        cls, names: Sequence[str], taus: Sequence[float], bins: "Bins", length: int, kv_dtype: str | None
    ) -> "VerifyPolicies":
        require(len(taus) < 2, f"--tau {' --tau '.join(map(str, taus))}: --verify takes one.")
        named = [(name, *parse_target(name, bins.width, length, kv_dtype)) for name in names]
        return cls(named, taus[0] if taus else None, bins)

    @property
    def policies(self) -> list["Sparsity"]:
        return [policy for _, _, policy in self.named]

    def run(self, engines: "Engines", text: "TextSettings", out: Path, progress: bool) -> int:
        """Measure each policy, write and print the results; the exit code is 0 if all hold."""
        records, several, code = [], len(self.named) > 1, 0
        for name, schedule, policy in self.named:
            result = verify(
                engines.with_page(policy.page()),
                schedule,
                policy,
                text,
                schedule.notes.get("tau") if self.tau is None else self.tau,
                quantile=self.bins.quantile,
                confidence=self.bins.confidence,
                progress=progress,
            )
            records.append({"policy": name, **result.to_dict()})
            write_atomically(out, json.dumps(records if several else records[0], indent=1) + "\n")
            heading = f"{name}\n\n" if several else ""
            typer.echo(f"{heading}{result.table()}\n{result.kv.describe()}\n{describe_vetoes(result)}")
            if not result.tested:
                typer.echo(result.kv.never_sparse(name, policy))
            typer.echo(f"{out}: {verdict(result)}")
            code = code if result.holds else 1
        return code


def describe_vetoes(result: Verification) -> str:
    """The share of vetoed rollouts, and a hint if it is or may be too large."""
    share, (lower, upper) = result.vetoed, result.vetoed.interval
    text = (
        f"vetoed rollouts (some token with p_dense / p_sparse < 1e-4): {share.count} of {share.of}, "
        f"{share.value:.1%} ({lower:.1%} to {upper:.1%})."
    )
    if result.too_many_vetoed:
        text += (
            f"\nThat is more than {TOO_MANY:.0%}: too many answers are spoilt, whatever the tail is; use a larger "
            "budget, or objective.correction=reroll."
        )
    elif upper > TOO_MANY and result.tested:
        text += f"\n{undecided(share)}"
    return text


def undecided(share: Share) -> str:
    """Hint for a share whose interval contains the limit."""
    prompts, needed = share.of // share.samples, share.prompts_to_tell_from(TOO_MANY)
    text = f"{prompts} prompts cannot rule out {TOO_MANY:.0%}, which is too many: "
    if needed is None or share.value > TOO_MANY:
        return f"{text}use a larger budget."
    unit = 10 ** max(len(str(needed)) - 2, 0)
    enough = -(-needed // unit) * unit
    return f"{text}measure with --prompts {enough}, which is enough if the share stays, or use a larger budget."


def verdict(result: Verification) -> str:
    """Whether tau holds in the bins that have enough prompts."""
    if not result.tested:
        return "nothing was tested, since the policy was never sparse."
    if result.tau is None:
        return "no tau was given, so the tail is not tested."
    width, tested = result.schedule.width, sum(bool(bin_.enough) for bin_ in result.tail)
    if result.violated:
        where = ", ".join(f"{j * width}-{(j + 1) * width}" for j in result.violated)
        return f"tau {result.tau:.4f} is violated at lengths {where}."
    bins = len(result.schedule.budgets)
    if tested == bins:
        return f"tau {result.tau:.4f} holds."
    if tested == 0:
        return f"tau {result.tau:.4f} is not tested: all {bins} bins have too few prompts; measure more with --prompts."
    return f"tau {result.tau:.4f} holds in {tested} of {bins} bins; the others have too few prompts."
