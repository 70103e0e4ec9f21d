"""Rollout collection: prompts → rollouts under the policy in force → rerolls → rewards.

Reroll regenerates a vetoed rollout densely from its first vetoed token. Dynamic sampling draws further groups until
enough of them have different rewards.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from alula.config.run import RunConfig
from alula.data import Example, PromptStream
from alula.distributed import World
from alula.engine.engine import Engine
from alula.engine.rollout import Rollout, Sampling
from alula.environments.episodes import Episodes, Start
from alula.errors import RunFailed
from alula.learner.learner import Learner
from alula.mismatch.control.monitor import Monitor
from alula.objective.advantages import has_signal
from alula.objective.correction import correct
from alula.rewards import Rewards
from alula.sparsity.policy import DENSE, Sparsity
from alula.trainer.batch import RolloutBatch
from alula.trainer.reroll import continuations, restarts, spliced
from alula.trainer.signals import StopRequest
from alula.trainer.step_metrics import Clock, sum_over_ranks

if TYPE_CHECKING:
    from alula.distill.run_stage import RunDistiller


class Collector:
    """Generates and grades the rollouts of each step. Owns the sparse policy in force (`sparsity`).

    With `episodes`, an environment answers the policy's turns, and rollouts are episodes.
    `distill` chooses the prompts whose evictions are recorded. `show_phase` is called with the name of each phase,
    `show_progress` with the rollouts and tokens that are finished, of about how many.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        learner: Learner,
        rewards: Rewards,
        monitor: Monitor,
        world: World,
        stop: StopRequest,
        episodes: Episodes | None = None,
        distill: "RunDistiller | None" = None,
        show_phase: Callable[[str], Any] = lambda phase: None,
        show_progress: Callable[[int, int, int, int], Any] = lambda *numbers: None,
    ) -> None:
        self.config, self.engine, self.learner = config, engine, learner
        self.rewards, self.monitor, self.world, self.stop = rewards, monitor, world, stop
        self.episodes, self.distill = episodes, distill
        self.show_phase, self.show_progress = show_phase, show_progress
        self.mean_lengths: dict[int, float] = {}
        """Mean tokens of the last rollouts, by their longest answer."""
        self.correction = config.objective.correction
        self.sparsity = monitor.recommended
        """The policy that the next rollouts are sampled under."""
        self.graded = False
        """Whether every reward has graded some answer since the process started."""

    def collect(self, step: int, stream: PromptStream, clock: Clock) -> RolloutBatch:
        """This rank's share of a step: `sampling.prompts` groups. Dynamic sampling draws further rounds until that
        many groups have a signal, or `max_rounds`."""
        s = self.config.sampling
        rounds: list[RolloutBatch] = []
        for number in range(s.max_rounds if s.dynamic else 1):
            with_signal = sum(r.drawn_groups - r.no_signal_groups for r in rounds)
            if rounds and sum_over_ranks(self.world, with_signal) >= s.prompts:
                break
            indices = range(stream.seen, stream.seen + s.prompts)
            examples = self.world.local_slice(stream.next(s.prompts))
            rounds.append(self._collect_round(examples, self.world.local_slice(indices), step, number == 0, clock))
        batch = RolloutBatch.join(rounds)
        return batch if len(rounds) == 1 else self._choose_groups(batch)

    def _choose_groups(self, batch: RolloutBatch) -> RolloutBatch:
        """The first `sampling.prompts` groups of all ranks that have a signal, filled up with groups without."""
        signal = has_signal(torch.tensor(batch.rewards), batch.group)[:: batch.n].tolist()
        order, _ = self.world.global_order([(not has, index) for has, index in zip(signal, batch.prompt_indices)])
        return batch.choose([group for group, place in enumerate(order) if place < self.config.sampling.prompts])

    def adopt(self, sparsity: Sparsity) -> None:
        """Use another policy from now on, which the monitor watches."""
        self.sparsity = sparsity
        self.monitor.follow(sparsity)

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        sparsity: Sparsity,
        indices: Sequence[int],
        *,
        record: bool | list[bool] = False,
        keep_hidden: int | list[int] = 0,
    ) -> list[Rollout]:
        """`Engine.generate`, interrupted by a stop request. There may be no prompts. `indices` are those of the prompts
        among all ranks' prompts, so that random numbers do not depend on the number of ranks."""
        if not prompts:
            return []
        return self.engine.generate(
            prompts,
            sampling,
            sparsity,
            record=record,
            keep_hidden=keep_hidden,
            indices=indices,
            on_rollout=self._count(len(prompts) * sampling.n, sampling.max_new_tokens),
            progress=False,
        )

    def rollouts(
        self,
        examples: Sequence[Example],
        sampling: Sampling,
        sparsity: Sparsity,
        indices: Sequence[int],
        *,
        record: Sequence[bool] | None = None,
        keep_hidden: Sequence[int] | None = None,
        clock: Clock | None = None,
    ) -> list[Rollout]:
        """`sampling.n` rollouts per example, in order: single answers, or episodes if there is an environment.

        Time in which only environments work counts in the clock's phase `environment`.
        """
        records = list(record or [False] * len(examples))
        hidden = list(keep_hidden or [0] * len(examples))
        if self.episodes is None:
            prompts = [list(example.prompt_ids or ()) for example in examples]
            return self.generate(prompts, sampling, sparsity, indices, record=records, keep_hidden=hidden)
        starts = [
            Start(example.record(), self.seed("environment", index), index, sample, recorded, sample < kept)
            for example, index, recorded, kept in zip(examples, indices, records, hidden)
            for sample in range(sampling.n)
        ]
        idle = nullcontext if clock is None else lambda: clock.phase("environment")
        count = self._count(len(starts), self.config.most_sampled(sampling.max_new_tokens))
        return list(self.episodes.play(starts, sampling, sparsity, idle=idle, on_episode=count))

    def sampling(self, *purpose: object, n: int = 1) -> Sampling:
        """The run's sampling settings, with a seed for this purpose."""
        s = self.config.sampling
        return Sampling(
            n=n,
            max_new_tokens=s.max_new_tokens,
            temperature=s.temperature,
            seed=self.seed(*purpose),
            stop=tuple(s.stop),
        )

    def seed(self, *purpose: object) -> int:
        """A different seed for every purpose, the same on all ranks."""
        return random.Random(f"{self.config.seed}/{purpose}").getrandbits(62)

    def _recorded(self, step: int, indices: Sequence[int], first: bool) -> list[bool]:
        """Prompts whose evictions are recorded: those to distil, and the one whose rollouts are written."""
        distilled = self.distill.record(step, indices, self.sparsity) if self.distill else False
        recorded = [distilled] * len(indices) if isinstance(distilled, bool) else distilled
        written = first and self.world.rank == 0 and self.config.logging.rollouts_due(step)
        if written and self.sparsity.evict is not None:
            recorded[:1] = [True]
        return recorded

    def _collect_round(
        self, examples: list[Example], indices: Sequence[int], step: int, first: bool, clock: Clock
    ) -> RolloutBatch:
        """One round of dynamic sampling, or the only one. `indices` number the prompts of the whole run. The monitor
        watches the first round."""
        n, places = self.config.sampling.n, self.world.local_slice(range(self.config.sampling.prompts))
        self.show_phase("rollouts")
        with clock.phase("rollout"):
            rollouts = self.rollouts(
                examples,
                self.sampling("rollouts", n=n),
                self.sparsity,
                indices,
                record=self._recorded(step, indices, first),
                keep_hidden=self.monitor.keep_hidden(places) if first else None,
                clock=clock,
            )
        batch = RolloutBatch(rollouts, [e for e in examples for _ in range(n)], n, drawn_groups=len(examples))
        batch.drawn_tokens = sum(batch.lengths)
        if first:
            with clock.phase("mismatch"):
                batch.observed = self.monitor.step(rollouts)
            self.sparsity = batch.observed.sparsity or self.sparsity
        if self.correction.reroll:
            self._reroll(batch, self.seed("reroll"), clock)
        self.show_phase("rewards")
        with clock.phase("reward"):
            self._grade(batch)
        self.stop.raise_if_stop_requested()
        signal = has_signal(torch.tensor(batch.rewards), batch.group)[::n]
        batch.no_signal_groups = int((~signal).sum())
        return batch

    def _reroll(self, batch: RolloutBatch, seed: int, clock: Clock) -> None:
        """Continue vetoed rollouts densely. The reported mismatch stays that of the original samples."""
        temperature, device = self.config.sampling.temperature, self.world.device
        self.show_phase("scoring")
        with clock.phase("score"), self.engine.asleep():
            batch.dense = self.learner.score(batch.rollouts, temperature)
        sampled = batch.sampled(device)
        batch.log_ratios_before_reroll = [dense - sparse for dense, sparse in zip(batch.dense, sampled)]
        corrected = correct(
            torch.cat(batch.dense),
            torch.cat(sampled),
            batch.sequence(device),
            self.correction,
            sequences=len(batch.rollouts),
        )
        vetoed = {
            i: (batch.rollouts[i], int(batch.rollouts[i].sampled.nonzero()[k]))
            for i, k in enumerate(corrected.first_vetoed.tolist())
            if k >= 0
        }
        batch.rerolled = [i in vetoed for i in range(len(batch.rollouts))]
        self.show_phase("rerolls")
        with clock.phase("rollout"):
            for i, suffix in self._continued(batch, vetoed, seed):
                rollout, first = vetoed[i]
                batch.drawn_tokens += suffix.sampled_tokens
                batch.rollouts[i] = spliced(rollout, first, suffix, self.engine.tokenizer)
        self.show_phase("scoring")
        with clock.phase("score"), self.engine.asleep():
            rescored = self.learner.score([batch.rollouts[i] for i in vetoed], temperature)
            for i, logprobs in zip(vetoed, rescored):
                batch.dense[i] = logprobs

    def _count(self, rollouts: int, longest: int) -> Callable[[Rollout], None]:
        """Called with each finished rollout: shows the progress, and stops at a request."""
        about = round(rollouts * self.mean_lengths.get(longest, longest))
        done = tokens = 0

        def count(rollout: Rollout) -> None:
            nonlocal done, tokens
            done, tokens = done + 1, tokens + len(rollout)
            self.show_progress(done, rollouts, tokens, max(about, tokens))
            if done == rollouts:
                self.mean_lengths[longest] = tokens / rollouts
            self.stop.raise_if_stop_requested(all_ranks=False)

        return count

    def _continued(
        self, batch: RolloutBatch, vetoed: Mapping[int, tuple[Rollout, int]], seed: int
    ) -> Iterator[tuple[int, Rollout]]:
        """Dense continuations of vetoed rollouts from their first vetoed token; an environment is replayed first."""
        if not vetoed:
            return
        if self.episodes is not None:
            seeds = [self.seed("environment", rollout.prompt_index) for rollout in batch.rollouts]
            starts = restarts(vetoed, seeds, batch.examples)
            yield from zip(vetoed, self.episodes.play(starts, replace(self.sampling(), seed=seed), DENSE))
            return
        for suffix in self.engine.stream(continuations(self.engine, vetoed, seed)):
            yield suffix.prompt_index, suffix
            self.stop.raise_if_stop_requested(all_ranks=False)

    def _grade(self, batch: RolloutBatch) -> None:
        graded = self.rewards.score(
            [rollout.decoded() for rollout in batch.rollouts],
            [example.record() for example in batch.examples],
            finishes=[rollout.finish for rollout in batch.rollouts],
            lengths=batch.lengths,
            episodes=[rollout.reward for rollout in batch.rollouts],
        )
        if not self.graded:
            self._raise_if_all_failed(batch)
            reasons = Counter(reason for _, reason in graded.failures)
            self.raise_if_ungraded(self.rewards.names, reasons, len(batch.rollouts), "run's first")
            self.graded = True
        batch.rewards, batch.reward_parts = graded.total, graded.parts
        batch.failures = [[] for _ in batch.rollouts]
        for i, reason in graded.failures:
            batch.failures[i].append(reason)

    def _raise_if_all_failed(self, batch: RolloutBatch) -> None:
        """Raise if the environment failed in every one of the run's first episodes. Every rank must call this."""
        reasons = [reason for share in self.world.all_gather(batch.environment_failures()) for reason in share]
        count = sum_over_ranks(self.world, len(batch.rollouts))
        if reasons and len(reasons) >= count:
            raise RunFailed(
                f"the environment failed in every one of the run's first {count:.0f} episodes, most often with "
                f"{Counter(reasons).most_common(1)[0][0]!r}. Correct it, or raise environment.timeout if it is only "
                "slow; `alula train --check` tries it on the data."
            )

    def raise_if_ungraded(self, names: list[str], failures: Mapping[str, int], count: int, which: str) -> None:
        """Raise if a reward failed on every answer: it would count 0 to the end of the run.

        `failures` counts the reasons of this rank's `count` answers. Every rank must call this.
        """
        shares = self.world.all_gather((dict(failures), count))
        answers = sum(count for _, count in shares)
        for name in names:
            prefix = f"{name}: "
            reasons: Counter[str] = Counter()
            for share, _ in shares:
                reasons.update({why: times for why, times in share.items() if why.startswith(prefix)})
            if reasons.total() >= answers:
                raise RunFailed(
                    f"the reward {name} failed on every one of the {which} {answers} answers, most often with "
                    f"{reasons.most_common(1)[0][0].removeprefix(prefix)!r}. Correct it, or raise rewards.timeout if "
                    "it is only slow; `alula train --check` tries it on the data."
                )
