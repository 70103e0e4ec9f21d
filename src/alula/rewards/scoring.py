"""The weighted sum of several rewards: `Rewards(terms).score(completions, examples)`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alula.cpus import available_cpus
from alula.data.answers import reference_text
from alula.errors import SettingError, check_options, one_or_more, require, unknown
from alula.rewards import graders
from alula.rewards.length import length_reward
from alula.rewards.pool import Job, Outcome, WorkerPool
from alula.rewards.task import task_reward
from alula.settings import RewardSettings, RewardTerm


@dataclass
class RewardBatch:
    """The rewards of a batch of answers, in its order."""

    total: list[float]
    """Weighted sum over the rewards."""
    parts: dict[str, list[float]]
    """Unweighted value of each reward. A second reward of the same name is called `name#2`."""
    failures: list[tuple[int, str]]
    """Index and reason of answers that could not be graded; that reward is 0 for them."""


@dataclass(frozen=True)
class Answers:
    """The answers to score: completion, example, finish, length in tokens and environment's reward of each."""

    completions: Sequence[str]
    examples: Sequence[Mapping[str, Any]]
    finishes: Sequence[str] | None
    lengths: Sequence[int] | None
    episodes: Sequence[float | None] | None = None

    def __post_init__(self) -> None:
        count = len(self.completions)
        for name in ("examples", "finishes", "lengths", "episodes"):
            given = getattr(self, name)
            if given is not None and len(given) != count:
                raise SettingError(f"rewards: {count} completions but {len(given)} {name}; give one for each.")


Scorer = Callable[[Answers], Sequence[float]]
"""A reward that runs in this process."""


class Rewards:
    """Scores answers. Rewards that execute third-party code run in `workers` killable processes, with `timeout` seconds
    per answer and `memory` GiB per process. A name alone is that reward with weight 1."""

    def __init__(
        self,
        terms: str | Sequence[RewardTerm | str],
        *,
        timeout: float = 10.0,
        workers: int | None = None,
        memory: float = 4.0,
    ) -> None:
        self.terms = [RewardTerm(name=term) if isinstance(term, str) else term for term in one_or_more(terms)]
        require(len(self.terms) > 0, "rewards: name at least one reward.")
        require(timeout > 0, f"reward timeout={timeout}: must be above 0 seconds.")
        size = min(4, available_cpus()) if workers is None else workers
        require(size >= 1, f"reward workers={workers}: must be at least 1.")
        require(memory > 0, f"reward memory={memory}: must be above 0 GiB.")
        self.names = distinct([term.name for term in self.terms])
        self._local: dict[str, Scorer] = {}
        self._remote: list[str] = []
        graders_to_load: list[tuple[str, dict[str, Any]]] = []
        for name, term in zip(self.names, self.terms):
            scorer = local_scorer(term)
            if scorer is not None:
                self._local[name] = scorer
            else:
                self._remote.append(name)
                graders_to_load.append((term.name, dict(term.options)))
        self._pool = WorkerPool(graders_to_load, timeout, size, round(memory * 2**30)) if graders_to_load else None

    def start(self) -> None:
        """Load every grader now instead of at the first batch, so that a wrong name is reported early."""
        if self._pool:
            self._pool.start()

    def close(self) -> None:
        """End the grading processes."""
        if self._pool:
            self._pool.close()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(
        self,
        completions: Sequence[str],
        examples: Sequence[Mapping[str, Any]],
        finishes: Sequence[str] | None = None,
        lengths: Sequence[int] | None = None,
        episodes: Sequence[float | None] | None = None,
    ) -> RewardBatch:
        """Grade all answers. `finishes` is how each rollout ended ("stop", "length", …), `lengths` its tokens,
        `episodes` what an environment gave it."""
        answers = Answers(completions, examples, finishes, lengths, episodes)
        return self._sum(answers, self._pool.run(self._jobs(answers)) if self._pool else [])

    def begin(self, answers: Answers) -> Callable[[], RewardBatch]:
        """Let the workers grade the answers while the caller does something else; the function that is returned waits
        for them. Rewards of this process, which may use the GPU, are computed there. `close` ends the grading."""
        outcomes = self._pool.submit(self._jobs(answers)) if self._pool else None
        return lambda: self._sum(answers, outcomes.result() if outcomes else [])

    def _jobs(self, answers: Answers) -> list[Job]:
        """Jobs of every reward that runs in the workers."""
        pairs = list(zip(answers.completions, answers.examples))
        return [(grader, c, e) for grader in range(len(self._remote)) for c, e in pairs]

    def _sum(self, answers: Answers, outcomes: Sequence[Outcome]) -> RewardBatch:
        """The weighted sum, from the workers' outcomes and the rewards of this process."""
        count = len(answers.completions)
        failures: list[tuple[int, str]] = []
        parts = {name: list(scorer(answers)) for name, scorer in self._local.items()}
        for g, name in enumerate(self._remote):
            graded = outcomes[g * count : (g + 1) * count]
            parts[name] = [value for value, _ in graded]
            failures += [(i, f"{name}: {reason}") for i, (_, reason) in enumerate(graded) if reason is not None]
        for name, values in parts.items():
            for i, value in enumerate(values):
                if not math.isfinite(value):
                    failures.append((i, f"{name}: the reward is {value}"))
                    values[i] = 0.0
        parts = {name: parts[name] for name in self.names}
        weights = [term.weight for term in self.terms]
        total = [sum(w * v for w, v in zip(weights, row)) for row in zip(*parts.values())]
        return RewardBatch(total, parts, sorted(failures))


def check(terms: Sequence[RewardTerm]) -> None:
    """Raise for rewards that the workers could not load, without starting workers or loading reward models."""
    for term in terms:
        kind, _, folder = term.name.partition(":")
        if kind == "model" and folder:
            from alula.rewards.model import check_exists

            check_exists(folder)
        elif local_scorer(term) is None:
            graders.build(term.name, term.options)


TRIAL_EXAMPLES = 3
"""Examples that a reward is tried on; some of them may be unusual."""


def try_out(settings: RewardSettings, examples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean grade of each reward on the first examples, each with its reference answer as completion (empty text
    without a reference). Raises if a reward can grade none of them. Reward models are not loaded."""
    trial = examples[:TRIAL_EXAMPLES]
    answers = ["" if example.get("answer") is None else reference_text(example["answer"]) for example in trial]
    grades: dict[str, float] = {}
    for term in settings.use:
        if term.name == "environment" or term.name.startswith("model:"):
            continue
        with Rewards([term], timeout=settings.timeout, workers=1, memory=settings.memory) as rewards:
            try:
                lengths = [len(answer.split()) for answer in answers]
                batch = rewards.score(answers, trial, ["stop"] * len(trial), lengths)
                failures = batch.failures
                grades[term.name] = sum(batch.parts[term.name]) / len(trial)
            except SettingError:
                raise
            except Exception as error:  # from a reward in this process
                failures = [(i, f"{term.name}: {type(error).__name__}: {error}") for i in range(len(trial))]
        require(
            len(failures) < len(trial),
            f"reward {failures[0][1] if failures else ''} (tried on the reference answers of the first examples, such "
            f"as {answers[0]!r}); correct it.",
        )
    return grades


def local_scorer(term: RewardTerm) -> Scorer | None:
    """The scorer of a reward that runs in this process; None for one that runs in a worker."""
    kind, _, rest = term.name.partition(":")
    if term.name in ("math", "code", "format") or (kind == "reasoning-gym" and rest):
        return None
    if term.name == "environment":
        return configured(term, environment_reward)
    if term.name == "length":
        return configured(term, length_reward)
    if kind == "task" and rest:
        return configured(term, task_reward, rest)
    if kind == "model" and rest:
        from alula.rewards.model import ModelReward

        return configured(term, ModelReward, rest)
    if graders.is_function(term.name):
        return None
    known = [
        "math",
        "code",
        "format",
        "length",
        "environment",
        "reasoning-gym:<task>",
        "task:<name>",
        "model:<folder>",
        "package.module:function",
    ]
    raise unknown("reward", term.name, known)


def environment_reward() -> Scorer:
    """What the environment gave each episode."""
    return lambda answers: [reward or 0.0 for reward in answers.episodes or ()]


def configured(term: RewardTerm, build: Callable[..., Scorer], *arguments: str) -> Scorer:
    """The scorer with the term's options."""
    check_options(build, term.options, f"reward {term.name}")
    return build(*arguments, **term.options)


def distinct(names: Sequence[str]) -> list[str]:
    """Names with `#2`, `#3`, … appended to repetitions."""
    return [f"{n}#{k}" if (k := names[: i + 1].count(n)) > 1 else n for i, n in enumerate(names)]
