"""Held-out evaluation during a run: the dense policy above all, since that is the one that is trained."""

import math
from dataclasses import dataclass

from alula.config.run import RunConfig
from alula.data import Dataset
from alula.distributed import World
from alula.engine.rollout import Sampling
from alula.evals import evaluate
from alula.rewards import Rewards
from alula.sparsity.policy import DENSE, Sparsity
from alula.trainer.collector import Collector


@dataclass(frozen=True)
class HeldOut:
    accuracy: float
    stderr: float
    n: int
    length: float
    kv_saved: float


def evaluate_policy(
    config: RunConfig, collector: Collector, rewards: Rewards, dataset: Dataset, world: World, sparse: bool
) -> HeldOut:
    """Every rank answers its share of the problems; the same seed every time, so that only the weights differ."""
    e = config.eval
    sparsity: Sparsity = collector.sparsity if sparse else DENSE
    sampling = Sampling(
        n=e.k,
        max_new_tokens=e.max_new_tokens or config.sampling.max_new_tokens,
        temperature=e.temperature,
        seed=collector.seed("evaluation"),
    )
    mine = Dataset(world.local_slice(dataset.examples), dataset.name)
    found = None
    failures: dict[str, int] = {}
    if len(mine):
        result = evaluate(
            lambda prompts, n: collector.generate(prompts, sampling, sparsity),
            mine,
            rewards,
            e.k,
            correct=config.rewards.correct,
            threshold=config.rewards.threshold,
        )
        failures = result.failures
        error = result.error
        if error is None:  # a single problem
            error = math.sqrt(result.accuracy * (1 - result.accuracy) / e.k)
        found = HeldOut(result.accuracy, error, len(mine) * e.k, result.lengths.mean, result.kv.saved)
    if not collector.graded:
        # Only of the reward that the accuracy is made of: the others may need what only the training data have.
        judge = config.rewards.correct or rewards.names[0]
        collector.raise_if_ungraded([judge], failures, len(mine) * e.k, "first evaluation's")
    return joined([share for share in world.all_gather(found) if share is not None])


def joined(shares: list[HeldOut]) -> HeldOut:
    """Independent shares: means weighted by answers, standard errors added as variances."""
    total = sum(share.n for share in shares)

    def mean(name: str) -> float:
        return sum(share.n * getattr(share, name) for share in shares) / total

    stderr = math.sqrt(sum((share.n * share.stderr) ** 2 for share in shares)) / total
    return HeldOut(mean("accuracy"), stderr, total, mean("length"), mean("kv_saved"))
