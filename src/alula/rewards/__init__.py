"""Rewards: answers graded in batches. A grader that hangs or crashes costs one answer only."""

from alula.rewards.scoring import Answers, RewardBatch, Rewards
from alula.settings import RewardTerm

__all__ = ["Answers", "RewardBatch", "RewardTerm", "Rewards"]
