"""Verifies a policy on rollouts that it samples itself: the text of a calibration comes from the dense policy.

Two criteria: the tail of acceptance in every bin (is the policy close to the dense one, token by token?) and the share
of vetoed rollouts (how many answers contain a token that the dense policy would not have sampled?).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alula.engine.engine import Engine
from alula.errors import SettingError, require
from alula.mismatch.calibrate.calibrate import TextSettings
from alula.mismatch.calibrate.file import tail_to_dict
from alula.mismatch.control.monitor import budget_of, controlled
from alula.mismatch.measure import Bins, rollouts_with_acceptance
from alula.mismatch.savings import Savings
from alula.mismatch.tail import MIN_PROMPTS, BinTail, Tail
from alula.objective.veto import TOO_MANY, Share
from alula.sparsity.evict import METHODS as EVICTORS
from alula.sparsity.policy import Evict, Select, Sparsity
from alula.sparsity.schedule import Schedule
from alula.sparsity.select import METHODS as SELECTORS


@dataclass(frozen=True)
class Verification:
    schedule: Schedule
    tau: float | None
    """None: the tail is reported but not tested."""
    tail: Tail
    vetoed: Share
    kv: Savings
    kv_dtype: str | None = None
    dense: bool = False
    """Whether the policy keeps and reads everything, so that `kv_dtype` alone was tested."""

    @property
    def tested(self) -> bool:
        return self.kv.sparse > 0 or (self.dense and self.kv_dtype is not None)

    @property
    def violated(self) -> list[int]:
        """Bins whose tail is confidently below tau: its simultaneous upper bound is."""
        tau = 0.0 if self.tau is None else self.tau
        return [j for j, bin_ in enumerate(self.tail) if bin_.enough and bin_.upper < tau]

    @property
    def too_many_vetoed(self) -> bool:
        """Confidently more than the share that a run warns about: the lower bound is above it."""
        return self.vetoed.interval[0] > TOO_MANY

    @property
    def holds(self) -> bool:
        """No criterion is violated, and something was tested: the policy was sparse in some rollout."""
        return not self.violated and not self.too_many_vetoed and self.tested

    def verdict(self, bin_: BinTail) -> str:
        if not self.tested:
            return "never sparse"
        if not bin_.enough:
            return f"fewer than {MIN_PROMPTS} prompts"
        if self.tau is None:
            return ""
        if bin_.upper < self.tau:
            return "below tau"
        return "above tau" if bin_.lower >= self.tau else "undecided"

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
        lower, upper = self.vetoed.interval
        return {
            "schedule": self.schedule.to_dict(),
            "tau": self.tau,
            "tail": tail_to_dict(self.tail),
            "violated": self.violated,
            "vetoed": {"rollouts": self.vetoed.count, "of": self.vetoed.of, "lower": lower, "upper": upper},
            "kv": asdict(self.kv),
            "kv_dtype": self.kv_dtype,
        }


def verify(
    engine: Engine,
    schedule: Schedule,
    policy: Sparsity,
    text: TextSettings,
    tau: float | None,
    *,
    quantile: float = 0.05,
    confidence: float = 0.95,
    progress: bool = False,
) -> Verification:
    """Sample rollouts from `policy` and measure them in the bins of its schedule."""
    rollouts, alphas, dense = rollouts_with_acceptance(engine, text.prompts, text.sampling, policy, progress=progress)
    bins = Bins(schedule.width, len(schedule.budgets), quantile, confidence)
    vetoed = Share.vetoed(rollouts, dense, text.samples)
    kv = Savings.of(rollouts, [r.kv for r in rollouts], policy, engine.geometry.layers)
    tail = bins.tail(rollouts, alphas)
    return Verification(schedule, tau, tail, vetoed, kv, engine.geometry.kv_dtype, policy.dense)


def parse_target(text: str, width: int, length: int, kv_dtype: str | None = None) -> tuple[Schedule, Sparsity]:
    """Schedule and policy of a `--verify` argument: a schedule file, a preset, or a policy such as `rkv:512+128`; with
    a `kv_dtype` also `dense`."""
    is_policy = ":" in text or text.strip() in ("dense", *EVICTORS, *SELECTORS)
    if not is_policy or Path(text).exists():
        schedule = Schedule.load(text)
        return schedule, policy_of(schedule)
    policy = Sparsity.parse(text)
    budget = budget_of(policy, controlled(policy))
    if budget is None and kv_dtype is None:
        raise SettingError("verify=dense: it is the reference; give a sparse policy, such as rkv:512+128.")
    if isinstance(budget, Schedule):
        return budget, policy
    return Schedule((budget or length,) * -(-length // width), width, text), policy


def policy_of(schedule: Schedule) -> Sparsity:
    """The policy that a schedule was planned for: its method with the settings in its notes."""
    if schedule.method is None:
        raise SettingError(f"schedule {schedule.name!r}: its file names no method; `alula plan` writes one that does.")
    require(
        schedule.method in SELECTORS or schedule.method in EVICTORS,
        f"schedule {schedule.name!r}: method={schedule.method!r} is neither a selector nor an evictor.",
    )
    options = dict(schedule.notes.get("options", {}))
    if schedule.method in EVICTORS:
        return Sparsity(evict=Evict(schedule.method, schedule, **options))
    evictor = schedule.notes.get("beside", {}).get("evict", "none")
    if schedule.block is not None:
        options["block"] = schedule.block
    return Sparsity(
        None if evictor == "none" else Sparsity.parse(evictor).evict, Select(schedule.method, schedule, **options)
    )
