"""Calibration: measures the tail of acceptance of a grid of sparse policies.

    prompts ─► dense text and its floor ─► budget search per family ─► growing schedules of evictors ─► file

Every policy is measured on one text of the dense policy, or on rollouts of its own. The floor is the dense policy's own
tail: its decoding, which sampled the text, compared with the packed pass over it.

A work file holds all measurements. An interrupted calibration continues from it, and one with further budgets or
methods measures only those.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from alula.engine.engine import Engine
from alula.engine.rollout import Sampling
from alula.errors import require
from alula.mismatch.calibrate.cache import CalibrationCache
from alula.mismatch.calibrate.file import Calibration, GrowingSchedule, MeasuredPolicy
from alula.mismatch.calibrate.search import next_budgets, spread
from alula.mismatch.measure import Bins, cut_to_bin, measure_tails, policies_per_batch, rollouts_with_acceptance
from alula.mismatch.plan.evictor_schedule import grow_schedule
from alula.mismatch.plan.plan import GAP, Infeasible
from alula.mismatch.savings import Savings
from alula.mismatch.tail import MIN_PROMPTS, BinTail
from alula.sparsity.family import PolicyFamily
from alula.sparsity.policy import DENSE
from alula.sparsity.schedule import Schedule

Log = Callable[[str], None]


@dataclass(frozen=True)
class Grid:
    """The policies to measure: families and the budgets of each."""

    families: tuple[PolicyFamily, ...]
    budgets: tuple[int, ...]
    taus: tuple[float, ...] = ()
    """Thresholds to search for; by default the dense floor − 0.085."""
    sweep: bool = False
    """Measure every budget, not only those that could change a plan."""
    growing: bool = True
    """Also build a growing schedule for every evictor."""

    def __post_init__(self) -> None:
        require(len(self.families) > 0, "methods: give at least one selector or evictor.")
        require(len(self.budgets) > 0, "budgets: give at least one.")
        object.__setattr__(self, "budgets", tuple(sorted(set(self.budgets))))
        for family in self.families:
            family.policy(self.budgets[0])  # raises if the method does not allow this budget


@dataclass(frozen=True)
class TextSettings:
    """Prompts and sampling settings of the rollouts to measure on, up to `length` tokens each, prompt included."""

    prompts: tuple[tuple[int, ...], ...]
    length: int
    samples: int = 1
    temperature: float = 1.0
    seed: int = 0
    own: bool = False
    """Whether a calibration measures each policy on its own rollouts instead of the dense policy's."""

    def __post_init__(self) -> None:
        require(
            len(self.prompts) >= MIN_PROMPTS,
            f"prompts={len(self.prompts)}: a bin with fewer than {MIN_PROMPTS} prompts is not trusted; use more.",
        )
        longest = max(map(len, self.prompts))
        require(
            self.length > longest,
            f"length={self.length}: the longest prompt has {longest} tokens; use a larger length.",
        )
        require(self.temperature > 0, f"temperature={self.temperature}: must be above 0.")

    @property
    def sampling(self) -> Sampling:
        room = self.length - max(map(len, self.prompts))
        return Sampling(n=self.samples, max_new_tokens=room, temperature=self.temperature, seed=self.seed)


def calibrate(
    engine_with: Callable[[int], Engine],
    text: TextSettings,
    grid: Grid,
    bins: Bins,
    work_file: Path,
    *,
    log: Log = lambda line: None,
    progress: bool = False,
) -> Calibration:
    """Measure the grid. `engine_with(page)` returns an engine with pages of that many tokens."""
    pages = {family.block for family in grid.families if family.block} or {16}
    engine = engine_with(min(pages))
    cache = CalibrationCache.open(work_file, engine, text, bins)
    if cache.floor is None:
        log(f"dense text: {len(text.prompts) * text.samples} rollouts of up to {text.length} tokens")
        rollouts, alphas, _ = rollouts_with_acceptance(engine, text.prompts, text.sampling, DENSE, progress=progress)
        cache.add_text(rollouts, bins.tail(rollouts, alphas))
    assert cache.floor is not None
    require(
        bool(cache.floor.enough.any()),
        f"bin={bins.width}: no bin has rollouts of {MIN_PROMPTS} prompts; use more prompts or wider bins.",
    )
    taus = grid.taus or (cache.floor.overall - GAP,)
    log(f"dense floor {cache.floor.overall:.4f}; searching for {', '.join(f'tau {tau:.4f}' for tau in taus)}")
    growing, notes = [], {"shape": asdict(engine.geometry), **cache.notes()}
    calibrator = Calibrator(text, grid, taus, cache, bins, log, progress)
    for family in sorted(grid.families, key=lambda family: (family.block or min(pages), family.kind)):
        engine = engine_with(family.block or engine.page)
        calibrator.search(engine, family)
        if family.kind == "evict" and grid.growing:
            growing += calibrator.grow_schedules(engine, family)
    measured = tuple(m for m in cache.measured.values() if m.family in grid.families)
    return Calibration(engine.name, cache.floor, measured, text.temperature, notes, tuple(growing))


@dataclass(frozen=True)
class Calibrator:
    """Measures one family after the other, and keeps the results in the work file."""

    text: TextSettings
    grid: Grid
    taus: Sequence[float]
    cache: CalibrationCache
    bins: Bins
    log: Log
    progress: bool

    def search(self, engine: Engine, family: PolicyFamily) -> None:
        """Measure budgets of one family, several in one batch, until no other budget could change a plan."""
        cache, grid = self.cache, self.grid
        together = 1 if self.text.own else policies_per_batch(engine, cache.rollouts, family.evicts)
        while True:
            known = {m.budget: m.tail for m in cache.measured.values() if m.family == family}
            known = {budget: tail for budget, tail in known.items() if budget in grid.budgets}
            budgets = next_budgets(grid.budgets, known, self.taus, together, sweep=grid.sweep)
            if not budgets:
                return
            self.log(f"{family.describe()}: budgets {', '.join(map(str, budgets))}")
            if self.text.own:
                for budget in budgets:
                    self._measure_own(engine, family, budget)
                continue
            measure_tails(
                engine,
                cache.rollouts,
                [family.policy(budget) for budget in budgets],
                self.bins,
                progress=self.progress,
                done=lambda i, tail, kv, budgets=budgets: cache.add_policy(  # type: ignore[misc]
                    MeasuredPolicy(family, budgets[i], tail, kv)
                ),
            )

    def _measure_own(self, engine: Engine, family: PolicyFamily, budget: int) -> None:
        """Measure a budget on rollouts that it samples."""
        text, policy = self.text, family.policy(budget)
        rollouts, alphas, _ = rollouts_with_acceptance(
            engine, text.prompts, text.sampling, policy, progress=self.progress
        )
        kv = Savings.of(rollouts, [r.kv for r in rollouts], policy, engine.geometry.layers)
        self.cache.add_policy(MeasuredPolicy(family, budget, self.bins.tail(rollouts, alphas), kv))

    def grow_schedules(self, engine: Engine, family: PolicyFamily) -> list[GrowingSchedule]:
        """A growing schedule of an evictor for every threshold that it can reach."""
        schedules = []
        bins, budgets = self.bins, self.grid.budgets
        measure_bin = MeasureBin(engine, family, self.text, budgets, self.cache, bins, self.progress)
        for tau in self.taus:
            self.log(f"{family.describe()}: a growing schedule for tau {tau:.4f}")
            try:
                planned = grow_schedule(measure_bin, budgets, bins=bins.count, width=bins.width, tau=tau)
            except Infeasible as error:
                self.log(str(error))
                continue
            tails = tuple(b.tail for b in planned)
            schedules.append(GrowingSchedule(family, tau, tuple(b.budget for b in planned), tails))
        return schedules


class MeasureBin:
    """Measures the tail of one bin for `grow_schedule`: under given budgets of the earlier bins and a candidate.

    The text is decoded, or sampled, up to the end of that bin. Of a dense text, larger candidates, which the search may
    need next, share the batch if there is room. Bins are measured separately, so their confidence is
    Bonferroni-corrected to hold in all bins.
    """

    def __init__(
        self,
        engine: Engine,
        family: PolicyFamily,
        text: TextSettings,
        budgets: Sequence[int],
        cache: CalibrationCache,
        bins: Bins,
        progress: bool,
    ) -> None:
        self.engine, self.family, self.budgets, self.cache = engine, family, budgets, cache
        self.text, self.bins, self.progress = text, bins, progress
        self.single = replace(bins, confidence=1 - (1 - bins.confidence) / bins.count)

    def __call__(self, before: tuple[int, ...], j: int, candidate: int) -> BinTail:
        if (known := self.cache.bin_tails.get(self.key(before, j, candidate))) is not None:
            return known
        last = self.bins.width * (j + 1) if j + 1 < self.bins.count else 1 << 60
        if self.text.own:
            return self.keep(before, j, candidate, self.of_own_rollouts((*before, candidate), j, last))
        text = cut_to_bin(self.cache.rollouts, self.bins.width * j, last)
        if not text:
            return self.keep(before, j, candidate, BinTail(0.0, 0.0, 1.0, 0, 0))
        room = policies_per_batch(self.engine, text, evicts=True) - 1
        larger = [b for b in self.budgets if b > candidate and self.key(before, j, b) not in self.cache.bin_tails]
        probes = [candidate, *spread(larger, room)]
        schedules = [Schedule((*before, budget), self.bins.width) for budget in probes]
        policies = [self.family.policy(schedule) for schedule in schedules]
        tails = measure_tails(self.engine, text, policies, self.single, progress=self.progress)
        for budget, tail in zip(probes, tails):
            self.keep(before, j, budget, tail[j])
        return self.cache.bin_tails[self.key(before, j, candidate)]

    def of_own_rollouts(self, budgets: tuple[int, ...], j: int, last: int) -> BinTail:
        """The tail of bin j of rollouts that these budgets sample up to its end."""
        sampling, shortest = self.text.sampling, min(map(len, self.text.prompts))
        if last <= shortest:
            return BinTail(0.0, 0.0, 1.0, 0, 0)
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, last - shortest))
        policy = self.family.policy(Schedule(budgets, self.bins.width))
        rollouts, alphas, _ = rollouts_with_acceptance(
            self.engine, self.text.prompts, sampling, policy, progress=self.progress
        )
        return self.single.tail(rollouts, alphas)[j]

    def key(self, before: tuple[int, ...], j: int, candidate: int) -> str:
        """The key of this measurement in the work file."""
        return f"{self.family.describe(full=True)} {'-'.join(map(str, (*before, candidate)))} @{j}"

    def keep(self, before: tuple[int, ...], j: int, candidate: int, tail: BinTail) -> BinTail:
        self.cache.add_bin_tail(self.key(before, j, candidate), tail)
        return tail
