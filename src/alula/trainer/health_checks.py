"""Health checks: one function per failure mode, each with its threshold.

The checks are pure functions of the recent metrics and of the held-out evaluations.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from alula.objective.veto import TOO_MANY

WINDOW = 10
"""Steps in the median that a metric's level is: wide enough that the noise of one batch does not decide."""
GO_BACK = "Go back to the best checkpoint (delete the later ones, then --resume)"


class HealthWarning(NamedTuple):
    kind: str
    message: str
    advice: str


@dataclass(frozen=True)
class Hints:
    """Advice that depends on the run's settings; see docs/which-setting.md."""

    correction: str = "none"
    """Preset of the correction."""
    controlled: bool = False
    """Whether a controller adapts the budget."""
    sparse: bool = True
    """Whether rollouts are sparse."""

    @property
    def raise_budget(self) -> str:
        controller = " (control={enabled: true, on_violation: adapt, vetoed: 0.05} does so automatically)"
        return "Raise the budget" + ("" if self.controlled else controller)

    @property
    def other_correction(self) -> str:
        if self.correction == "reroll":
            return "try another evictor or selector"
        if self.correction == "strict":
            return "try another evictor or selector, distill.first or objective.correction=reroll"
        if self.correction.startswith("sparse-rl"):
            return "reject more (objective.correction=strict), or repair instead (reroll)"
        return "use a correction that rejects (objective.correction=strict, or sparse-rl)"


class Trace:
    """Recent values of a metric, and its first, lowest and highest level."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=5 * WINDOW)
        self.first: float | None = None
        self.lowest: float | None = None
        self.highest: float | None = None

    def add(self, value: float) -> None:
        self.recent.append(value)
        if len(self.recent) >= 2 * WINDOW:
            # A level is remembered once it is a window old, so that a change is compared with what came before it.
            past = median(list(self.recent)[-2 * WINDOW : -WINDOW])
            self.first = past if self.first is None else self.first
            self.lowest = past if self.lowest is None else min(self.lowest, past)
            self.highest = past if self.highest is None else max(self.highest, past)

    def last(self, count: int) -> list[float]:
        """The last `count` values, or an empty list while there are fewer."""
        return list(self.recent)[-count:] if len(self.recent) >= count else []

    @property
    def level(self) -> float | None:
        return median(values) if (values := self.last(WINDOW)) else None

    def state_dict(self) -> dict[str, Any]:
        return vars(self) | {"recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"recent": deque(state["recent"], maxlen=self.recent.maxlen)})


Traces = Mapping[str, Trace]


# -- checks of every step ----------------------------------------------------------------------------------------------


def rejection(traces: Traces, hints: Hints) -> HealthWarning | None:
    """More than 15 % of the rollouts of the last five steps were vetoed (the stable run of the Sparse-RL paper averaged
    7 %), or were rejected by a mask. Vetoes count under corrections that reject nothing, too."""
    vetoed, rejected = (traces[f"mismatch/{name}"].last(5) for name in ("veto_rate", "rejected"))
    if vetoed and fmean(vetoed) > TOO_MANY:
        rerolled = bool(traces["mismatch/rerolled"].recent)
        return _many_vetoed(fmean(vetoed), fmean(rejected) if rejected else None, rerolled, hints)
    if not rejected or fmean(rejected) <= TOO_MANY:
        return None
    return HealthWarning(
        "rejection",
        f"{fmean(rejected):.1%} of the rollouts of the last 5 steps were rejected (more than 15%) by the correction's "
        "mask: the update sees a biased selection.",
        "Raise the budget, or widen the mask (objective.correction.mask_low, mask_high). If dense rollouts are "
        "rejected, temperature or weights differ between engine and learner.",
    )


def _many_vetoed(vetoed: float, rejected: float | None, rerolled: bool, hints: Hints) -> HealthWarning:
    fate = "" if rejected is None or rerolled else f", {rejected:.1%} rejected"
    return HealthWarning(
        "rejection",
        f"{vetoed:.1%} of the rollouts of the last 5 steps were vetoed{' and finished densely' if rerolled else ''} "
        f"(more than 15%){fate}: at this KV budget the sparse policy often samples what the dense one would not.",
        f"{hints.raise_budget}, keep sinks (4) and a window"
        + ("; every reroll costs a dense suffix" if rerolled else f", or {hints.other_correction}")
        + ". If mismatch/veto_rate_token is flat, the answers have only become longer.",
    )


def mismatch_rising(traces: Traces, hints: Hints) -> HealthWarning | None:
    """k3 mismatch above 2.5 times its lowest level. Below 0.001 nats it is rounding, not sparsity."""
    trace = traces["mismatch/kl_k3"]
    if trace.level is None or trace.lowest is None or trace.level <= max(2.5 * trace.lowest, 1e-3):
        return None
    return HealthWarning(
        "mismatch-rising",
        f"The mismatch KL has grown from {trace.lowest:.2g} to {trace.level:.2g} nats per token: "
        "the sparse policy is moving away from the dense one that is being trained.",
        f"Raise the budget, lower the learning rate, or {hints.other_correction}. "
        "Use the dense held-out evaluation to decide whether to continue.",
    )


def mismatch_not_settling(traces: Traces, hints: Hints) -> HealthWarning | None:
    """k3 mismatch never below 0.03 nats per token in 50 steps, the level that Sparrow's collapsing budget reached."""
    trace = traces["mismatch/kl_k3"]
    if trace.level is None or trace.lowest is None or not trace.last(5 * WINDOW):
        return None
    if min(trace.level, trace.lowest) <= 0.03:
        return None
    return HealthWarning(
        "mismatch-high",
        f"The mismatch KL is {trace.level:.2g} nats per token and has not settled below 0.03: "
        "sparse and dense policy disagree so much that most of the signal is spent on correcting it.",
        "Raise the budget or use a length-dependent schedule. Check that the engine samples and the learner scores at "
        "the same temperature.",
    )


def gradient_spike(traces: Traces, hints: Hints) -> HealthWarning | None:
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
        "Gradient clipping absorbs one spike; several in a row precede a collapse. Lower the learning rate, cap the "
        "weights (tis), or raise the KV budget if mismatch/veto_rate rises at the same steps.",
    )


def answers_shrinking(traces: Traces, hints: Hints) -> HealthWarning | None:
    """Answers below 60 % of their highest level of length."""
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


def endless_repetition(traces: Traces, hints: Hints) -> HealthWarning | None:
    """More than 5 % of the rollouts of the last five steps repeated a phrase until the token limit."""
    values = traces["response/repetitive"].last(5)
    if not values or fmean(values) <= 0.05:
        return None
    return HealthWarning(
        "endless-repetition",
        f"{fmean(values):.1%} of the rollouts of the last 5 steps repeat one phrase until the token limit (more than "
        "5%): with a sparse cache this precedes a collapse.",
        f"Read the sampled completions. {hints.raise_budget}, keep sinks (4) and a window, or "
        f"{hints.other_correction}. If dense rollouts repeat as well, check the model's chat template and stop tokens.",
    )


def entropy_collapsing(traces: Traces, hints: Hints) -> HealthWarning | None:
    """Entropy below 0.1 nats and below a fifth of its first level, while accuracy is below 95 %."""
    trace = traces["policy/entropy"]
    if trace.level is None or trace.first is None or trace.level >= min(0.1, 0.2 * trace.first):
        return None
    if (traces["reward/accuracy"].level or 0) >= 0.95:
        return None
    return HealthWarning(
        "entropy-collapsing",
        f"The policy's entropy has fallen from {trace.first:.2g} to {trace.level:.2g} nats: it hardly "
        "explores, and the rollouts of a prompt become identical.",
        "Raise the upper clip (0.28), lower the learning rate, add a small KL to the reference, or sample at "
        "temperature 1.",
    )


def groups_equal(traces: Traces, hints: Hints) -> HealthWarning | None:
    """In at least 95 % of the groups of the last three steps, all rewards were equal."""
    values = traces["groups/no_signal"].last(3)
    if not values or fmean(values) < 0.95:
        return None
    rewards = traces["reward/accuracy"].last(3) or traces["reward/mean"].last(3)
    solved = bool(rewards) and fmean(rewards) >= 0.9
    return HealthWarning(
        "groups-equal",
        f"In {fmean(values):.0%} of the groups all rollouts earn the same reward, so nothing is learned: "
        + ("nearly all are correct." if solved else "no rollout stands out."),
        "Use harder prompts, or stop here: this data is solved."
        if solved
        else "Use easier prompts or more rollouts per prompt, check the reward on a few completions by hand, "
        "and check that answers are not truncated (response/truncated).",
    )


StepCheck = Callable[[Traces, Hints], HealthWarning | None]
STEP_CHECKS: tuple[tuple[str, StepCheck], ...] = (
    ("mismatch/veto_rate", rejection),
    ("mismatch/kl_k3", mismatch_rising),
    ("mismatch/kl_k3", mismatch_not_settling),
    ("policy/grad_norm", gradient_spike),
    ("response/length_mean", answers_shrinking),
    ("response/repetitive", endless_repetition),
    ("policy/entropy", entropy_collapsing),
    ("groups/no_signal", groups_equal),
)
"""(metric, check): a check runs at steps that log its metric."""


# -- checks of every held-out evaluation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """One held-out evaluation of the dense policy, with the training reward and the sparse accuracy at that time."""

    accuracy: float
    stderr: float
    reward: float | None
    sparse_accuracy: float | None
    sparse_stderr: float | None


def dense_falling(
    name: str, history: list[Evaluation], first_reward: float | None, hints: Hints
) -> HealthWarning | None:
    """Dense held-out accuracy significantly below its best: the last evaluation by 4 standard errors of the
    difference from the best one, or the mean of the last two by 3.5 from the best two in a row.

    The thresholds are above the usual 2 because the best of many evaluations is lucky. `first_reward` stands in for
    the reward of the evaluation before the first step, which has none.
    """
    single = [(one, one.accuracy, one.stderr) for one in history]
    pairs = [
        (late, (early.accuracy + late.accuracy) / 2, math.hypot(early.stderr, late.stderr) / 2)
        for early, late in pairwise(history)
    ]
    for candidates, errors in ((single, 4.0), (pairs, 3.5)):
        if len(candidates) < 2:
            continue
        best, best_accuracy, best_stderr = max(candidates, key=lambda candidate: candidate[1])
        now, accuracy, stderr = candidates[-1]
        if best_accuracy - accuracy > errors * math.hypot(best_stderr, stderr):
            reward = first_reward if best.reward is None else best.reward
            return _falling_warning(name, replace(best, reward=reward), now, best_accuracy, accuracy, hints)
    return None


def _falling_warning(
    name: str, best: Evaluation, now: Evaluation, high: float, low: float, hints: Hints
) -> HealthWarning:
    fell = f"Held-out accuracy of the dense policy on {name} has fallen from {high:.1%} to {low:.1%}"
    gained = None if best.reward is None or now.reward is None else now.reward - best.reward
    reward_rose = gained is not None and gained > 0
    sparse_rose = (
        best.sparse_accuracy is not None
        and now.sparse_accuracy is not None
        and now.sparse_accuracy > best.sparse_accuracy
    )
    if reward_rose or sparse_rose:
        if not hints.sparse:
            return HealthWarning(
                "reward-gamed",
                f"{fell} while the training reward rose: the run learns to please the reward, not to do well.",
                f"Do not trust the reward curve. {GO_BACK}, and read the best-paid answers: what is rewarded there?",
            )
        rising = "the training reward" if reward_rose else "the sparse policy's accuracy"
        return HealthWarning(
            "dense-sparse-divergence",
            f"{fell} while {rising} rose: the run learns to do well with a sparse cache, not to do well.",
            f"Do not trust the reward curve. {GO_BACK}, raise the budget, or {hints.other_correction}.",
        )
    with_reward = ", and the training reward fell as well" if gained is not None and gained < 0 else ""
    return HealthWarning(
        "dense-falling",
        f"{fell}{with_reward}: the policy is breaking down.",
        f"{GO_BACK}; lower the learning rate, raise the KV budget, and look at the steps "
        "where policy/grad_norm and mismatch/veto_rate first rose.",
    )


def sparse_ahead(name: str, now: Evaluation, hints: Hints) -> HealthWarning | None:
    """Sparse accuracy above the dense one by more than 4 standard errors of the difference."""
    if now.sparse_accuracy is None or now.sparse_stderr is None:
        return None
    if now.sparse_accuracy - now.accuracy <= 4 * math.hypot(now.stderr, now.sparse_stderr):
        return None
    return HealthWarning(
        "dense-sparse-divergence",
        f"On {name} the accuracy is {now.sparse_accuracy:.1%} for the sparse policy and {now.accuracy:.1%} for the "
        "dense one, which is the model you will use: the run learns to do well with a sparse cache, not to do well.",
        f"Do not trust the reward curve. Raise the budget, or {hints.other_correction}.",
    )
