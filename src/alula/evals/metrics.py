"""Metrics of graded samples: `graded[problem][sample]` is whether a sample is correct."""

import math
from collections.abc import Sequence

from alula.errors import require

Graded = Sequence[Sequence[bool]]


def avg_at_k(graded: Graded, k: int) -> float:
    """Mean over problems of the fraction of their first k samples that is correct."""
    check_enough(graded, k)
    return mean([mean([float(sample) for sample in samples[:k]]) for samples in graded])


def pass_at_k(graded: Graded, k: int) -> float:
    """Unbiased probability that at least one of k samples is correct, from n >= k samples with c correct ones:
    1 - C(n-c, k) / C(n, k) (arXiv 2107.03374)."""
    check_enough(graded, k)
    return mean([1 - math.comb(len(s) - sum(s), k) / math.comb(len(s), k) for s in graded])


def maj_at_k(graded: Graded, answers: Sequence[Sequence[str | None]], k: int) -> float:
    """Fraction of problems where the most frequent answer of the first k samples is correct.

    All correct samples vote together, however the answer is written. Wrong samples vote by their text, so two forms of
    one wrong answer split its votes. A sample without an answer does not vote. Among n tied answers each counts 1/n.
    """
    check_enough(graded, k)
    return mean([majority(s[:k], a[:k]) for s, a in zip(graded, answers, strict=True)])


def majority(samples: Sequence[bool], answers: Sequence[str | None]) -> float:
    correct = object()
    votes: dict[object, int] = {}
    for sample, answer in zip(samples, answers, strict=True):
        if sample or answer is not None:
            choice = correct if sample else "".join(str(answer).split())
            votes[choice] = votes.get(choice, 0) + 1
    winners = [choice for choice, count in votes.items() if count == max(votes.values())]
    return float(correct in winners) / len(winners) if winners else 0.0


def clustered_error(graded: Graded) -> float | None:
    """Standard error of the fraction of correct samples, clustered by problem: samples of a problem are correlated
    (arXiv 2411.00640): sqrt(P / (P-1) · Σ_p (Σ_s (x_ps - x̄))²) / N, for P problems and N samples in all.
    None for a single problem."""
    problems, count = len(graded), sum(len(samples) for samples in graded)
    if problems < 2:
        return None
    average = sum(map(sum, graded)) / count
    spread = sum((sum(samples) - len(samples) * average) ** 2 for samples in graded)
    return math.sqrt(problems / (problems - 1) * spread) / count


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least a fraction `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def mean(values: Sequence[float]) -> float:
    require(len(values) > 0, "nothing to average: the evaluation has no problems.")
    return sum(values) / len(values)


def check_enough(graded: Graded, k: int) -> None:
    fewest = min((len(samples) for samples in graded), default=k)
    require(1 <= k <= fewest, f"k={k}: every problem needs at least k samples, and one has {fewest}.")
