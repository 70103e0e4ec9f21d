"""The tail of acceptance during training: measured on a few rollouts of every step, logged, and held if told to.

The rollouts watched keep the hidden states that their tokens were sampled from; one dense pass over the same tokens
gives the other side, so α is exact, is that of the very policy that sampled, and costs a small share of the learner's
own scoring pass.

    monitor = Monitor(MonitorSettings(rollouts=8), sparsity, engine, max_length, control)
    requests = engine.requests(prompts, sampling, monitor.sparsity)
    monitor.watch(requests)
    found = monitor.step(list(engine.stream(requests)))     # metrics, events; monitor.sparsity is the next step's
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np

from alula.config.settings import ControlSettings, MonitorSettings
from alula.engine.engine import Engine
from alula.engine.rollout import Rollout
from alula.engine.sequence import Request
from alula.errors import SettingError, require
from alula.mismatch.calibrate.file import Kind
from alula.mismatch.control.control import Event, default_ladder
from alula.mismatch.control.controller import Controller
from alula.mismatch.measure import flat
from alula.mismatch.tail import Array, lower_quantile
from alula.sparsity.policy import Budget, Sparsity, smallest
from alula.sparsity.schedule import Schedule

PERCENTILES = (1, 5, 50)


@dataclass(frozen=True)
class Observed:
    metrics: dict[str, float] = field(default_factory=dict)
    events: tuple[str, ...] = ()
    """What the controller did or would have done, in words."""


class Monitor:
    """Watches one run's sparse policy. All ranks see all α and so come to the same schedule.

    `gather` gives every rank's value on every rank; `share` says how many of `count` things this rank does.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        sparsity: Sparsity,
        engine: Engine,
        max_length: int,
        control: ControlSettings | None = None,
        *,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        share: Callable[[int], int] = lambda count: count,
    ) -> None:
        self.settings, self.engine, self.gather = settings, engine, gather
        self.keep = 0 if sparsity.dense else share(settings.rollouts)
        self.base, self.kind = sparsity, controlled(sparsity)
        self.max_length = max_length
        self.schedule = schedule_of(budget_of(sparsity, self.kind), settings.bin, max_length)
        if control is not None and control.enabled:
            control = filled_in(control, sparsity, max_length)
        self.tau = self.schedule.notes.get("tau") if control is None or control.tau is None else control.tau
        self.controller: Controller | None = None
        if control is not None and control.enabled:
            require(
                settings.rollouts > 0 or control.tau is None,
                f"control.enabled=true with monitor.rollouts=0: there is no tail to hold at {control.tau}; watch some "
                "rollouts, or hold vetoes only (control.vetoed, with a budget that was not planned for a tau).",
            )
            require(
                control.on_violation != "dense" or sparsity.evict is None or sparsity.select is None,
                "control.on_violation=dense: with an evictor and a selector only one budget is controlled, and the "
                "other part would stay sparse; use adapt, warn or stop.",
            )
            self.controller = Controller(self.schedule, control, self.kind, max_length, settings.quantile)
        self._versions = {self.sparsity: 0}

    @property
    def sparsity(self) -> Sparsity:
        """The policy in force."""
        if self.controller is None:
            return self.base
        return with_budget(self.base, self.kind, self.controller.schedule)

    @property
    def densest(self) -> Sparsity:
        """The policy with the largest budget that the controller may come to."""
        if self.controller is None or self.kind == "select":  # a selector keeps all KV at any budget
            return self.sparsity
        budget = max(self.controller.schedule.budgets)
        tops = {"adapt": self.controller.ladder[-1], "dense": self.max_length}
        top = tops.get(self.controller.control.on_violation, 0)
        return with_budget(self.base, self.kind, top) if top > budget else self.sparsity

    @property
    def stopped(self) -> bool:
        """Whether the run should stop: the tail is below tau or vetoes are too many, and on_violation=stop."""
        return self.controller is not None and self.controller.stopped

    def move(self, sparsity: Sparsity) -> None:
        """From now on the run's policy is this one, which no controller changes."""
        self.base, self.kind = sparsity, controlled(sparsity)
        self.schedule = schedule_of(budget_of(sparsity, self.kind), self.settings.bin, self.max_length)
        self._versions = {sparsity: 0}

    def watch(self, requests: Sequence[Request]) -> None:
        """Have the first rollout of the first requests keep its hidden states; prompts come in random order."""
        for request in requests[: self.keep]:
            request.keep_hidden = 1

    def step(self, rollouts: Sequence[Rollout]) -> Observed:
        """Measure the rollouts that kept their hidden states, and free those. Every rank must call it."""
        if self.base.dense:
            return Observed()
        if not self.settings.rollouts:
            return Observed(self._schedule_metrics() if self.controller else {})
        mine = [r for r in rollouts if r.hidden is not None and len(r)]
        tokens = self._tokens(mine)
        for rollout in rollouts:
            rollout.hidden = None
        ranks = self.gather(tokens)
        prompts = np.concatenate([2**32 * rank + found[2] for rank, found in enumerate(ranks)])
        alpha, positions, version = (np.concatenate([found[i] for found in ranks]) for i in (0, 1, 3))
        if not len(alpha):
            return Observed(self._schedule_metrics())
        metrics = self._metrics(alpha, positions) | self._schedule_metrics()
        return Observed(metrics, tuple(self._control(alpha, positions, prompts, version)))

    def count_vetoes(self, rollouts: Sequence[Rollout], vetoed: Sequence[bool], n: int) -> list[str]:
        """Tell the controller which rollouts of this rank's step, `n` a prompt and side by side, were vetoed as they
        were sampled. Every rank must call it; what was done comes back in words."""
        if self.controller is None or self.controller.control.vetoed is None:
            return []
        versions = [self._versions.get(rollout.sparsity, -1) for rollout in rollouts[::n]]
        counts = np.asarray(vetoed, np.int64).reshape(-1, n).sum(1)
        ranks = self.gather((counts, np.asarray(versions, np.int64)))
        counts, version = (np.concatenate([found[i] for found in ranks]) for i in (0, 1))
        event = self.controller.observe_vetoes(counts, np.full(len(counts), n), version)
        self._versions[self.sparsity] = self.controller.version
        return [] if event is None else [event.describe(self.controller.control)]

    def _tokens(self, rollouts: list[Rollout]) -> tuple[Array, Array, Array, Array]:
        """α, position, prompt and schedule version of every token."""
        if not rollouts:
            return (np.empty(0, np.float32), *(np.empty(0, np.int64) for _ in range(3)))  # type: ignore[return-value]
        versions = [self._versions.get(r.sparsity, -1) for r in rollouts]
        return *flat(rollouts, self.engine.acceptance(rollouts)), np.repeat(versions, [len(r) for r in rollouts])

    def _metrics(self, alpha: Array, positions: Array) -> dict[str, float]:
        """Percentiles over all tokens, and the tail of every bin that has enough of them to have one."""
        quantile, width = self.settings.quantile, self.schedule.width
        metrics = {f"mismatch/alpha_p{p:02}": lower_quantile(alpha, p / 100) for p in PERCENTILES}
        metrics["mismatch/alpha_tokens"] = len(alpha)
        if self.tau is not None:
            metrics["mismatch/below_tau"] = float(np.mean(alpha < self.tau))
        where = np.minimum(positions // width, len(self.schedule.budgets) - 1)
        tails = {
            j: lower_quantile(alpha[where == j], quantile)
            for j in np.unique(where).tolist()
            if (where == j).sum() >= ceil(1 / quantile)
        }
        metrics |= {f"mismatch/tail/{j * width}": tail for j, tail in tails.items()}
        return metrics | ({"mismatch/tail": min(tails.values())} if tails else {})

    def _schedule_metrics(self) -> dict[str, float]:
        """The schedule in force: a budget per bin, from the one where it changes on."""
        budgets = self.controller.schedule.budgets if self.controller else self.schedule.budgets
        changes = [j for j, budget in enumerate(budgets) if j == 0 or budget != budgets[j - 1]]
        metrics: dict[str, float] = {f"schedule/budget/{j * self.schedule.width}": budgets[j] for j in changes}
        return metrics | ({"schedule/version": self.controller.version} if self.controller else {})

    def _control(self, alpha: Array, positions: Array, prompts: Array, version: Array) -> list[str]:
        if self.controller is None:
            return []
        events: list[Event] = self.controller.observe(alpha, positions, prompts, version)
        self._versions[self.sparsity] = self.controller.version
        control, quantile, width = self.controller.control, self.controller.quantile, self.controller.width
        return [event.describe(control, quantile, width) for event in events]

    def state_dict(self) -> dict[str, Any]:
        return {"controller": self.controller.state_dict() if self.controller else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; a controller that was switched on or off since starts, or ends, there."""
        if self.controller is not None and state["controller"] is not None:
            self.controller.load_state_dict(state["controller"])
            self.controller.stopped &= self.controller.control.on_violation == "stop"
            self._versions = {self.sparsity: self.controller.version}


def filled_in(control: ControlSettings, sparsity: Sparsity, max_length: int) -> ControlSettings:
    """`control` with the tau that the schedule was planned for and a ladder of budgets, where it names none.

    `max_length` is the longest sequence of the run.
    """
    budgets = [part.budget for part in (sparsity.select, sparsity.evict) if part is not None]
    require(len(budgets) > 0, "control.enabled=true, but the rollouts are dense; set a sparsity.")
    planned = [b.notes["tau"] for b in budgets if isinstance(b, Schedule) and "tau" in b.notes]
    tau = control.tau if control.tau is not None else next(iter(planned), None)
    require(
        tau is not None or control.vetoed is not None,
        "control.enabled=true needs control.tau, as this budget was not planned for one, or control.vetoed.",
    )
    kind = controlled(sparsity)
    for rung in control.ladder or ():
        try:
            with_budget(sparsity, kind, rung)
        except SettingError as error:
            raise SettingError(f"control.ladder={list(control.ladder or ())}: {error}") from error
    start = budget_of(sparsity, kind)
    assert start is not None
    block = sparsity.select.block if sparsity.select and kind == "select" else 1
    ladder = control.ladder or default_ladder(smallest(start), max_length, block)
    return control.model_copy(update={"tau": tau, "ladder": ladder})


def controlled(sparsity: Sparsity) -> Kind:
    """Which part's budget is watched: the one with a schedule, of two the selector's."""
    if sparsity.select is None:
        return "evict"
    evicts_by_schedule = sparsity.evict is not None and isinstance(sparsity.evict.budget, Schedule)
    return "evict" if evicts_by_schedule and not isinstance(sparsity.select.budget, Schedule) else "select"


def budget_of(sparsity: Sparsity, kind: Kind) -> Budget | None:
    part = sparsity.select if kind == "select" else sparsity.evict
    return None if part is None else part.budget


def schedule_of(budget: Budget | None, width: int | None, max_length: int) -> Schedule:
    """The schedule, or a fixed budget as one, with bins up to the longest sequence."""
    if isinstance(budget, Schedule):
        return budget
    width = width or min(2000, ceil(max_length / 8))
    return Schedule((budget or max_length,) * ceil(max_length / width), width, f"fixed-{budget}")


def with_budget(sparsity: Sparsity, kind: Kind, budget: Budget) -> Sparsity:
    if kind == "select":
        assert sparsity.select is not None
        return replace(sparsity, select=replace(sparsity.select, budget=budget))
    e = sparsity.evict
    assert e is not None
    evict = type(e)(
        e.method,
        budget,
        buffer=e.buffer,
        window=e.window,
        sinks=e.sinks,
        protect_prompt=e.protect_prompt,
        **dict(e.options),
    )
    return replace(sparsity, evict=evict)
