"""The result of an evaluation."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Lengths:
    """Generated tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    longest: int
    truncated: float
    """Fraction of answers cut off by the token limit."""


@dataclass(frozen=True)
class KVSummary:
    saved: float
    """Fraction of the dense policy's KV (tokens × steps) that was not held."""
    read: float
    """Fraction of the dense policy's KV that attention read, in a sparse layer: under a selector less than was held."""
    mean_tokens: float
    """KV tokens held per answer, averaged over the answer's steps, then over answers."""
    mean_read_tokens: float
    peak_tokens: int
    peak_bytes: int
    """Maximum over answers."""
    evictions: float
    """Mean per answer."""


@dataclass(frozen=True)
class Sample:
    """One answer, kept for reading."""

    problem: int
    prompt: Any
    completion: str
    answer: Any
    """The reference answer."""
    correct: bool
    reward: float
    tokens: int
    finish: str


@dataclass(frozen=True)
class EvalResult:
    """A model's answers to one data set under one policy, graded."""

    data: str
    """The data set's name."""
    model: str
    sparsity: str
    """The policy as text."""
    problems: int
    k: int
    """Samples per problem."""
    accuracy: float
    """avg@k: the mean over all samples. With k = 1 it is pass@1."""
    error: float | None
    """Standard error of the accuracy, clustered by problem; None for a single problem."""
    pass_at: dict[int, float]
    """pass@j for j = 1, 2, 4, ... and k: the unbiased chance that one of j answers is correct, estimated from k."""
    maj_at_k: float | None
    """None for answers that cannot vote: programs."""
    reward: float
    """Mean of the weighted sum of rewards."""
    parts: dict[str, float]
    """Mean of each reward, unweighted."""
    lengths: Lengths
    kv: KVSummary
    failures: dict[str, int] = field(default_factory=dict)
    """Answers that could not be graded, by reason."""
    samples: list[Sample] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
