"""The cheapest schedule whose tail of acceptance is confidently above a threshold at every length."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alula.errors import SettingError, require
from alula.mismatch.calibrate.file import Calibration, Forward, Measured
from alula.mismatch.plan.cost import Cost, Generation, generation, largest_batch
from alula.mismatch.tail import MIN_PROMPTS, Estimate
from alula.sparsity.family import PolicyFamily
from alula.sparsity.footprint import footprint
from alula.sparsity.policy import DENSE, Sparsity, describe
from alula.sparsity.schedule import Schedule

Array = NDArray[Any]

GAP = 0.085
"""Sparrow's threshold 0.86 below its own dense floor of about 0.945."""


class Infeasible(SettingError):
    """No schedule reaches the threshold. `reachable` is the largest one that some schedule reaches."""

    def __init__(self, message: str, reachable: float) -> None:
        super().__init__(message)
        self.reachable = reachable


@dataclass(frozen=True)
class Workload:
    """What is generated: rows in step, all `new_tokens` long. The batch is given, or the memory for its KV."""

    new_tokens: int
    prompt: int = 0
    batch: int | None = None
    kv_bytes: float | None = None

    def __post_init__(self) -> None:
        require(self.new_tokens >= 1, f"new_tokens={self.new_tokens}: must be at least 1.")
        require((self.batch is None) != (self.kv_bytes is None), "workload: give either batch or kv_bytes.")

    def rows(self, cost: Cost, sparsity: Sparsity) -> int:
        if self.batch is not None:
            return self.batch
        assert self.kv_bytes is not None
        return largest_batch(cost, sparsity, kv_bytes=self.kv_bytes, prompt=self.prompt, new_tokens=self.new_tokens)

    def run(self, cost: Cost, sparsity: Sparsity) -> Generation:
        rows = self.rows(cost, sparsity)
        return generation(cost, sparsity, batch=rows, prompt=self.prompt, new_tokens=self.new_tokens)


@dataclass(frozen=True)
class PlannedBin:
    start: int
    budget: int
    tail: Estimate | None
    """Of the chosen configuration in this bin; None where the bin inherits its neighbour's budget."""


@dataclass(frozen=True)
class Plan:
    schedule: Schedule
    family: PolicyFamily
    tau: float
    floor: float
    bins: tuple[PlannedBin, ...]
    dense: Generation
    sparse: Generation
    rivals: tuple[tuple[str, str], ...] = ()
    """Every other family, and why it was not taken."""
    warnings: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        return self.sparse.tokens_per_second / self.dense.tokens_per_second


def default_tau(calibration: Calibration) -> float:
    return calibration.floor.overall - GAP


def plan(
    calibration: Calibration, cost: Cost, workload: Workload, *, tau: float | None = None, name: str = "planned"
) -> Plan:
    """In every bin the cheapest configuration whose tail's lower confidence bound is ≥ tau, growing with length.

    A schedule varies the budget only, so each family of configurations (method, page size, ...) is planned by
    itself and the fastest one wins. A family of evictors gets one budget for all lengths, since that is what
    was measured: what an earlier, smaller budget evicts is gone. Growing schedules of evictors that `plan_forward`
    built for this threshold or a higher one compete as they are.
    """
    threshold = default_tau(calibration) if tau is None else tau
    require(0 < threshold < 1, f"tau={threshold:.3f}: must lie between 0 and 1.")
    require(len(calibration.measured) > 0, "calibration: it holds no configuration; run `alula calibrate`.")
    plans, refused = [], []
    for family in calibration.families().values():
        try:
            plans.append(_plan_family(calibration, family, cost, workload, threshold, name))
        except Infeasible as error:
            refused.append((family[0].family.describe(), error))
    plans += [_planned_forward(calibration, f, cost, workload, name) for f in calibration.forward if f.tau >= threshold]
    if not plans:
        raise max((error for _, error in refused), key=lambda error: error.reachable)
    best = max(plans, key=lambda p: p.speedup)
    rivals = [(p.family.describe(), f"{p.speedup:.2f}x") for p in plans if p is not best]
    rivals += [(family, f"reaches {error.reachable:.3f}") for family, error in refused]
    return Plan(**{**vars(best), "rivals": tuple(dict.fromkeys(rivals))})


def _plan_family(
    calibration: Calibration, family: list[Measured], cost: Cost, workload: Workload, tau: float, name: str
) -> Plan:
    lower = np.stack([np.where(m.tail.enough, m.tail.lower, -np.inf) for m in family], 1)
    owner = inherit_from(np.isfinite(lower).any(1))
    trusted = np.unique(owner)
    ms = np.zeros((calibration.bins, len(family)))
    np.add.at(ms, owner, np.stack([_ms_per_bin(calibration, m.policy, cost, workload) for m in family], 1))
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
            family[rung[own]].budget,
            family[rung[own]].tail[j] if own == j else None,
        )
        for j, own in enumerate(owner.tolist())
    )
    return assemble(calibration, family[0].family, bins, cost, workload, tau, name)


def _planned_forward(calibration: Calibration, forward: Forward, cost: Cost, workload: Workload, name: str) -> Plan:
    steps = enumerate(zip(forward.budgets, forward.tails))
    bins = tuple(PlannedBin(j * calibration.width, budget, tail) for j, (budget, tail) in steps)
    return assemble(calibration, forward.family, bins, cost, workload, forward.tau, name)


def assemble(
    calibration: Calibration,
    family: PolicyFamily,
    bins: tuple[PlannedBin, ...],
    cost: Cost,
    workload: Workload,
    tau: float,
    name: str = "planned",
) -> Plan:
    """A plan from chosen budgets, with its schedule bound to model, method and page size."""
    budgets = tuple(planned.budget for planned in bins)
    evict = family.template.evict
    beside = {"select": "none"}
    if family.kind == "select":
        beside = {"evict": describe(evict, full=True) if evict else "none"}
    inherited = [j for j, planned in enumerate(bins) if planned.tail is None]
    notes = {
        "tau": round(tau, 6),
        "floor": round(calibration.floor.overall, 6),
        "quantile": calibration.quantile,
        "confidence": calibration.floor.confidence,
        "options": family.part.settings,
        "beside": beside,
        "inherited_bins": inherited,
    }
    schedule = Schedule(budgets, calibration.width, name, calibration.model, family.method, family.block, notes)
    dense, sparse = workload.run(cost, DENSE), workload.run(cost, family.policy(schedule))
    warnings = []
    trusted = [j for j in range(len(bins)) if j not in inherited]
    thin = [j for j in inherited if j < trusted[-1]]
    if thin:
        where = ", ".join(f"{bins[j].start}-{bins[j].start + calibration.width}" for j in thin)
        warnings.append(f"lengths {where}: fewer than {MIN_PROMPTS} prompts, so the budget is the neighbour's.")
    if trusted[-1] + 1 < len(bins):
        warnings.append(
            f"lengths from {bins[trusted[-1] + 1].start} on: fewer than {MIN_PROMPTS} prompts got there, so the last "
            "proven budget goes on without proof; calibrate on more prompts, or on some that take longer."
        )
    if (last := workload.prompt + workload.new_tokens) > calibration.bins * calibration.width:
        warnings.append(f"lengths {calibration.bins * calibration.width}-{last} were not measured.")
    return Plan(schedule, family, tau, calibration.floor.overall, bins, dense, sparse, warnings=tuple(warnings))


def inherit_from(trusted: Array) -> Array:
    """For every bin the bin whose budget it takes: itself if trusted, else the neighbour with the larger budget.

    Budgets grow with length, so that is the next trusted bin, and past the last trusted one that one.
    """
    at = np.flatnonzero(trusted)
    require(
        len(at) > 0,
        f"calibration: no bin has {MIN_PROMPTS} prompts, so no tail can be trusted; calibrate with more prompts.",
    )
    return at[np.minimum(np.searchsorted(at, np.arange(len(trusted))), len(at) - 1)]


def cheapest_monotone(cost: Array) -> list[int] | None:
    """Non-decreasing choices k_0 ≤ k_1 ≤ … minimising Σ_j cost[j, k_j]; None if every one costs infinity.

    Dynamic programming; of equal totals the one with the smaller budgets.
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
    """The largest threshold that a non-decreasing (or, for an evictor, constant) choice passes in every bin."""
    if not growing:
        return float(lower.min(0).max())
    passed = lower[0]
    for row in lower[1:]:
        passed = np.minimum(np.maximum.accumulate(passed), row)
    return float(passed.max())


def _infeasible(
    calibration: Calibration, family: list[Measured], lower: Array, trusted: Array, tau: float, growing: bool
) -> Infeasible:
    reach = reachable_tau(lower[trusted], growing)
    worst = int(trusted[lower[trusted].max(1).argmin()])
    best = family[int(lower[worst].argmax())]
    return Infeasible(
        f"tau={tau:.3f} is out of reach of {best.family.describe()}: the best reachable is {reach:.3f}, and "
        f"the tightest bin is {worst * calibration.width}-{(worst + 1) * calibration.width}, where budget "
        f"{best.budget} has a tail of {best.tail.value[worst]:.3f} with lower bound "
        f"{lower[worst].max():.3f} (dense floor {calibration.floor.overall:.3f}); lower tau, or calibrate larger "
        "budgets or more prompts.",
        reach,
    )


def _ms_per_bin(calibration: Calibration, policy: Sparsity, cost: Cost, workload: Workload) -> Array:
    """Time that a whole generation under one budget spends in each bin, at the dense policy's batch."""
    per_step = footprint(policy, workload.prompt, workload.new_tokens, cost.geometry.layers)
    ms = cost.step_ms(workload.rows(cost, DENSE), per_step.read, per_step.scored, per_step.moved)
    lengths = np.arange(workload.prompt, workload.prompt + workload.new_tokens)
    return np.bincount(
        np.minimum(lengths // calibration.width, calibration.bins - 1), weights=ms, minlength=calibration.bins
    )
