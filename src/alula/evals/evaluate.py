"""Evaluates a model: generate, grade, summarise."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from alula.data.answers import final_answer
from alula.data.dataset import Dataset, Example
from alula.engine.rollout import kv_tokens, saved_share
from alula.errors import require, unknown
from alula.evals import metrics
from alula.evals.result import EvalResult, KVSummary, Lengths, Sample
from alula.rewards import Rewards

if TYPE_CHECKING:
    from alula.engine.rollout import Rollout

Generate = Callable[[list[Any], int], Sequence["Rollout"]]
"""(prompts, n) -> n rollouts per prompt, in the order of the prompts."""


def evaluate(
    generate: Generate,
    dataset: Dataset,
    rewards: Rewards,
    k: int = 1,
    *,
    answer_of: Callable[[str], str | None] | None = final_answer,
    correct: str | None = None,
    threshold: float = 1.0,
    model: str = "model",
    sparsity: str = "dense",
    keep_samples: int = 0,
) -> EvalResult:
    """Generate and grade k answers to every problem.

    An answer is correct if the reward `correct` (default: the first one) reaches `threshold`. `answer_of` extracts the
    answer that votes in maj@k (None: no maj@k, for programs). The first `keep_samples` answers are kept for reading.
    """
    require(k >= 1, f"k={k}: ask for at least one answer per problem.")
    judge = correct or rewards.names[0]
    if judge not in rewards.names:
        raise unknown("reward for correct=", judge, rewards.names)
    rollouts = generate([prompt_of(example) for example in dataset], k)
    assert len(rollouts) == len(dataset) * k, f"{len(dataset)} prompts, k={k}, but {len(rollouts)} rollouts"
    examples = [example for example in dataset for _ in range(k)]
    texts = [rollout.answer() for rollout in rollouts]
    graded = rewards.score(
        texts,
        [example.record() for example in examples],
        finishes=[rollout.finish for rollout in rollouts],
        lengths=[rollout.sampled_tokens for rollout in rollouts],
        episodes=[rollout.reward for rollout in rollouts],
    )
    correct_answers = [value >= threshold - 1e-9 for value in graded.parts[judge]]
    by_problem = [correct_answers[i : i + k] for i in range(0, len(correct_answers), k)]
    votes = [[answer_of(text) for text in texts[i : i + k]] for i in range(0, len(texts), k)] if answer_of else None
    samples = [
        Sample(
            i // k,
            examples[i].prompt,
            texts[i],
            examples[i].answer,
            correct_answers[i],
            graded.total[i],
            rollouts[i].sampled_tokens,
            rollouts[i].finish,
        )
        for i in range(min(keep_samples, len(texts)))
    ]
    return EvalResult(
        data=dataset.name,
        model=model,
        sparsity=sparsity,
        problems=len(dataset),
        k=k,
        accuracy=metrics.avg_at_k(by_problem, k),
        error=metrics.clustered_error(by_problem),
        pass_at={j: metrics.pass_at_k(by_problem, j) for j in sorted({*powers_of_two(k), k})},
        maj_at_k=None if votes is None else metrics.maj_at_k(by_problem, votes, k),
        reward=metrics.mean(graded.total),
        parts={name: metrics.mean(values) for name, values in graded.parts.items()},
        lengths=lengths_of(rollouts),
        kv=kv_of(rollouts),
        failures=dict(Counter(reason for _, reason in graded.failures)),
        samples=samples,
    )


def powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def prompt_of(example: Example) -> Any:
    return list(example.prompt_ids) if example.prompt_ids is not None else example.prompt


def lengths_of(rollouts: Sequence["Rollout"]) -> Lengths:
    lengths = [rollout.sampled_tokens for rollout in rollouts]
    p50, p90, p99 = (metrics.percentile(lengths, share) for share in (0.5, 0.9, 0.99))
    truncated = metrics.mean([float(rollout.finish == "length") for rollout in rollouts])
    return Lengths(metrics.mean(lengths), p50, p90, p99, max(lengths), truncated)


def kv_of(rollouts: Sequence["Rollout"]) -> KVSummary:
    """`saved` and `read` weight answers by their length."""
    held, dense = kv_tokens(rollouts)
    read = sum(rollout.kv.mean_read_tokens * rollout.sampled_tokens for rollout in rollouts)
    return KVSummary(
        saved=saved_share(held, dense),
        read=1 - saved_share(read, dense),
        mean_tokens=metrics.mean([rollout.kv.mean_tokens for rollout in rollouts]),
        mean_read_tokens=metrics.mean([rollout.kv.mean_read_tokens for rollout in rollouts]),
        peak_tokens=max(rollout.kv.peak_tokens for rollout in rollouts),
        peak_bytes=max(rollout.kv.peak_bytes for rollout in rollouts),
        evictions=metrics.mean([float(rollout.kv.evictions) for rollout in rollouts]),
    )
