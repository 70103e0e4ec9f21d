"""A schedule measured again on rollouts of its own: a trajectory under a fixed budget is not a scheduled one."""

from dataclasses import dataclass
from typing import Any

from alula.errors import SettingError, require
from alula.mismatch.calibration import Configuration, Kind, tail_to_dict
from alula.mismatch.tail import MIN_PROMPTS, Estimate, Tail
from alula.sparsity.evict import METHODS as EVICTORS
from alula.sparsity.policy import Sparsity
from alula.sparsity.schedule import Schedule
from alula.sparsity.select import METHODS as SELECTORS


@dataclass(frozen=True)
class Verification:
    schedule: Schedule
    tau: float
    tail: Tail

    @property
    def violated(self) -> list[int]:
        """Bins whose tail is confidently below tau: even its simultaneous upper bound is."""
        return [j for j, bin_ in enumerate(self.tail) if bin_.enough and bin_.upper < self.tau]

    def verdict(self, bin_: Estimate) -> str:
        if not bin_.enough:
            return f"fewer than {MIN_PROMPTS} prompts"
        if bin_.upper < self.tau:
            return "below tau"
        return "above tau" if bin_.lower >= self.tau else "not told apart from tau"

    def table(self) -> str:
        band = f"{100 * self.tail.confidence:g}% band"
        lines = [
            f"| length | budget | tail | {band} | prompts | tokens | verdict |",
            "|---:|---:|---:|---|---:|---:|---|",
        ]
        for j, (budget, bin_) in enumerate(zip(self.schedule.budgets, self.tail)):
            start = j * self.schedule.width
            where = f"{start}-{start + self.schedule.width}"
            numbers = f"{bin_.value:.4f} | {bin_.lower:.4f}-{bin_.upper:.4f}" if bin_.tokens else "|"
            lines.append(f"| {where} | {budget} | {numbers} | {bin_.prompts} | {bin_.tokens} | {self.verdict(bin_)} |")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.to_dict(),
            "tau": self.tau,
            "tail": tail_to_dict(self.tail),
            "violated": self.violated,
        }


def policy_of(schedule: Schedule) -> Sparsity:
    """The policy that a planned schedule was made for: its method with the settings in its notes."""
    if schedule.method is None:
        raise SettingError(f"schedule {schedule.name!r} names no method; plan it with `alula plan`.")
    require(
        schedule.method in SELECTORS or schedule.method in EVICTORS,
        f"schedule {schedule.name!r}: its method {schedule.method!r} is neither a selector nor an evictor.",
    )
    kind: Kind = "select" if schedule.method in SELECTORS else "evict"
    options = dict(schedule.notes.get("options", {}))
    beside = schedule.notes.get("beside", {}).get("evict", "none")
    if beside != "none":
        options["evict"] = beside
    if kind == "select" and schedule.block is not None:
        options["block"] = schedule.block
    return Configuration(kind, schedule.method, max(schedule.budgets), tuple(options.items())).sparsity(schedule)
