"""Held-out evaluation during a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from alula.config.run import RunConfig
from alula.data import Dataset
from alula.distributed import World
from alula.engine.rollout import Sampling
from alula.evals import evaluate, metrics
from alula.evals.result import EvalResult
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
    result = None
    if len(share):
        result = evaluate(
            lambda prompts, n: rollouts,
            share,
            rewards,
            k,
            answer_of=None,
            correct=config.rewards.correct,
            threshold=config.rewards.threshold,
            keep_samples=len(rollouts),
        )
    if not collector.graded:
        # Only the reward behind the accuracy must work: the others may need fields that only the training data have.
        judge = config.rewards.correct or rewards.names[0]
        collector.raise_if_ungraded([judge], result.failures if result else {}, len(share) * k, "first evaluation's")
    return pooled(list(filter(None, world.all_gather(result and RankShare.of(result)))))


@dataclass(frozen=True)
class RankShare:
    """What one rank measured on its share of the problems."""

    correct: list[list[bool]]
    """Its answers, by problem."""
    length: float
    kv_saved: float

    @classmethod
    def of(cls, result: EvalResult) -> "RankShare":
        correct = [sample.correct for sample in result.samples]
        by_problem = [correct[i : i + result.k] for i in range(0, len(correct), result.k)]
        return cls(by_problem, result.lengths.mean, result.kv.saved)


def pooled(shares: Sequence[RankShare]) -> EvalSummary:
    """The results on all problems, whichever rank had them."""
    graded = [answers for share in shares for answers in share.correct]
    k, sizes = len(graded[0]), [len(share.correct) for share in shares]
    accuracy, error = metrics.avg_at_k(graded, k), metrics.clustered_error(graded)
    if error is None:  # a single problem
        error = math.sqrt(accuracy * (1 - accuracy) / k)
    return EvalSummary(
        accuracy=accuracy,
        stderr=error,
        n=len(graded) * k,
        length=sum(size * share.length for size, share in zip(sizes, shares)) / len(graded),
        kv_saved=sum(size * share.kv_saved for size, share in zip(sizes, shares)) / len(graded),
        pass_at_k=metrics.pass_at_k(graded, k) if k > 1 else None,
    )
