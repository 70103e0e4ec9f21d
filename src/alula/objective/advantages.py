"""Group advantages: each rollout against the other rollouts of its prompt."""

import torch
from torch import Tensor

from alula.errors import unknown

ADVANTAGES = ("grpo", "dr_grpo", "rloo")


def group_advantages(
    rewards: Tensor, group: Tensor, kind: str = "grpo", count: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """[N]: one advantage per rollout, from `rewards` [N] and the `group` (prompt) [N] of each rollout.

        grpo      (R − mean) / (std + eps), std with n − 1    DeepSeekMath, arXiv 2402.03300
        dr_grpo   R − mean                                    arXiv 2503.20783
        rloo      R − mean of the group's *other* rollouts    arXiv 2402.14740

    `count` (bool [N], default all) selects the rollouts that enter the mean and the std; the others are compared with
    them too. A group whose counted rewards are equal gets exactly 0.
    """
    if kind not in ADVANTAGES:
        raise unknown("advantage", kind, ADVANTAGES)
    values = rewards.double()
    counted = torch.ones_like(values) if count is None else count.double()
    index, groups = _index(group)

    def per_group(terms: Tensor) -> Tensor:
        return terms.new_zeros(groups).index_add(0, index, terms)[index]

    number, sums = per_group(counted), per_group(counted * values)
    if kind == "rloo":
        advantages = values - (sums - counted * values) / (number - counted).clamp(min=1)
    else:
        advantages = values - sums / number.clamp(min=1)
    if kind == "grpo":
        variance = per_group(counted * advantages.square()) / (number - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + eps)
    # Set explicitly: the mean of equal rewards can differ from them in the last bit.
    advantages = torch.where(has_signal(rewards, group, count), advantages, 0)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def has_signal(rewards: Tensor, group: Tensor, count: Tensor | None = None) -> Tensor:
    """bool [N]: whether the (counted) rewards of a rollout's group differ.

    If not, every advantage is 0. Without a KL term the group can then be left out of the update; the divisors still
    count it.
    """
    index, groups = _index(group)
    values = rewards.double()

    def extreme(reduction: str, absent: float) -> Tensor:
        counted = values if count is None else torch.where(count.bool(), values, absent)
        return values.new_full((groups,), absent).scatter_reduce(0, index, counted, reduction)

    return (extreme("amax", -torch.inf) > extreme("amin", torch.inf))[index]


def _index(group: Tensor) -> tuple[Tensor, int]:
    names, index = torch.unique(group, return_inverse=True)
    return index, len(names)
