"""Where rollouts come from: the interface that the trainer uses, whether engines run here or elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from alula.engine.rollout import Rollout
from alula.engine.schedule_plan import KVNeed
from alula.learner.learner import Learner
from alula.models.lora import Adapter
from alula.rollouts.job import Job
from alula.sparsity.policy import Sparsity

Idle = Callable[[], AbstractContextManager[Any]]
OnRollout = Callable[[Rollout], None]


class Rollouts(ABC):
    """Generates rollouts with the weights that were published last. Every rank must make the same calls."""

    @abstractmethod
    def submit(self, jobs: Sequence[Job], *, least: int | None = None) -> int:
        """Queue this rank's jobs; returns a ticket for `collect`. They are answered with the weights that were
        published last, or with `least`: by that version or a later one, and they go on over updates."""

    @abstractmethod
    def collect(
        self, ticket: int, on_rollout: OnRollout = lambda rollout: None, idle: Idle = nullcontext
    ) -> list[Rollout]:
        """The rollouts of all jobs of a ticket, in their order. `on_rollout` is called with each as it finishes, and
        may raise to stop; `idle` is entered while only environments work."""

    def generate(
        self, jobs: Sequence[Job], on_rollout: OnRollout = lambda rollout: None, idle: Idle = nullcontext
    ) -> list[Rollout]:
        return self.collect(self.submit(jobs), on_rollout, idle)

    @abstractmethod
    def acceptance(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """α at every token of rollouts that kept their hidden states (`Engine.acceptance`)."""

    @abstractmethod
    def publish(self, learner: Learner, version: int) -> None:
        """Generate with the learner's weights from now on."""

    @abstractmethod
    def publish_adapter(self, adapter: Adapter) -> None:
        """Use another adapter in sparse rollouts from now on."""

    @abstractmethod
    def measure_queries(self, text: list[list[int]]) -> None:
        """Measure the model's queries on this text, now and after every update (`triattention`)."""

    @abstractmethod
    def asleep(self) -> AbstractContextManager[None]:
        """Release the KV memory that the learner needs, inside a `with` block."""

    @abstractmethod
    def check(self, sparsity: Sparsity) -> None:
        """Raise for a policy that does not fit."""

    @abstractmethod
    def need(self, job: Job) -> KVNeed:
        """KV tokens and pages of a job, and the limits above which it raises."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Most KV memory in use at a time since the last call, of the engines that this rank counts."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the engines since the last call."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Give up what is unfinished, and end what runs elsewhere."""
