"""Held-out evaluation during a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from alula.config.run import RunConfig
from alula.data import Dataset
from alula.engine.rollout import Sampling
from alula.evals import evaluate, metrics
from alula.evals.result import EvalResult
from alula.rewards import Rewards
from alula.run.run_log import RunLogger
from alula.sparsity.policy import DENSE
from alula.trainer.collector import Collector
from alula.trainer.first_failures import raise_if_ungraded
from alula.trainer.health import HealthMonitor


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


class HeldOutEvaluation:
    """Evaluates the policy on `sets` when that is due, and keeps the scores."""

    def __init__(
        self,
        config: RunConfig,
        sets: Sequence[Dataset],
        collector: Collector,
        rewards: Rewards,
        health: HealthMonitor,
        logger: RunLogger,
    ) -> None:
        self.config, self.sets, self.collector, self.rewards = config, sets, collector, rewards
        self.health, self.logger = health, logger
        self.evaluated = -1
        """Step of the last evaluation."""
        self.accuracy: float | None = None
        """Accuracy of the dense policy in that evaluation, the mean over all sets."""
        self.best: float | None = None
        """The best of them."""
        self.scores: dict[str, Score] = {}
        """Last and best accuracy of the dense policy, by data set."""

    def due(self, step: int) -> bool:
        every = self.config.eval.every
        if not every or self.evaluated == step:
            return False
        return step % every == 0 or step == self.config.steps

    def evaluate(self, step: int) -> None:
        """Evaluate the dense policy; with `eval.sparse` the sparse one first, for comparison."""
        both = self.config.eval.sparse and not self.collector.sparsity.dense
        evaluations: list[tuple[str, str, EvalSummary]] = []
        for index, dataset in enumerate(self.sets):
            for policy in ("sparse", "dense") if both else ("dense",):
                self.logger.phase(f"evaluation ({dataset.name}, {policy})")
                k = self.config.eval.answers(index)
                result = evaluate_policy(self.config, self.collector, self.rewards, dataset, k, policy == "sparse")
                evaluations.append((dataset.name, policy, result))
                self.collector.stop.raise_if_stop_requested()
        for name, policy, result in evaluations:
            self.logger.log_eval(step, name, policy, result.numbers())
            for warning in self.health.observe_eval(name, policy, accuracy=result.accuracy, stderr=result.stderr):
                self.logger.event(step, *warning)
        dense = {name: result.accuracy for name, policy, result in evaluations if policy == "dense"}
        self.evaluated, self.accuracy = step, fmean(dense.values())
        self.best = self.accuracy if self.best is None else max(self.best, self.accuracy)
        if len(dense) > 1:
            dense[f"mean of {len(dense)} data sets"] = self.accuracy
        self.scores = {name: add_score(self.scores.get(name), step, value) for name, value in dense.items()}

    def accuracy_after(self, step: int) -> float | None:
        """None unless this step was evaluated."""
        return self.accuracy if self.evaluated == step else None

    def is_best(self, step: int) -> bool:
        accuracy = self.accuracy_after(step)
        return accuracy is not None and accuracy == self.best

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("evaluated", "accuracy", "best", "scores")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.state_dict():
            setattr(self, name, state[name])


def evaluate_policy(
    config: RunConfig, collector: Collector, rewards: Rewards, dataset: Dataset, k: int, sparse: bool
) -> EvalSummary:
    """Evaluate the dense policy, or the sparse one in force, with k answers per problem. Every rank answers its share
    of the problems. The seed is always the same, so that only the weights differ."""
    e, world = config.eval, collector.world
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
        failures = result.failures if result else {}
        raise_if_ungraded([judge], failures, len(share) * k, "first evaluation's", world)
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
