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
    pass_at_k: float | None = None
    """Share of problems with a correct answer among their k, if k > 1."""

    def numbers(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}


Score = tuple[int, float, int, float]
"""Last step and accuracy, best step and accuracy."""


def add_score(score: Score | None, step: int, accuracy: float) -> Score:
    if score is None or accuracy > score[3]:
        return step, accuracy, step, accuracy
    return step, accuracy, score[2], score[3]


def describe_score(name: str, score: Score) -> str:
    last_step, last, best_step, best = score
    return f"dense accuracy on {name}: last {last:.1%} (step {last_step}), best {best:.1%} (step {best_step})."


def evaluate_policy(
    config: RunConfig, collector: Collector, rewards: Rewards, dataset: Dataset, k: int, world: World, sparse: bool
) -> EvalSummary:
    """Evaluate the dense policy, or the sparse one in force, with k answers per problem. Every rank answers its share
    of the problems. The seed is always the same, so that only the weights differ."""
    e = config.eval
    sparsity = collector.sparsity if sparse else DENSE
    sampling = Sampling(
        n=k,
        max_new_tokens=e.max_new_tokens or config.sampling.max_new_tokens,
        temperature=e.temperature,
        top_p=e.top_p,
        top_k=e.top_k,
        seed=collector.seed("evaluation"),
        stop=tuple(config.sampling.stop),
    )
    share = Dataset(world.local_slice(dataset.examples), dataset.name)
    indices = world.local_slice(range(len(dataset)))
    examples = share.examples
    rollouts = collector.rollouts(examples, sampling, sparsity, indices)
    summary = None
    failures: dict[str, int] = {}
    if len(share):
        result = evaluate(
            lambda prompts, n: rollouts,
            share,
            rewards,
            k,
            correct=config.rewards.correct,
            threshold=config.rewards.threshold,
        )
        failures = result.failures
        error = result.error
        if error is None:  # a single problem
            error = math.sqrt(result.accuracy * (1 - result.accuracy) / k)
        summary = EvalSummary(
            accuracy=result.accuracy,
            stderr=error,
            n=len(share) * k,
            length=result.lengths.mean,
            kv_saved=result.kv.saved,
            pass_at_k=result.pass_at[k] if k > 1 else None,
        )
    if not collector.graded:
        # Only the reward behind the accuracy must work: the others may need fields that only the training data have.
        judge = config.rewards.correct or rewards.names[0]
        collector.raise_if_ungraded([judge], failures, len(share) * k, "first evaluation's")
    return pooled([rank_summary for rank_summary in world.all_gather(summary) if rank_summary is not None])


def pooled(summaries: list[EvalSummary]) -> EvalSummary:
    """The summaries of independent shares as one: means weighted by answers, standard errors added as variances."""
    total = sum(summary.n for summary in summaries)

    def mean(name: str) -> float:
        return sum(summary.n * getattr(summary, name) for summary in summaries) / total

    stderr = math.sqrt(sum((summary.n * summary.stderr) ** 2 for summary in summaries)) / total
    several = None if summaries[0].pass_at_k is None else mean("pass_at_k")
    return EvalSummary(mean("accuracy"), stderr, total, mean("length"), mean("kv_saved"), several)
