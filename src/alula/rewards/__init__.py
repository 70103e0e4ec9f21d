"""Rewards: answers graded in batches. A grader that hangs or crashes costs one answer only."""

from alula.config.settings import RewardTerm
from alula.rewards.scoring import Answers, RewardBatch, Rewards

__all__ = ["Answers", "RewardBatch", "RewardTerm", "Rewards"]
