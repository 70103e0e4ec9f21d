"""The monitor: measures the tail of acceptance on a few rollouts of every step and asks the controller for budgets.

The watched rollouts keep the hidden states that their tokens were sampled from. One dense pass over the same tokens
gives the other distribution, so α is exact, belongs to the policy that sampled, and costs a small share of the
learner's scoring pass.

    monitor = Monitor(MonitorSettings(rollouts=8), sparsity, engine.acceptance, max_length, control)
    rollouts = engine.generate(prompts, sampling, sparsity, keep_hidden=monitor.keep_hidden(range(len(prompts))))
    observed = monitor.step(rollouts)     # metrics, events, and the policy to use from now on
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
from torch import Tensor

from alula.engine.rollout import Rollout
from alula.errors import require
from alula.mismatch.control.controller import BudgetController, default_ladder
from alula.mismatch.measure import flat
from alula.mismatch.tail import Array, lower_quantile
from alula.settings import ControlSettings, MonitorSettings
from alula.sparsity.policy import Budget, Kind, Select, Sparsity, describe, smallest
from alula.sparsity.schedule import Schedule

PERCENTILES = (1, 5, 50)
Acceptance = Callable[[Sequence[Rollout]], list[Tensor]]
"""α of rollouts that kept their hidden states, such as `Engine.acceptance`."""


@dataclass(frozen=True)
class Observation:
    metrics: dict[str, float] = field(default_factory=dict)
    events: tuple[str, ...] = ()
    """What the controller did, or would have done, as text."""
    sparsity: Sparsity | None = None
    """The policy with the controller's new budgets; None if they stay."""


class Monitor:
    """Measures one run's sparse policy. The caller applies what the controller decides (`Observation.sparsity`).

    All ranks see all α and therefore reach the same schedule. `gather` returns the values of all ranks. A dense policy
    is watched only with a `kv_dtype`, whose rounding makes it another one.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        sparsity: Sparsity,
        acceptance: Acceptance,
        max_length: int,
        control: ControlSettings | None = None,
        *,
        kv_dtype: str | None = None,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> None:
        self.settings, self.acceptance, self.gather = settings, acceptance, gather
        self.kv_dtype = kv_dtype
        self.watched = 0 if sparsity.dense and kv_dtype is None else settings.rollouts
        self.base, self.kind = sparsity, controlled(sparsity)
        self.max_length = max_length
        self.schedule = schedule_of(budget_of(sparsity, self.kind), settings.bin, max_length)
        if control is not None and control.enabled:
            control = resolve_control(control, sparsity, max_length)
        self.tau = self.schedule.notes.get("tau") if control is None or control.tau is None else control.tau
        self.controller: BudgetController | None = None
        if control is not None and control.enabled:
            require(
                settings.rollouts > 0 or control.tau is None,
                f"control.enabled=true with monitor.rollouts=0: no tail is measured that could be held at "
                f"{control.tau}; raise monitor.rollouts, or control vetoes only (control.vetoed).",
            )
            require(
                control.on_violation != "dense" or sparsity.evict is None or sparsity.select is None,
                "control.on_violation=dense: with an evictor and a selector only one budget is controlled, and the "
                "other part would stay sparse; use adapt, warn or stop.",
            )
            self.controller = BudgetController(self.schedule, control, self.kind, max_length, settings.quantile)
        self._versions = {self.recommended: 0}
        """The controller's version for every policy that it has recommended."""

    @property
    def recommended(self) -> Sparsity:
        """The watched policy with the controller's budgets."""
        if self.controller is None:
            return self.base
        return self.base.with_budget(self.kind, self.controller.schedule)

    @property
    def densest(self) -> Sparsity:
        """The policy with the largest budget that the controller can reach."""
        if self.controller is None or self.kind == "select":  # a selector keeps all KV at any budget
            return self.recommended
        budget = max(self.controller.schedule.budgets)
        tops = {"adapt": self.controller.ladder[-1], "dense": self.max_length}
        top = tops.get(self.controller.control.on_violation, 0)
        return self.base.with_budget(self.kind, top) if top > budget else self.recommended

    @property
    def stopped(self) -> bool:
        """Whether the run should stop: on_violation=stop, and the tail is below tau or vetoes are too many."""
        return self.controller is not None and self.controller.stopped

    def follow(self, sparsity: Sparsity) -> None:
        """Watch another policy from now on. A run with a controller never moves to another policy."""
        self.base, self.kind = sparsity, controlled(sparsity)
        self.schedule = schedule_of(budget_of(sparsity, self.kind), self.settings.bin, self.max_length)
        self._versions = {sparsity: 0}

    def keep_hidden(self, places: Sequence[int]) -> list[int]:
        """How many rollouts of each prompt keep their hidden states, by its place among all ranks' prompts of a step:
        one of each of the first, since prompts are shuffled."""
        return [int(place < self.watched) for place in places]

    def step(self, rollouts: Sequence[Rollout]) -> Observation:
        """Measure the rollouts with hidden states, and free these. Every rank must call it."""
        if self.base.dense and self.kv_dtype is None:
            return Observation()
        if not self.settings.rollouts:
            return Observation(self._schedule_metrics() if self.controller else {})
        mine = [r for r in rollouts if (r.hidden is not None or r.acceptance is not None) and len(r)]
        tokens = self._tokens(mine)
        for rollout in rollouts:
            rollout.hidden = None
        ranks = self.gather(tokens)
        alpha, positions, prompts, version, current = in_prompt_order(ranks, by=2)
        if not len(alpha):
            return Observation(self._schedule_metrics())
        metrics = self._metrics(alpha, positions) | self._schedule_metrics()
        if current.any() and not current.all():
            metrics |= {f"mismatch/current_alpha_p{p:02}": lower_quantile(alpha[current], p / 100) for p in PERCENTILES}
        alpha, positions, prompts, version = (column[current] for column in (alpha, positions, prompts, version))
        if self.controller is None:
            return Observation(metrics)
        control, quantile, width = self.controller.control, self.controller.quantile, self.controller.width
        events = self.controller.observe(alpha, positions, prompts, version)
        return Observation(
            metrics, tuple(event.describe(control, quantile, width) for event in events), self._new_policy()
        )

    def count_vetoes(
        self, rollouts: Sequence[Rollout], vetoed: Sequence[bool], n: int, version: int | None = None
    ) -> Observation:
        """Pass the controller the vetoed ones among this rank's rollouts (`n` per prompt, adjacent), as they were
        sampled. With `version`, only prompts whose tokens were all sampled by it count: the vetoes of others come from
        older weights, too. Every rank must call it."""
        if self.controller is None or self.controller.control.vetoed is None:
            return Observation()
        prompts = np.asarray([rollout.prompt_index for rollout in rollouts[::n]], np.int64)
        versions = np.asarray([self._versions.get(rollout.sparsity, -1) for rollout in rollouts[::n]], np.int64)
        if version is not None:
            current = np.asarray([is_current(rollout, version) for rollout in rollouts], bool)
            versions[~current.reshape(-1, n).all(1)] = -1
        counts = np.asarray(vetoed, np.int64).reshape(-1, n).sum(1)
        counts, versions, _ = in_prompt_order(self.gather((counts, versions, prompts)), by=2)
        event = self.controller.observe_vetoes(counts, np.full(len(counts), n), versions)
        events = () if event is None else (event.describe(self.controller.control),)
        return Observation(events=events, sparsity=self._new_policy())

    def _new_policy(self) -> Sparsity | None:
        """The recommended policy if the controller has not recommended it before."""
        assert self.controller is not None
        policy = self.recommended
        if self._versions.get(policy) == self.controller.version:
            return None
        self._versions[policy] = self.controller.version
        return policy

    def _tokens(self, rollouts: list[Rollout]) -> tuple[Array, Array, Array, Array, Array]:
        """α, position, prompt and controller version of every token, and whether the weights that sampled it are those
        that α was measured with."""
        if not rollouts:
            empty = (np.empty(0, kind) for kind in (np.float32, np.int64, np.int64, np.int64, bool))
            return tuple(empty)  # type: ignore[return-value]
        versions = [self._versions.get(r.sparsity, -1) for r in rollouts]
        versions_of_tokens = np.repeat(versions, [r.sampled_tokens for r in rollouts])
        current = np.concatenate([(r.versions == r.policy_version).numpy() for r in rollouts])
        return *flat(rollouts, self.acceptance(rollouts)), versions_of_tokens, current

    def _metrics(self, alpha: Array, positions: Array) -> dict[str, float]:
        """Percentiles over all tokens, and the tail of every bin with enough tokens."""
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
        """The budgets in force: one for every bin where the budget changes."""
        if self.base.dense:  # watched because its KV is quantised
            return {}
        budgets = self.controller.schedule.budgets if self.controller else self.schedule.budgets
        changes = [j for j, budget in enumerate(budgets) if j == 0 or budget != budgets[j - 1]]
        metrics: dict[str, float] = {f"schedule/budget/{j * self.schedule.width}": budgets[j] for j in changes}
        return metrics | ({"schedule/version": self.controller.version} if self.controller else {})

    def state_dict(self) -> dict[str, Any]:
        return {"controller": self.controller.state_dict() if self.controller else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. A controller that was switched on since then starts anew."""
        if self.controller is not None and state["controller"] is not None:
            self.controller.load_state_dict(state["controller"])
            self.controller.stopped &= self.controller.control.on_violation == "stop"
            self._versions = {self.recommended: self.controller.version}


def is_current(rollout: Rollout, version: int) -> bool:
    """Whether one version of the policy has sampled all tokens."""
    return bool((rollout.versions == version).all())


def in_prompt_order(ranks: Sequence[tuple[Array, ...]], by: int) -> list[Array]:
    """The columns of all ranks as one table, in the order of the prompts: the same for any number of ranks."""
    columns = [np.concatenate(parts) for parts in zip(*ranks)]
    order = np.argsort(columns[by], kind="stable")
    return [column[order] for column in columns]


def resolve_control(control: ControlSettings, sparsity: Sparsity, max_length: int) -> ControlSettings:
    """`control` with defaults for tau (the schedule's) and the ladder, and checked against the policy.

    `max_length` is the longest sequence of the run.
    """
    budgets = [part.budget for part in (sparsity.select, sparsity.evict) if part is not None]
    require(len(budgets) > 0, "control.enabled=true: the rollouts are dense; set a sparsity.")
    planned = [b.notes["tau"] for b in budgets if isinstance(b, Schedule) and "tau" in b.notes]
    tau = control.tau if control.tau is not None else next(iter(planned), None)
    require(
        tau is not None or control.vetoed is not None,
        "control.enabled=true needs control.tau (this budget was not planned for one) or control.vetoed.",
    )
    part = getattr(sparsity, controlled(sparsity))
    least, block = part.least_budget, part.block if isinstance(part, Select) else 1
    require(
        not control.ladder or min(control.ladder) >= least,
        f"control.ladder={list(control.ladder or ())}: budgets of {describe(part)} must be at least {least}.",
    )
    rungs = control.ladder or default_ladder(smallest(part.budget), max_length, block)
    return control.model_copy(update={"tau": tau, "ladder": tuple(rung for rung in rungs if rung >= least)})


def controlled(sparsity: Sparsity) -> Kind:
    """Which part's budget is controlled: the one with a schedule; the selector's if both or neither have one."""
    if sparsity.select is None:
        return "evict"
    evicts_by_schedule = sparsity.evict is not None and isinstance(sparsity.evict.budget, Schedule)
    return "evict" if evicts_by_schedule and not isinstance(sparsity.select.budget, Schedule) else "select"


def budget_of(sparsity: Sparsity, kind: Kind) -> Budget | None:
    part = sparsity.select if kind == "select" else sparsity.evict
    return None if part is None else part.budget


def schedule_of(budget: Budget | None, width: int | None, max_length: int) -> Schedule:
    """The budget as a schedule, with bins up to the longest sequence."""
    if isinstance(budget, Schedule):
        return budget
    width = width or min(2000, ceil(max_length / 8))
    return Schedule((budget or max_length,) * ceil(max_length / width), width, f"fixed-{budget}")
