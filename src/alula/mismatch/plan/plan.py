"""The cheapest schedule whose tail of acceptance is confidently above a threshold at every length."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alula.errors import SettingError, require
from alula.mismatch.calibrate.file import Calibration, GrowingSchedule, MeasuredPolicy
from alula.mismatch.plan.cost import CostModel, GenerationCost, generation_cost, largest_batch
from alula.mismatch.tail import MIN_PROMPTS, BinTail
from alula.sparsity.family import PolicyFamily
from alula.sparsity.footprint import footprint
from alula.sparsity.policy import DENSE, Sparsity, describe
from alula.sparsity.schedule import Schedule

Array = NDArray[Any]

GAP = 0.085
"""Default distance of tau below the dense floor: Sparrow's tau is 0.86, its dense floor about 0.945."""


class Infeasible(SettingError):
    """No schedule reaches the threshold. `reachable` is the largest threshold that some schedule reaches."""

    def __init__(self, message: str, reachable: float) -> None:
        super().__init__(message)
        self.reachable = reachable


@dataclass(frozen=True)
class Workload:
    """The generation to plan for: rows of `new_tokens` each. Set either the batch or the memory for its KV."""

    new_tokens: int
    prompt: int = 0
    batch: int | None = None
    kv_bytes: float | None = None

    def __post_init__(self) -> None:
        require(self.new_tokens >= 1, f"new_tokens={self.new_tokens}: must be at least 1.")
        require((self.batch is None) != (self.kv_bytes is None), "workload: set either batch or kv_bytes.")

    def rows(self, cost: CostModel, sparsity: Sparsity) -> int:
        if self.batch is not None:
            return self.batch
        assert self.kv_bytes is not None
        return largest_batch(cost, sparsity, kv_bytes=self.kv_bytes, prompt=self.prompt, new_tokens=self.new_tokens)

    def run(self, cost: CostModel, sparsity: Sparsity) -> GenerationCost:
        rows = self.rows(cost, sparsity)
        return generation_cost(cost, sparsity, batch=rows, prompt=self.prompt, new_tokens=self.new_tokens)


@dataclass(frozen=True)
class PlannedBin:
    start: int
    budget: int
    tail: BinTail | None
    """The chosen policy's tail in this bin; None if the bin inherits its neighbour's budget."""


@dataclass(frozen=True)
class Plan:
    schedule: Schedule
    family: PolicyFamily
    tau: float
    floor: float
    bins: tuple[PlannedBin, ...]
    dense: GenerationCost
    sparse: GenerationCost
    alternatives: tuple[tuple[str, str], ...] = ()
    """The other families, each with its speed-up or the threshold that it reaches."""
    warnings: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        return self.sparse.tokens_per_second / self.dense.tokens_per_second


def default_tau(calibration: Calibration) -> float:
    return calibration.floor.overall - GAP


def plan(
    calibration: Calibration, cost: CostModel, workload: Workload, *, tau: float | None = None, name: str = "planned"
) -> Plan:
    """The cheapest schedule whose lower confidence bound is ≥ tau in every bin; budgets never fall with length.

    A schedule varies the budget only, so each family (method, page size, ...) is planned separately and the fastest
    plan wins. An evictor gets one budget for all lengths, since tails were measured under fixed budgets and evicted
    tokens do not return. Growing schedules from the calibration compete if their threshold is at least tau.
    """
    threshold = default_tau(calibration) if tau is None else tau
    require(0 < threshold < 1, f"tau={threshold:.3f}: must be between 0 and 1.")
    require(len(calibration.measured) > 0, "calibration: it contains no measured policy; run `alula calibrate`.")
    calibration = sparse_part(calibration)
    plans, infeasible = [], []
    for family in calibration.families().values():
        try:
            plans.append(_plan_family(calibration, family, cost, workload, threshold, name))
        except Infeasible as error:
            infeasible.append((family[0].family.describe(), error))
    plans += [_plan_growing(calibration, f, cost, workload, name) for f in calibration.growing if f.tau >= threshold]
    if not plans:
        raise max((error for _, error in infeasible), key=lambda error: error.reachable)
    best = max(plans, key=lambda p: p.speedup)
    alternatives = [(p.family.describe(), f"{p.speedup:.2f}x") for p in plans if p is not best]
    alternatives += [(family, f"reaches {error.reachable:.3f}") for family, error in infeasible]
    return Plan(**{**vars(best), "alternatives": tuple(dict.fromkeys(alternatives))})


def sparse_part(calibration: Calibration) -> Calibration:
    """The calibration without policies that were never sparse: their tail is the dense policy's, so it proves nothing.
    Raises if none is left."""
    sparse = [measured for measured in calibration.measured if measured.kv.sparse]
    if not sparse:
        least = min(calibration.measured, key=lambda measured: measured.budget)
        raise SettingError(
            f"calibration of {calibration.model}: {least.kv.never_sparse(least.policy.describe(), least.policy)} "
            "Otherwise train densely."
        )
    families = {measured.family for measured in sparse}
    growing = tuple(schedule for schedule in calibration.growing if schedule.family in families)
    return replace(calibration, measured=tuple(sparse), growing=growing)


def _plan_family(
    calibration: Calibration, family: list[MeasuredPolicy], cost: CostModel, workload: Workload, tau: float, name: str
) -> Plan:
    lower = np.stack([np.where(m.tail.enough, m.tail.lower, -np.inf) for m in family], 1)
    source = inherit_from(np.isfinite(lower).any(1))
    trusted = np.unique(source)
    ms = np.zeros((calibration.bins, len(family)))
    np.add.at(ms, source, np.stack([_ms_per_bin(calibration, m.policy, cost, workload) for m in family], 1))
    growing = family[0].family.kind == "select"
    if growing:
        chosen = cheapest_monotone(np.where(lower >= tau, ms, np.inf)[trusted])
    else:
        total = np.where((lower[trusted] >= tau).all(0), ms.sum(0), np.inf)
        chosen = [int(total.argmin())] * len(trusted) if np.isfinite(total).any() else None
    if chosen is None:
        raise _infeasible(calibration, family, lower, trusted, tau, growing)
    rung = dict(zip(trusted.tolist(), chosen))
    bins = tuple(
        PlannedBin(
            j * calibration.width,
            family[rung[i]].budget,
            family[rung[i]].tail[j] if i == j else None,
        )
        for j, i in enumerate(source.tolist())
    )
    return build_plan(calibration, family[0].family, bins, cost, workload, tau, name)


def _plan_growing(
    calibration: Calibration, growing: GrowingSchedule, cost: CostModel, workload: Workload, name: str
) -> Plan:
    steps = enumerate(zip(growing.budgets, growing.tails))
    bins = tuple(PlannedBin(j * calibration.width, budget, tail) for j, (budget, tail) in steps)
    return build_plan(calibration, growing.family, bins, cost, workload, growing.tau, name)


def build_plan(
    calibration: Calibration,
    family: PolicyFamily,
    bins: tuple[PlannedBin, ...],
    cost: CostModel,
    workload: Workload,
    tau: float,
    name: str = "planned",
) -> Plan:
    """A plan with the chosen budgets. Its schedule is bound to model, method, page size and settings."""
    budgets = tuple(planned.budget for planned in bins)
    evict = family.template.evict
    other_part = {"select": "none"}
    if family.kind == "select":
        other_part = {"evict": describe(evict, full=True) if evict else "none"}
    inherited = [j for j, planned in enumerate(bins) if planned.tail is None]
    notes = {
        "tau": round(tau, 6),
        "floor": round(calibration.floor.overall, 6),
        "quantile": calibration.quantile,
        "confidence": calibration.floor.confidence,
        "options": family.part.settings,
        "beside": other_part,
        "inherited_bins": inherited,
    }
    schedule = Schedule(budgets, calibration.width, name, calibration.model, family.method, family.block, notes)
    dense, sparse = workload.run(cost, DENSE), workload.run(cost, family.policy(schedule))
    warnings = []
    trusted = [j for j in range(len(bins)) if j not in inherited]
    thin = [j for j in inherited if j < trusted[-1]]
    if thin:
        where = ", ".join(f"{bins[j].start}-{bins[j].start + calibration.width}" for j in thin)
        warnings.append(f"lengths {where}: fewer than {MIN_PROMPTS} prompts, so the neighbouring bin's budget is used.")
    if trusted[-1] + 1 < len(bins):
        warnings.append(
            f"lengths from {bins[trusted[-1] + 1].start} on: fewer than {MIN_PROMPTS} prompts, so the last measured "
            "budget continues untested; calibrate on more prompts, or on prompts with longer answers."
        )
    if (last := workload.prompt + workload.new_tokens) > calibration.bins * calibration.width:
        warnings.append(f"lengths {calibration.bins * calibration.width}-{last} were not measured.")
    return Plan(schedule, family, tau, calibration.floor.overall, bins, dense, sparse, warnings=tuple(warnings))


def inherit_from(trusted: Array) -> Array:
    """The index of the bin whose budget each bin takes: itself if trusted, else the neighbour with the larger budget.

    Budgets grow with length, so that is the next trusted bin, or the last trusted bin if there is no next one.
    """
    sources = np.flatnonzero(trusted)
    require(
        len(sources) > 0,
        f"calibration: no bin has {MIN_PROMPTS} prompts, so no tail can be trusted; calibrate with more prompts.",
    )
    return sources[np.minimum(np.searchsorted(sources, np.arange(len(trusted))), len(sources) - 1)]


def cheapest_monotone(cost: Array) -> list[int] | None:
    """Non-decreasing choices k_0 ≤ k_1 ≤ … minimising Σ_j cost[j, k_j]; None if all are infinite.

    Dynamic programming; ties go to the smaller budgets.
    """
    total, came_from = cost[0], []
    for row in cost[1:]:
        before = np.minimum.accumulate(total)
        first = np.array([int(np.flatnonzero(total[: k + 1] == before[k])[0]) for k in range(len(total))])
        came_from.append(first)
        total = before + row
    if not np.isfinite(total).any():
        return None
    chosen = [int(total.argmin())]
    for first in reversed(came_from):
        chosen.append(int(first[chosen[-1]]))
    return chosen[::-1]


def reachable_tau(lower: Array, growing: bool) -> float:
    """The largest threshold that a non-decreasing (for an evictor: constant) choice of budgets reaches in every bin."""
    if not growing:
        return float(lower.min(0).max())
    passed = lower[0]
    for row in lower[1:]:
        passed = np.minimum(np.maximum.accumulate(passed), row)
    return float(passed.max())


def _infeasible(
    calibration: Calibration, family: list[MeasuredPolicy], lower: Array, trusted: Array, tau: float, growing: bool
) -> Infeasible:
    reach = reachable_tau(lower[trusted], growing)
    worst = int(trusted[lower[trusted].max(1).argmin()])
    best = family[int(lower[worst].argmax())]
    n = digits(tau, [reach])
    return Infeasible(
        f"tau={tau:.{n}f} is out of reach of {best.family.describe()}: the best reachable is {reach:.{n}f}, and "
        f"the tightest bin is {worst * calibration.width}-{(worst + 1) * calibration.width}, where budget "
        f"{best.budget} has a tail of {best.tail.value[worst]:.{n}f} with lower bound "
        f"{lower[worst].max():.{n}f} (dense floor {calibration.floor.overall:.{n}f}); lower tau, or calibrate larger "
        "budgets or more prompts.",
        reach,
    )


def digits(value: float, others: Iterable[float]) -> int:
    """Decimals, at least three, that tell `value` from the others."""
    apart = [gap for other in others if math.isfinite(gap := abs(value - other)) and gap > 0]
    return max(3, math.ceil(-math.log10(min(apart)))) if apart else 3


def _ms_per_bin(calibration: Calibration, policy: Sparsity, cost: CostModel, workload: Workload) -> Array:
    """Milliseconds that a generation under one budget spends in each bin, at the dense policy's batch size."""
    per_step = footprint(policy, workload.prompt, workload.new_tokens, cost.geometry.layers)
    ms = cost.step_ms(workload.rows(cost, DENSE), per_step.read, per_step.scored, per_step.moved)
    lengths = np.arange(workload.prompt, workload.prompt + workload.new_tokens)
    return np.bincount(
        np.minimum(lengths // calibration.width, calibration.bins - 1), weights=ms, minlength=calibration.bins
    )
