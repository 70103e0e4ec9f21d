"""Calibrate: the tail of acceptance of a grid of sparse policies, on text that the dense policy wrote once.

    prompts ─► dense text and its floor ─► budgets of every family, searched ─► growing evictors ─► file

The floor is what the dense policy itself has: its decoding, that wrote the text, against the packed pass over it.

Everything measured so far is in a work file beside the result, so a killed calibration goes on where it was, and
one with further budgets or methods measures only those.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from alula.engine.engine import Engine
from alula.engine.rollout import Sampling
from alula.errors import require
from alula.mismatch.calibrate.cache import Work
from alula.mismatch.calibrate.file import Calibration, Forward, Measured
from alula.mismatch.calibrate.search import next_budgets, spread
from alula.mismatch.measure import Bins, cut, measure, own_rollouts, side_by_side
from alula.mismatch.plan.evictor_schedule import plan_forward
from alula.mismatch.plan.plan import GAP, Infeasible
from alula.mismatch.tail import MIN_PROMPTS, Estimate
from alula.sparsity.family import PolicyFamily
from alula.sparsity.policy import DENSE
from alula.sparsity.schedule import Schedule

Say = Callable[[str], None]


@dataclass(frozen=True)
class Grid:
    """What is measured: families of policies and the budgets of each."""

    families: tuple[PolicyFamily, ...]
    budgets: tuple[int, ...]
    taus: tuple[float, ...] = ()
    """Thresholds to search for; none: the dense floor − 0.085."""
    sweep: bool = False
    """Measure every budget, not only those that could matter to a plan."""
    forward: bool = True
    """Also build a growing schedule for every evictor."""

    def __post_init__(self) -> None:
        require(len(self.families) > 0, "methods: name at least one selector or evictor to calibrate.")
        require(len(self.budgets) > 0, "budgets: name at least one.")
        object.__setattr__(self, "budgets", tuple(sorted(set(self.budgets))))
        for family in self.families:
            family.policy(self.budgets[0])  # raises if the method cannot have such a budget


@dataclass(frozen=True)
class Text:
    """The text that everything is measured on: dense rollouts up to `length` tokens, prompt included."""

    prompts: tuple[tuple[int, ...], ...]
    length: int
    samples: int = 1
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            len(self.prompts) >= MIN_PROMPTS,
            f"prompts={len(self.prompts)}: a bin's tail is trusted from {MIN_PROMPTS} prompts on; give more.",
        )
        longest = max(map(len, self.prompts))
        require(self.length > longest, f"length={self.length}: the longest prompt alone has {longest} tokens.")
        require(self.temperature > 0, f"temperature={self.temperature}: must be above 0.")

    @property
    def sampling(self) -> Sampling:
        room = self.length - max(map(len, self.prompts))
        return Sampling(n=self.samples, max_new_tokens=room, temperature=self.temperature, seed=self.seed)


def calibrate(
    engine_with: Callable[[int], Engine],
    text: Text,
    grid: Grid,
    bins: Bins,
    work_file: Path,
    *,
    say: Say = lambda line: None,
    progress: bool = False,
) -> Calibration:
    """Measure the grid. `engine_with(page)` gives an engine whose pages hold that many tokens."""
    pages = {family.block for family in grid.families if family.block} or {16}
    engine = engine_with(min(pages))
    work = Work.open(work_file, engine, text, bins)
    if work.floor is None:
        say(f"dense text: {len(text.prompts) * text.samples} rollouts of up to {text.length} tokens")
        rollouts, alphas = own_rollouts(engine, text.prompts, text.sampling, DENSE, progress=progress)
        work.keep_text(rollouts, bins.tail(rollouts, alphas))
    assert work.floor is not None
    require(
        bool(work.floor.enough.any()),
        f"no bin of {bins.width} tokens is reached by {MIN_PROMPTS} prompts; give more prompts or wider bins.",
    )
    taus = grid.taus or (work.floor.overall - GAP,)
    say(f"dense floor {work.floor.overall:.4f}; searching for {', '.join(f'tau {tau:.4f}' for tau in taus)}")
    forward, notes = [], {"shape": asdict(engine.geometry), **work.notes()}
    for family in sorted(grid.families, key=lambda family: (family.block or min(pages), family.kind)):
        engine = engine_with(family.block or engine.page)
        search(engine, family, grid, taus, work, bins, say, progress)
        if family.kind == "evict" and grid.forward:
            forward += grow(engine, family, grid, taus, work, bins, say, progress)
    measured = tuple(m for m in work.measured.values() if m.family in grid.families)
    return Calibration(engine.name, work.floor, measured, text.temperature, notes, tuple(forward))


def search(
    engine: Engine,
    family: PolicyFamily,
    grid: Grid,
    taus: Sequence[float],
    work: Work,
    bins: Bins,
    say: Say,
    progress: bool,
) -> None:
    """Measure the budgets of one family, as many side by side as the engine holds, until no other could matter."""
    together = side_by_side(engine, work.rollouts, family.evicts)
    while True:
        known = {m.budget: m.tail for m in work.measured.values() if m.family == family}
        known = {budget: tail for budget, tail in known.items() if budget in grid.budgets}
        budgets = next_budgets(grid.budgets, known, taus, together, sweep=grid.sweep)
        if not budgets:
            return
        say(f"{family.describe()}: budgets {', '.join(map(str, budgets))}")
        measure(
            engine,
            work.rollouts,
            [family.policy(budget) for budget in budgets],
            bins,
            progress=progress,
            done=lambda i, tail, kv, budgets=budgets: work.keep(Measured(family, budgets[i], tail, kv)),  # type: ignore[misc]
        )


def grow(
    engine: Engine,
    family: PolicyFamily,
    grid: Grid,
    taus: Sequence[float],
    work: Work,
    bins: Bins,
    say: Say,
    progress: bool,
) -> list[Forward]:
    """A growing schedule for an evictor and every threshold that it can hold."""
    found = []
    measure_bin = ForwardMeasure(engine, family, grid.budgets, work, bins, progress)
    for tau in taus:
        say(f"{family.describe()}: a growing schedule for tau {tau:.4f}")
        try:
            planned = plan_forward(measure_bin, grid.budgets, bins=bins.count, width=bins.width, tau=tau)
        except Infeasible as error:
            say(str(error))
            continue
        budgets, tails = tuple(b.budget for b in planned), tuple(b.tail for b in planned)
        found.append(Forward(family, tau, budgets, tails))
    return found


class ForwardMeasure:
    """The tail in one bin under a schedule so far, for `plan_forward`.

    The text is decoded up to the end of that bin under the earlier budgets and the candidate; larger candidates,
    which the search may ask for next, run beside it where there is room. The bands of the single bins hold in all
    bins together (Bonferroni), as each bin is measured in a run of its own.
    """

    def __init__(
        self, engine: Engine, family: PolicyFamily, budgets: Sequence[int], work: Work, bins: Bins, progress: bool
    ) -> None:
        self.engine, self.family, self.budgets, self.work = engine, family, budgets, work
        self.bins, self.progress = bins, progress
        self.single = replace(bins, confidence=1 - (1 - bins.confidence) / bins.count)

    def __call__(self, before: tuple[int, ...], j: int, candidate: int) -> Estimate:
        if (found := self.work.forward.get(self.key(before, j, candidate))) is not None:
            return found
        last = self.bins.width * (j + 1) if j + 1 < self.bins.count else 1 << 60
        text = cut(self.work.rollouts, self.bins.width * j, last)
        if not text:
            return self.keep(before, j, candidate, Estimate(0.0, 0.0, 1.0, 0, 0))
        room = side_by_side(self.engine, text, evicts=True) - 1
        larger = [b for b in self.budgets if b > candidate and self.key(before, j, b) not in self.work.forward]
        probes = [candidate, *spread(larger, room)]
        schedules = [Schedule((*before, budget), self.bins.width) for budget in probes]
        policies = [self.family.policy(schedule) for schedule in schedules]
        tails = measure(self.engine, text, policies, self.single, progress=self.progress)
        for budget, tail in zip(probes, tails):
            self.keep(before, j, budget, tail[j])
        return self.work.forward[self.key(before, j, candidate)]

    def key(self, before: tuple[int, ...], j: int, candidate: int) -> str:
        """The name of this measurement in the work file."""
        return f"{self.family.describe(full=True)} {'-'.join(map(str, (*before, candidate)))} @{j}"

    def keep(self, before: tuple[int, ...], j: int, candidate: int, tail: Estimate) -> Estimate:
        self.work.keep_forward(self.key(before, j, candidate), tail)
        return tail
