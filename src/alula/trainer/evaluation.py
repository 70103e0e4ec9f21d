"""Held-out evaluation during a run."""

import math
from dataclasses import dataclass

from alula.config.run import RunConfig
from alula.data import Dataset
from alula.distributed import World
from alula.engine.rollout import Sampling
from alula.evals import evaluate
from alula.rewards import Rewards
from alula.sparsity.policy import DENSE
from alula.trainer.collector import Collector


@dataclass(frozen=True)
class EvalSummary:
    """Held-out results of one policy, as written to evals.jsonl."""

    accuracy: float
    stderr: float
    n: int
    """Graded answers."""
    length: float
    kv_saved: float


def evaluate_policy(
    config: RunConfig, collector: Collector, rewards: Rewards, dataset: Dataset, world: World, sparse: bool
) -> EvalSummary:
    """Evaluate the dense policy, or the sparse one in force. Every rank answers its share of the problems. The seed is
    always the same, so that only the weights differ."""
    e = config.eval
    sparsity = collector.sparsity if sparse else DENSE
    sampling = Sampling(
        n=e.k,
        max_new_tokens=e.max_new_tokens or config.sampling.max_new_tokens,
        temperature=e.temperature,
        seed=collector.seed("evaluation"),
    )
    share = Dataset(world.local_slice(dataset.examples), dataset.name)
    indices = world.local_slice(range(len(dataset)))
    summary = None
    failures: dict[str, int] = {}
    if len(share):
        result = evaluate(
            lambda prompts, n: collector.generate(prompts, sampling, sparsity, indices),
            share,
            rewards,
            e.k,
            correct=config.rewards.correct,
            threshold=config.rewards.threshold,
        )
        failures = result.failures
        error = result.error
        if error is None:  # a single problem
            error = math.sqrt(result.accuracy * (1 - result.accuracy) / e.k)
        summary = EvalSummary(result.accuracy, error, len(share) * e.k, result.lengths.mean, result.kv.saved)
    if not collector.graded:
        # Only the reward behind the accuracy must work: the others may need fields that only the training data have.
        judge = config.rewards.correct or rewards.names[0]
        collector.raise_if_ungraded([judge], failures, len(share) * e.k, "first evaluation's")
    return pooled([rank_summary for rank_summary in world.all_gather(summary) if rank_summary is not None])


def pooled(summaries: list[EvalSummary]) -> EvalSummary:
    """The summaries of independent shares as one: means weighted by answers, standard errors added as variances."""
    total = sum(summary.n for summary in summaries)

    def mean(name: str) -> float:
        return sum(summary.n * getattr(summary, name) for summary in summaries) / total

    stderr = math.sqrt(sum((summary.n * summary.stderr) ** 2 for summary in summaries)) / total
    return EvalSummary(mean("accuracy"), stderr, total, mean("length"), mean("kv_saved"))
