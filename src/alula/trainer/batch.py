"""One rank's rollouts of a step with everything that is known about them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alula.data.dataset import Example, shuffled
from alula.engine.rollout import Rollout
from alula.objective import ragged


@dataclass
class Experience:
    """Rollouts group by group: those of one prompt stand together."""

    rollouts: list[Rollout]
    examples: list[Example]
    """Of each rollout."""
    rewards: list[float]
    parts: dict[str, list[float]]
    """Each reward unweighted."""
    failures: list[list[str]]
    """Why each answer could not be graded, one reason for every reward that failed."""
    n: int
    """Rollouts per group."""
    dense: list[Tensor] = field(default_factory=list)
    """Old log-probs [len] of each rollout under the dense policy; none in one-update mode."""
    reference: list[Tensor] = field(default_factory=list)
    """Log-probs under the initial policy, where there is a KL."""
    rerolled: list[bool] = field(default_factory=list)
    as_sampled: list[Tensor] = field(default_factory=list)
    """log ξ of each rollout as it was sampled, where some were rerolled since."""
    left_out: dict[int, Tensor] = field(default_factory=dict)
    """In one-update mode: old log-probs of the rollouts that the update does not compute."""
    drawn_groups: int = 0
    silent_groups: int = 0
    """How many of them had equal rewards, before dynamic sampling chose."""
    drawn_tokens: int = 0
    """All that were generated: of groups that were not chosen, and what a reroll replaced, too."""

    @property
    def group(self) -> Tensor:
        return torch.arange(len(self.rollouts)) // self.n

    @property
    def groups(self) -> int:
        return len(self.rollouts) // self.n

    def sparse(self, device: torch.device) -> list[Tensor]:
        """Log-probs under the policy that sampled."""
        return [rollout.sampler_logprobs().to(device) for rollout in self.rollouts]

    def sequence(self, device: torch.device) -> Tensor:
        """int64 [T]: the rollout of each token."""
        return ragged.sequence([len(rollout) for rollout in self.rollouts], device)

    def taught(self, mask_truncated: bool) -> Tensor:
        """bool [N]: rollouts that may teach something: not broken off, and not cut off where that is masked."""
        unfinished = ("error", "aborted", "length") if mask_truncated else ("error", "aborted")
        return torch.tensor([r.finish not in unfinished for r in self.rollouts], dtype=torch.bool)

    def choose(self, groups: list[int]) -> "Experience":
        """Some of the groups, in the order given."""
        keep = [g * self.n + i for g in groups for i in range(self.n)]

        def pick(values: list[Any]) -> list[Any]:
            return [values[i] for i in keep] if values else []

        return Experience(
            pick(self.rollouts),
            pick(self.examples),
            pick(self.rewards),
            {name: pick(values) for name, values in self.parts.items()},
            pick(self.failures),
            self.n,
            pick(self.dense),
            pick(self.reference),
            pick(self.rerolled),
            pick(self.as_sampled),
            drawn_groups=self.drawn_groups,
            silent_groups=self.silent_groups,
            drawn_tokens=self.drawn_tokens,
        )

    def completions(self, count: int, vetoed: list[bool]) -> list[dict[str, Any]]:
        """One rollout from each of the first `count` groups, for completions.jsonl."""
        rows = []
        for group in range(min(count, self.groups)):
            i = group * self.n + group % self.n
            rollout, prompt = self.rollouts[i], self.examples[i].prompt
            rows.append(
                {
                    "prompt": prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt),
                    "completion": rollout.text,
                    "reward": self.rewards[i],
                    "finish": rollout.finish,
                    "vetoed": vetoed[i],
                }
            )
        return rows

    @classmethod
    def join(cls, rounds: list["Experience"]) -> "Experience":
        whole = rounds[0]
        for other in rounds[1:]:
            for name in ("rollouts", "examples", "rewards", "failures", "dense", "rerolled", "as_sampled"):
                getattr(whole, name).extend(getattr(other, name))
            for name, values in other.parts.items():
                whole.parts[name].extend(values)
            for name in ("drawn_groups", "silent_groups", "drawn_tokens"):
                setattr(whole, name, getattr(whole, name) + getattr(other, name))
        return whole


def minibatches(experience: Experience, updates: int, unit: str, seed: tuple[int, ...]) -> Tensor:
    """int64 [N]: the optimizer step that each rollout goes into, by whole groups or by single rollouts.

    A seeded shuffle shared out as evenly as it goes: the same on every machine, and none where there is one step.
    """
    count = experience.groups if unit == "groups" else len(experience.rollouts)
    order = shuffled(count, *seed) if updates > 1 else list(range(count))
    step = torch.empty(count, dtype=torch.int64)
    step[torch.tensor(order, dtype=torch.int64)] = torch.arange(count) * updates // max(count, 1)
    return step.repeat_interleave(experience.n) if unit == "groups" else step
