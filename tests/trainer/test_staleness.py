"""Ages and vetoes of rollouts that older weights have sampled in part."""

import pytest
import torch

from alula.distributed import World
from alula.engine.rollout import Rollout, Span
from alula.trainer.staleness import staleness_metrics


def rollout(*spans):
    tokens = sum(count for count, _ in spans)
    return Rollout([1], [2] * tokens, torch.zeros(tokens), "stop", spans=[Span(*span) for span in spans])


def test_ages_count_sampled_tokens_and_vetoes_only_rollouts_of_the_present_version():
    rollouts = [rollout((2, 3), (1, None), (3, 5)), rollout((4, 5)), rollout((2, 5)), rollout((1, 4), (1, 5))]
    found = staleness_metrics(rollouts, [True, True, False, True], 5, World())
    assert found == {
        "workers/age_mean": pytest.approx((2 * 2 + 1) / 13),
        "workers/age_max": 2,
        "mismatch/current_tokens": pytest.approx(10 / 13),
        "mismatch/current_veto_rate": 0.5,
    }


def test_without_a_rollout_of_the_present_version_there_is_no_such_rate():
    assert "mismatch/current_veto_rate" not in staleness_metrics([rollout((3, 1))], [True], 2, World())
    assert staleness_metrics([], [], 2, World())["workers/age_mean"] == 0
