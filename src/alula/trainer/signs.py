"""The signs of trouble that `alula.trainer.health` looks for: one pure function each, its threshold beside it."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from alula.objective.veto import TOO_MANY
from alula.trainer.advice import ANOTHER, CONTROLLER

WINDOW = 10
"""Steps that a level is the median of: wide enough that one batch's noise does not decide."""


@dataclass(frozen=True)
class HealthWarning:
    kind: str
    message: str
    advice: str


class Trace:
    """A metric's recent values and what is remembered of its past: the first, lowest and highest level."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=5 * WINDOW)
        self.first: float | None = None
        self.lowest: float | None = None
        self.highest: float | None = None

    def add(self, value: float) -> None:
        self.recent.append(value)
        if len(self.recent) >= 2 * WINDOW:
            # A level enters the memory when it is a window old: a change is compared with what was before it.
            past = median(list(self.recent)[-2 * WINDOW : -WINDOW])
            self.first = past if self.first is None else self.first
            self.lowest = past if self.lowest is None else min(self.lowest, past)
            self.highest = past if self.highest is None else max(self.highest, past)

    def last(self, count: int) -> list[float]:
        """The last `count` values, or nothing while there are fewer."""
        return list(self.recent)[-count:] if len(self.recent) >= count else []

    @property
    def level(self) -> float | None:
        return median(values) if (values := self.last(WINDOW)) else None

    def state_dict(self) -> dict[str, Any]:
        return vars(self) | {"recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"recent": deque(state["recent"], maxlen=self.recent.maxlen)})


Traces = Mapping[str, Trace]


def rejection(traces: Traces) -> HealthWarning | None:
    """More than 15 % of the rollouts of the last five steps vetoed, which the paper's stable run averaged 7 % of; or,
    without so many vetoes, rejected by a mask. A veto counts under corrections that reject nothing, too."""
    vetoed, rejected = (traces[f"mismatch/{name}"].last(5) for name in ("veto_rate", "rejected"))
    if vetoed and fmean(vetoed) > TOO_MANY:
        return _vetoed(fmean(vetoed), fmean(rejected) if rejected else None, bool(traces["mismatch/rerolled"].recent))
    if not rejected or fmean(rejected) <= TOO_MANY:
        return None
    return HealthWarning(
        "rejection",
        f"{fmean(rejected):.1%} of the rollouts of the last 5 steps were rejected (more than 15%) by the correction's "
        "mask: what is left to learn from is a selection.",
        "Raise the budget, or widen the mask (objective.correction.mask_low, mask_high). Of dense rollouts it "
        "should reject none: temperature or weights differ between engine and learner.",
    )


def _vetoed(vetoed: float, rejected: float | None, rerolls: bool) -> HealthWarning:
    fate = "" if rejected is None or rerolls else f", {rejected:.1%} rejected"
    return HealthWarning(
        "rejection",
        f"{vetoed:.1%} of the rollouts of the last 5 steps were vetoed{' and finished densely' if rerolls else ''} "
        f"(more than 15%){fate}: at this KV budget the sparse policy too often samples what the dense one would not.",
        f"Raise the budget{CONTROLLER}, keep sinks (4) and a window"
        + ("; every reroll costs a dense suffix" if rerolls else f", or {ANOTHER}")
        + ". If mismatch/veto_rate_token is flat, the answers have only grown longer.",
    )


def mismatch_rising(traces: Traces) -> HealthWarning | None:
    """k3 mismatch above 2.5 times its lowest level; below 0.001 nats it is rounding, not sparsity."""
    trace = traces["mismatch/kl_k3"]
    if trace.level is None or trace.lowest is None or trace.level <= max(2.5 * trace.lowest, 1e-3):
        return None
    return HealthWarning(
        "mismatch-rising",
        f"The mismatch KL has grown from {trace.lowest:.2g} to {trace.level:.2g} nats per token: "
        "the sparse policy is moving away from the dense one that is being trained.",
        f"Raise the budget, lower the learning rate, or {ANOTHER}. "
        "Let the dense held-out evaluation decide whether the run is still worth its time.",
    )


def mismatch_not_settling(traces: Traces) -> HealthWarning | None:
    """k3 mismatch never below 0.03 nats per token in 50 steps: where Sparrow's collapsing budget ended."""
    trace = traces["mismatch/kl_k3"]
    if trace.level is None or trace.lowest is None or not trace.last(5 * WINDOW):
        return None
    if min(trace.level, trace.lowest) <= 0.03:
        return None
    return HealthWarning(
        "mismatch-high",
        f"The mismatch KL is {trace.level:.2g} nats per token and has not settled below 0.03: "
        "sparse and dense policy disagree so much that most of the signal is spent on correcting it.",
        "Raise the budget or use a length-dependent schedule; check that the sampling temperature is the one "
        "that the learner scores with.",
    )


def gradient_spike(traces: Traces) -> HealthWarning | None:
    """Gradient norm above four times its median and outside six robust deviations of its logarithm."""
    values = [value for value in traces["policy/grad_norm"].recent if value > 0]
    if len(values) <= WINDOW:
        return None
    *before, now = map(math.log, values)
    centre = median(before)
    deviation = 1.4826 * median(abs(value - centre) for value in before)
    if now - centre <= max(math.log(4), 6 * deviation):
        return None
    return HealthWarning(
        "gradient-spike",
        f"The gradient norm jumped to {math.exp(now):.3g}, {math.exp(now - centre):.0f} times its usual "
        f"{math.exp(centre):.3g}.",
        "One spike is survived by gradient clipping; several in a row precede a collapse. Lower the learning "
        "rate, cap the weights (tis), or raise the KV budget if mismatch/veto_rate rises at the same steps.",
    )


def answers_shrinking(traces: Traces) -> HealthWarning | None:
    """Answers below 60 % of the length that they once had."""
    trace = traces["response/length_mean"]
    if trace.level is None or trace.highest is None or trace.level >= 0.6 * trace.highest:
        return None
    return HealthWarning(
        "answers-shrinking",
        f"Answers have shrunk from {trace.highest:.0f} to {trace.level:.0f} tokens: short answers fit into "
        "the KV budget, so a sparse run can drift to them whether or not they reason.",
        "Read the sampled completions and compare dense held-out accuracy. If that falls too, raise the "
        "budget; if it rises, the model is only learning to be brief.",
    )


def entropy_collapsing(traces: Traces) -> HealthWarning | None:
    """Entropy below 0.1 nats and a fifth of its first level, while there is still something to learn."""
    trace = traces["policy/entropy"]
    if trace.level is None or trace.first is None or trace.level >= min(0.1, 0.2 * trace.first):
        return None
    if (traces["reward/accuracy"].level or 0) >= 0.95:
        return None
    return HealthWarning(
        "entropy-collapsing",
        f"The policy's entropy has fallen from {trace.first:.2g} to {trace.level:.2g} nats: it hardly "
        "explores, and rollouts of one prompt become the same.",
        "Raise the upper clip (0.28), lower the learning rate, add a small KL to the reference, or sample at "
        "temperature 1.",
    )


def groups_equal(traces: Traces) -> HealthWarning | None:
    """At least 95 % of the groups of the last three steps had equal rewards throughout."""
    values = traces["groups/no_signal"].last(3)
    if not values or fmean(values) < 0.95:
        return None
    rewards = traces["reward/accuracy"].last(3) or traces["reward/mean"].last(3)
    solved = bool(rewards) and fmean(rewards) >= 0.9
    return HealthWarning(
        "groups-equal",
        f"In {fmean(values):.0%} of the groups all rollouts earn the same reward, so nothing is learned: "
        + ("they are nearly all right." if solved else "no rollout stands out."),
        "Use harder prompts, or stop here: this data is solved."
        if solved
        else "Use easier prompts or more rollouts per prompt, check the reward on a few completions by hand, "
        "and check that answers are not cut off (response/truncated).",
    )


CHECKS: tuple[tuple[str, Callable[[Traces], HealthWarning | None]], ...] = (
    ("mismatch/veto_rate", rejection),
    ("mismatch/kl_k3", mismatch_rising),
    ("mismatch/kl_k3", mismatch_not_settling),
    ("policy/grad_norm", gradient_spike),
    ("response/length_mean", answers_shrinking),
    ("policy/entropy", entropy_collapsing),
    ("groups/no_signal", groups_equal),
)
"""The metric that wakes a check, and the check."""
