"""A job: one prompt and how to answer it, as data that any engine can work on."""

from collections.abc import Sequence
from dataclasses import dataclass

from alula.engine.rollout import Sampling
from alula.environments.episodes import Start
from alula.sparsity.policy import DENSE, Sparsity


@dataclass(frozen=True)
class Job:
    """`sampling.n` rollouts of a prompt, or one episode that begins with `start`.

    All randomness is keyed by (sampling.seed, prompt_index, sample, position): the tokens are the same on any
    engine.
    """

    prompt_ids: Sequence[int]
    """Empty for an episode, whose environment gives the prompt."""
    sampling: Sampling
    sparsity: Sparsity = DENSE
    prompt_index: int = 0
    record: bool = False
    keep_hidden: int = 0
    """Rollouts that keep their hidden states, for the monitor."""
    sample_index: int | None = None
    """The sample that a single rollout counts as in its random key."""
    answered: int = 0
    """The last tokens of `prompt_ids` that begin the answer: they are searched for stop strings, too."""
    start: Start | None = None

    @property
    def rollouts(self) -> int:
        return 1 if self.start is not None else self.sampling.n
