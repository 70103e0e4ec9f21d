"""Environments: several turns per rollout, with tools that run beside the engine."""
