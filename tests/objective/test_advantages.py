import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.errors import SettingError
from alula.objective.advantages import ADVANTAGES, group_advantages, has_signal


def by_hand(rewards: list[float], group: list[int], counted: list[bool], kind: str, eps: float) -> list[float]:
    result = []
    for i, reward in enumerate(rewards):
        mates = [j for j in range(len(rewards)) if group[j] == group[i] and counted[j]]
        values = [rewards[j] for j in mates]
        if len(set(values)) < 2:
            result.append(0.0)
        elif kind == "rloo":
            others = [rewards[j] for j in mates if j != i]
            result.append(reward - sum(others) / len(others))
        else:
            mean = sum(values) / len(values)
            std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
            result.append((reward - mean) / (std + eps) if kind == "grpo" else reward - mean)
    return result


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(ADVANTAGES))
def test_advantages_equal_a_loop(data, kind):
    n = data.draw(st.integers(1, 12))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, 0.1, -2.5, 0.3]), min_size=n, max_size=n))
    group = data.draw(st.lists(st.sampled_from([7, -1, 1000]), min_size=n, max_size=n))
    counted = data.draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n))
    result = group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(group),
        kind,
        None if counted is None else torch.tensor(counted),
        eps=1e-3,
    )
    expected = by_hand(rewards, group, counted or [True] * n, kind, 1e-3)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 1e9])
def test_equal_rewards_give_exactly_zero(kind, reward):
    # 0.1 summed three times and divided by 3 is not 0.1: exactness must not hang on rounding.
    for size in (1, 3, 7):
        result = group_advantages(torch.full((size,), reward), torch.zeros(size, dtype=torch.int64), kind)
        assert result.tolist() == [0.0] * size


def test_grpo_is_the_standard_score_with_unbiased_std():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    result = group_advantages(rewards, torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(result, (rewards - rewards.mean()) / (rewards.std() + 1e-6))


def test_integer_rewards_give_float_advantages():
    result = group_advantages(torch.tensor([1, 0]), torch.tensor([0, 0]), "dr_grpo")
    assert result.dtype == torch.float32
    assert result.tolist() == [0.5, -0.5]


def test_has_signal_is_per_group():
    rewards, group = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5]), torch.tensor([3, 3, 5, 5, 9])
    assert has_signal(rewards, group).tolist() == [True, True, False, False, False]
    counted = torch.tensor([True, False, True, True, True])
    assert not has_signal(rewards, group, counted).any()


def test_unknown_kind_names_the_nearest():
    with pytest.raises(SettingError, match="dr_grpo"):
        group_advantages(torch.zeros(2), torch.zeros(2), "drgrpo")
