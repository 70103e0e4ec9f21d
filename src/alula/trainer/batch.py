"""The rollouts of a step on this rank, with everything that is known about them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alula.data.dataset import Example, prompt_text, shuffled
from alula.distributed import World
from alula.engine.rollout import Rollout
from alula.environments.episodes import Episode
from alula.mismatch.control.monitor import Observation
from alula.objective import ragged
from alula.objective.advantages import has_signal
from alula.rewards import RewardBatch


@dataclass
class RolloutBatch:
    """Rollouts in groups: those of one prompt are adjacent."""

    rollouts: list[Rollout]
    examples: list[Example]
    """The prompt's example, per rollout."""
    n: int
    """Rollouts per group."""
    rewards: list[float] = field(default_factory=list)
    reward_parts: dict[str, list[float]] = field(default_factory=dict)
    """Each reward before weighting."""
    failures: list[list[str]] = field(default_factory=list)
    """Per rollout: why it could not be graded, one reason for every reward that failed."""
    dense: list[Tensor] = field(default_factory=list)
    """Old log-probs [sampled tokens] of each rollout under the dense policy. If scoring is skipped the update fills in
    what it computes."""
    reference: list[Tensor] = field(default_factory=list)
    """Log-probs under the initial policy. Empty without a KL."""
    rerolled: list[bool] = field(default_factory=list)
    log_ratios_before_reroll: list[Tensor] = field(default_factory=list)
    """log ξ of each rollout as it was sampled. Empty without reroll."""
    observed: Observation = field(default_factory=Observation)
    """What the monitor measured."""
    drawn_groups: int = 0
    no_signal_groups: int = 0
    """Groups of equal rewards among the drawn ones, before dynamic sampling chose."""
    drawn_tokens: int = 0
    """All generated tokens, including groups that were not chosen and tokens that a reroll replaced."""
    grading: Callable[[], RewardBatch] | None = None
    """Waits for the rewards, while the workers compute them."""

    @property
    def group(self) -> Tensor:
        """int64 [N]: the group of each rollout."""
        return torch.arange(len(self.rollouts)) // self.n

    @property
    def groups(self) -> int:
        return len(self.rollouts) // self.n

    @property
    def prompt_indices(self) -> list[int]:
        """The index of each group's prompt among all prompts of the run."""
        return [rollout.prompt_index for rollout in self.rollouts[:: self.n]]

    @property
    def lengths(self) -> list[int]:
        """Sampled tokens of each rollout. Given ones have no log-probs: they are left out here, and with them from
        loss, correction, vetoes and lengths."""
        return [rollout.sampled_tokens for rollout in self.rollouts]

    def sampled(self, device: torch.device) -> list[Tensor]:
        """Log-probs of each rollout's sampled tokens under the policy that sampled them."""
        return [rollout.sampler_logprobs()[rollout.sampled].to(device) for rollout in self.rollouts]

    def sequence(self, device: torch.device) -> Tensor:
        """int64 [T]: the rollout of each sampled token."""
        return ragged.sequence(self.lengths, device)

    def trainable_mask(self, mask_truncated: bool) -> Tensor:
        """bool [N]: excludes rollouts that failed or were aborted, and truncated ones if `mask_truncated`."""
        excluded = ("error", "aborted", "length") if mask_truncated else ("error", "aborted")
        return torch.tensor([r.finish not in excluded for r in self.rollouts], dtype=torch.bool)

    def environment_failures(self) -> list[str]:
        """Why environments were given up: one reason for each failed episode."""
        return [r.failure for r in self.rollouts if isinstance(r, Episode) and r.failure is not None]

    def unclosed_environments(self) -> list[str]:
        """Why environments could not be closed, those of earlier episodes included."""
        return [reason for r in self.rollouts if isinstance(r, Episode) for reason in r.unclosed]

    def counted_mask(self) -> Tensor | None:
        """bool [N]: excludes episodes whose environment failed, which is not the policy's doing; None without any."""
        counted = [not (isinstance(r, Episode) and r.failure) for r in self.rollouts]
        return None if all(counted) else torch.tensor(counted, dtype=torch.bool)

    def has_signal(self) -> Tensor:
        """bool [groups]: whether the rewards of a group differ, of episodes whose environment did not fail."""
        return has_signal(torch.tensor(self.rewards), self.group, self.counted_mask())[:: self.n]

    def choose(self, groups: list[int]) -> "RolloutBatch":
        """Some of the groups, in the given order."""
        keep = [g * self.n + i for g in groups for i in range(self.n)]

        def pick(values: list[Any]) -> list[Any]:
            return [values[i] for i in keep] if values else []

        return RolloutBatch(
            pick(self.rollouts),
            pick(self.examples),
            self.n,
            pick(self.rewards),
            {name: pick(values) for name, values in self.reward_parts.items()},
            pick(self.failures),
            pick(self.dense),
            pick(self.reference),
            pick(self.rerolled),
            pick(self.log_ratios_before_reroll),
            self.observed,
            self.drawn_groups,
            self.no_signal_groups,
            self.drawn_tokens,
        )

    def completions(self, count: int, vetoed: list[bool]) -> list[dict[str, Any]]:
        """One rollout from each of the first `count` groups, for completions.jsonl."""
        rows = []
        for group in range(min(count, self.groups)):
            i = group * self.n + group % self.n
            rollout = self.rollouts[i]
            rows.append(
                {
                    "prompt": prompt_text(self.examples[i].prompt),
                    "completion": rollout.transcript if isinstance(rollout, Episode) else rollout.text,
                    "reward": self.rewards[i],
                    "finish": rollout.finish,
                    "vetoed": vetoed[i],
                }
            )
        return rows

    @classmethod
    def join(cls, rounds: list["RolloutBatch"]) -> "RolloutBatch":
        """All rounds of dynamic sampling as one batch. Changes the first."""
        first = rounds[0]
        lists = ("rollouts", "examples", "rewards", "failures", "dense", "rerolled", "log_ratios_before_reroll")
        for other in rounds[1:]:
            for name in lists:
                getattr(first, name).extend(getattr(other, name))
            for name, values in other.reward_parts.items():
                first.reward_parts[name].extend(values)
            for name in ("drawn_groups", "no_signal_groups", "drawn_tokens"):
                setattr(first, name, getattr(first, name) + getattr(other, name))
        return first


def assign_minibatches(batch: RolloutBatch, updates: int, unit: str, seed: int, world: World) -> Tensor:
    """int64 [N]: the optimizer step of each rollout. `unit` is `groups` (kept together) or `rollouts`.

    Groups are split in the order of their prompts, which the prompt stream has shuffled. Rollouts of a group are
    shuffled and dealt out in turn. Both depend on the prompts of the step only, and give all ranks equal shares.
    """
    order, groups = world.global_order(batch.prompt_indices)
    if unit == "groups":
        return torch.tensor(order, dtype=torch.int64).repeat_interleave(batch.n) * updates // max(groups, 1)
    dealt = [
        (position + turn) % updates
        for position, prompt in zip(order, batch.prompt_indices)
        for turn in shuffled(batch.n, seed, prompt)
    ]
    return torch.tensor(dealt, dtype=torch.int64)
