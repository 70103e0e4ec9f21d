"""Metrics of one training step over all ranks (docs/metrics.md), and the clock that times its phases."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean

import torch

from alula.config.run import RunConfig
from alula.distributed import World
from alula.engine.rollout import Rollout, kv_tokens, saved_share
from alula.environments.episodes import Episode
from alula.learner.learner import Update
from alula.trainer.batch import RolloutBatch
from alula.trainer.repetition import SHORTEST_LOOP, repeats_endlessly
from alula.trainer.update import StepResult


class Clock:
    """Seconds per phase. Repeated phases add up; time inside a nested phase counts only there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = self._now()
        self._start = self._since

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._add_elapsed()
        self._open.append(name)
        try:
            yield
        finally:
            self._add_elapsed()
            self._open.pop()

    @property
    def total(self) -> float:
        return self._now() - self._start

    def _add_elapsed(self) -> None:
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def step_metrics(
    config: RunConfig,
    batch: RolloutBatch,
    result: StepResult,
    clock: Clock,
    world: World,
    *,
    peak_bytes: int,
    epoch: float,
    matrix_rate: float | None,
) -> dict[str, float]:
    """All metrics of a step, equal on every rank except for the times, which are this rank's."""
    metrics = rollout_metrics(config, batch, world, peak_bytes) | update_metrics(result.updates)
    metrics["policy/taught"] = sum_over_ranks(world, result.trained) / sum_over_ranks(world, len(batch.rollouts))
    metrics |= {f"mismatch/{name}": value for name, value in result.mismatch.items()}
    metrics["data/epoch"] = epoch
    metrics |= {f"time/{name}": seconds for name, seconds in clock.seconds.items()}
    metrics["time/step"] = clock.total
    metrics["speed/tokens_per_s"] = sum_over_ranks(world, batch.drawn_tokens) / generating_seconds(config, metrics)
    if matrix_rate:
        metrics["speed/mfu"] = result.flops / max(clock.seconds["update"], 1e-9) / matrix_rate
    return metrics


def generating_seconds(config: RunConfig, metrics: Mapping[str, float]) -> float:
    """Seconds in which a step's rollouts were generated: all of the step, if that goes on while the learner works."""
    return max(metrics["time/step" if config.rollouts.stale else "time/rollout"], 1e-9)


def rollout_metrics(config: RunConfig, batch: RolloutBatch, world: World, peak_bytes: int) -> dict[str, float]:
    rollouts = batch.rollouts
    judge = config.rewards.correct or next(iter(batch.reward_parts))
    correct = [value >= config.rewards.threshold - 1e-9 for value in batch.reward_parts[judge]]
    sums = {
        "reward/mean": sum(batch.rewards),
        "reward/accuracy": sum(correct),
        "reward/failed": sum(map(bool, batch.failures)),
        "response/length_mean": sum(batch.lengths),
        "response/truncated": sum(r.finish == "length" for r in rollouts),
        "kv/tokens_mean": sum(r.kv.mean_tokens for r in rollouts),
    }
    if config.sampling.max_new_tokens > SHORTEST_LOOP:
        sums["response/repetitive"] = sum(map(repeats_endlessly, rollouts))
    if len(batch.reward_parts) > 1:
        sums |= {f"reward/part/{name}": sum(values) for name, values in batch.reward_parts.items()}
    if config.environment is not None:
        sums |= episode_sums(rollouts)
    if config.objective.correction.reroll:
        sums["mismatch/rerolled"] = sum(batch.rerolled)
    held, dense = kv_tokens(rollouts)
    totals = {
        "count": len(rollouts),
        "groups": batch.drawn_groups,
        "no_signal": batch.no_signal_groups,
        "held": held,
        "dense": dense,
        "bytes": peak_bytes,
        "dense_bytes": dense_peak_bytes(rollouts, config.engine.max_rows),
    }
    total = summed(world.all_gather(sums | totals))
    metrics = {name: total[name] / total["count"] for name in sums}
    metrics["groups/no_signal"] = total["no_signal"] / total["groups"]
    if config.sampling.dynamic:
        metrics["groups/drawn"] = total["groups"]
    metrics["kv/saved"] = saved_share(total["held"], total["dense"])
    metrics["kv/bytes_peak"] = total["bytes"]
    metrics["kv/bytes_saved"] = total["dense_bytes"] - total["bytes"]
    return metrics


def episode_sums(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What environments did, summed over episodes."""
    episodes = [rollout for rollout in rollouts if isinstance(rollout, Episode)]
    return {
        "environment/turns": sum(len(episode.turns) for episode in episodes),
        "environment/given_tokens": sum(len(episode) - episode.sampled_tokens for episode in episodes),
        "environment/failed": sum(episode.failure is not None for episode in episodes),
        "time/environment_mean": sum(episode.waited for episode in episodes),
    }


def dense_peak_bytes(rollouts: Sequence[Rollout], rows: int) -> float:
    """Estimated peak KV of dense rollouts with the same answers, at most `rows` at once, prompts shared."""
    rollouts = [rollout for rollout in rollouts if rollout.kv.peak_tokens]  # an environment may fail at its reset
    if not rollouts:
        return 0.0
    prompts = {tuple(rollout.prompt_ids) for rollout in rollouts}
    tokens = sum(map(len, prompts)) + sum(len(rollout) - 1 for rollout in rollouts)
    token_bytes = rollouts[0].kv.peak_bytes / rollouts[0].kv.peak_tokens
    return tokens * token_bytes * min(1.0, rows / len(rollouts))


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Means over the tokens of all optimizer steps; losses and norms are means over the steps that were taken."""
    metrics: dict[str, float] = {}
    parts = [update.metrics for update in updates if update.metrics]
    tokens = sum(part["tokens"] for part in parts)
    for name in parts[0] if parts else ():
        if name != "tokens":
            metrics[f"policy/{name}"] = sum(part[name] * part["tokens"] for part in parts) / tokens
    taken = [update for update in updates if update.taken]
    metrics["policy/loss"] = fmean(update.loss for update in taken) if taken else math.nan
    metrics["policy/grad_norm"] = fmean(update.grad_norm for update in taken) if taken else math.nan
    metrics["policy/lr"] = updates[-1].lr
    metrics["policy/skipped"] = len(updates) - len(taken)
    return metrics


def summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def sum_over_ranks(world: World, value: float) -> float:
    return sum(world.all_gather(value))
