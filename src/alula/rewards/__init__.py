"""Rewards: what an answer is worth, scored in batches, with a hung or crashing grader costing one answer."""

from alula.config.settings import RewardTerm
from alula.rewards.scoring import RewardBatch, Rewards

__all__ = ["RewardBatch", "RewardTerm", "Rewards"]
