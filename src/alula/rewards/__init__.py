"""Rewards: what an answer is worth, scored in batches, with a hung or crashing grader costing one answer."""

from alula.rewards.scoring import RewardBatch, Rewards, RewardSpec

__all__ = ["RewardBatch", "RewardSpec", "Rewards"]
