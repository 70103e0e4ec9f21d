"""Policy losses: each one registered function. A new loss needs one function here and nothing elsewhere.

    ρ_t = π_θ(o_t) / π_old(o_t)    clip(ρ) = ρ within [1 − clip_low, 1 + clip_high]    w_t = correction weight

    loss = Σ_i Σ_t −w_t J_t / policy_i  +  β Σ_i Σ_t k3_t / kl_i

              J_t                            divisor of rollout i                       source
    grpo      min(ρ A, clip(ρ) A)            |o_i| · rollouts                           arXiv 2402.03300
    dr_grpo   as grpo                        max_length · rollouts                      arXiv 2503.20783
    dapo      as grpo, clip_high 0.28        tokens of the step                         arXiv 2503.14476
    gspo      as grpo, ρ = Π_t ρ_t^(1/|o|)   |o_i| · rollouts                           arXiv 2507.18071
    cispo     sg(clip(ρ)) A log π_θ          tokens of the step                         arXiv 2506.13585

    dual clip: J_t is at least dual_clip · A where A < 0

`alula.objective.policy_loss` adds up J_t. This module uses tensor methods only and does not import torch, because the
settings read the registry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

RatioLevel = Literal["token", "geometric"]
"""ρ of each token, or the geometric mean of ρ over the rollout."""
DivisorKind = Literal["rollout", "max_length", "step"]
"""What a rollout's token sum is divided by: |o_i| · rollouts, max_length · rollouts, or the tokens of the step."""


@dataclass(frozen=True)
class LossInputs:
    """Tensors [T] of a micro-batch's tokens. Dropped tokens have log-prob 0 and ratio 1; their weight is 0."""

    logprobs: "Tensor"
    """log π_θ, with gradient."""
    ratio: "Tensor"
    """ρ at the loss's `ratio` level, with gradient."""
    advantages: "Tensor"
    clip: tuple[float, float]
    """(low, high)"""
    dual_clip: float | None = None

    @property
    def clipped_ratio(self) -> "Tensor":
        low, high = self.clip
        return self.ratio.clamp(1 - low, 1 + high)


@dataclass(frozen=True)
class PolicyLoss:
    """A loss function and what the code around it must know. The restrictions in `settings.check` follow from this."""

    objective: Callable[[LossInputs], "Tensor"]
    """J_t [T]"""
    clip: tuple[float, float]
    """Published (low, high): the ratio is clipped to [1 − low, 1 + high]; a low of 1 is no bound."""
    divisor: DivisorKind
    ratio: RatioLevel = "token"
    pessimistic: bool = True
    """Whether J_t is the minimum of clipped and unclipped objective. If so, a clip binds on one side only, by the sign
    of the advantage, and `dual_clip` applies."""


LOSSES: dict[str, PolicyLoss] = {}
"""Every registered loss by name."""


def register(
    name: str,
    *,
    clip: tuple[float, float],
    divisor: DivisorKind,
    ratio: RatioLevel = "token",
    pessimistic: bool = True,
) -> Callable[[Callable[[LossInputs], "Tensor"]], Callable[[LossInputs], "Tensor"]]:
    """Decorator: make a function available as the loss `name`. The arguments are the fields of `PolicyLoss`."""

    def add(objective: Callable[[LossInputs], "Tensor"]) -> Callable[[LossInputs], "Tensor"]:
        LOSSES[name] = PolicyLoss(objective, clip, divisor, ratio, pessimistic)
        return objective

    return add


@register("grpo", clip=(0.2, 0.2), divisor="rollout")
def grpo(inputs: LossInputs) -> "Tensor":
    advantages = inputs.advantages
    objective = (inputs.ratio * advantages).minimum(inputs.clipped_ratio * advantages)
    if inputs.dual_clip is None:
        return objective
    return objective.maximum(inputs.dual_clip * advantages).where(advantages < 0, objective)


@register("dr_grpo", clip=(0.2, 0.2), divisor="max_length")
def dr_grpo(inputs: LossInputs) -> "Tensor":
    return grpo(inputs)


@register("dapo", clip=(0.2, 0.28), divisor="step")
def dapo(inputs: LossInputs) -> "Tensor":
    return grpo(inputs)


@register("gspo", clip=(3e-4, 4e-4), divisor="rollout", ratio="geometric")
def gspo(inputs: LossInputs) -> "Tensor":
    return grpo(inputs)


@register("cispo", clip=(1.0, 4.0), divisor="step", pessimistic=False)
def cispo(inputs: LossInputs) -> "Tensor":
    return inputs.clipped_ratio.detach() * inputs.advantages * inputs.logprobs
