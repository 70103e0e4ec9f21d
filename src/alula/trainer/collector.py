"""Rollout collection: prompts → rollouts under the policy in force → rerolls → rewards.

Reroll regenerates a vetoed rollout densely from its first vetoed token. Dynamic sampling draws further groups until
enough of them have different rewards.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from alula.config.run import RunConfig
from alula.data import Example, PromptStream
from alula.distributed import World
from alula.engine.rollout import Rollout, Sampling
from alula.environments.episodes import Start
from alula.learner.learner import Learner
from alula.mismatch.control.monitor import Monitor
from alula.objective.correction import correct
from alula.rewards import Answers, RewardBatch, Rewards
from alula.rollouts.job import Job
from alula.rollouts.rollouts import Rollouts
from alula.sparsity.policy import Sparsity
from alula.trainer.batch import RolloutBatch
from alula.trainer.first_failures import raise_if_environment_failed, raise_if_ungraded
from alula.trainer.reroll import continuations, restarts, spliced
from alula.trainer.signals import StopRequest
from alula.trainer.step_metrics import Clock, sum_over_ranks

if TYPE_CHECKING:
    from alula.distill.run_stage import RunDistiller


@dataclass(frozen=True)
class Drawn:
    """The prompts of a step, whose rollouts have begun."""

    step: int
    first: bool
    """False for further rounds of dynamic sampling."""
    examples: list[Example]
    ticket: int
    position: dict[str, Any]
    """The prompt stream's position after them."""
    seen: int


class Collector:
    """Generates and grades the rollouts of each step. Owns the sparse policy in force (`sparsity`).

    `rollouts` generates them: single answers, or episodes if the run has an environment. `distill` chooses the prompts
    whose evictions are recorded. `show_phase` is called with the name of each phase, `show_progress` with the rollouts
    and tokens that are finished, of about how many.
    """

    def __init__(
        self,
        config: RunConfig,
        stream: PromptStream,
        rollouts: Rollouts,
        tokenizer: Any,
        learner: Learner,
        rewards: Rewards,
        monitor: Monitor,
        world: World,
        stop: StopRequest,
        distill: "RunDistiller | None" = None,
        show_phase: Callable[[str], Any] = lambda phase: None,
        show_progress: Callable[[int, int, int, int], Any] = lambda *numbers: None,
    ) -> None:
        self.config, self.stream, self.engines, self.tokenizer = config, stream, rollouts, tokenizer
        self.learner = learner
        self.rewards, self.monitor, self.world, self.stop = rewards, monitor, world, stop
        self.distill = distill
        self.show_phase, self.show_progress = show_phase, show_progress
        self.mean_lengths: dict[int, float] = {}
        """Mean tokens of the last rollouts, by their longest answer."""
        self.correction = config.objective.correction
        self.sparsity = monitor.recommended
        """The policy that the next rollouts are sampled under."""
        self.drawn: deque[Drawn] = deque()
        """Steps whose rollouts have begun."""
        self.position, self.seen = stream.state_dict(), stream.seen
        """The prompt stream's position after the step that was collected last, and the prompts up to there."""
        self.graded = False
        """Whether every reward has graded some answer since the process started."""

    def collect(self, step: int, clock: Clock) -> RolloutBatch:
        """This rank's share of a step: `sampling.prompts` groups, whose grading has begun; `grade` waits for it.
        Dynamic sampling draws further rounds until that many groups have a signal, or `max_rounds`. With
        `rollouts.stale`, later steps are begun as well."""
        s = self.config.sampling
        last = min(step + self.config.rollouts.stale, self.config.steps)
        while not self.drawn or self.drawn[-1].step < last:
            self.drawn.append(self._draw(self.drawn[-1].step + 1 if self.drawn else step))
        rounds = [self._collect_round(self.drawn.popleft(), clock)]
        while s.dynamic and len(rounds) < s.max_rounds:
            with_signal = sum(r.drawn_groups - r.no_signal_groups for r in rounds)
            if sum_over_ranks(self.world, with_signal) >= s.prompts:
                break
            rounds.append(self._collect_round(self._draw(step, first=False), clock))
        batch = RolloutBatch.join(rounds)
        return batch if len(rounds) == 1 else self._choose_groups(batch)

    def _draw(self, step: int, first: bool = True) -> Drawn:
        """Take the next prompts of the stream, and let their rollouts begin."""
        stream = self.stream
        count, stale = self.config.sampling.prompts, self.config.rollouts.stale
        indices = self.world.local_slice(range(stream.seen, stream.seen + count))
        examples = self.world.local_slice(stream.next(count))
        jobs = self._jobs(
            examples,
            self.sampling("rollouts", n=self.config.sampling.n),
            self.sparsity,
            indices,
            record=self._recorded(step, indices, first),
            keep_hidden=self.monitor.keep_hidden(self.world.local_slice(range(count))) if first else None,
        )
        ticket = self.engines.submit(jobs, least=max(0, step - 1 - stale) if stale else None)
        return Drawn(step, first, examples, ticket, stream.state_dict(), stream.seen)

    def _choose_groups(self, batch: RolloutBatch) -> RolloutBatch:
        """The first `sampling.prompts` groups of all ranks that have a signal, filled up with groups without."""
        signal = batch.has_signal().tolist()
        order, _ = self.world.global_order([(not has, index) for has, index in zip(signal, batch.prompt_indices)])
        return batch.choose([group for group, rank in enumerate(order) if rank < self.config.sampling.prompts])

    def resume(self, position: Mapping[str, Any], sparsity: Sparsity) -> None:
        """Continue after this position of the prompt stream, under this policy."""
        self.stream.load_state_dict(dict(position))
        self.position, self.seen, self.sparsity = self.stream.state_dict(), self.stream.seen, sparsity

    def adopt(self, sparsity: Sparsity) -> None:
        """Use another policy from now on, which the monitor watches."""
        self.sparsity = sparsity
        self.monitor.follow(sparsity)

    def rollouts(
        self,
        examples: Sequence[Example],
        sampling: Sampling,
        sparsity: Sparsity,
        indices: Sequence[int],
        *,
        record: Sequence[bool] | None = None,
    ) -> list[Rollout]:
        """`sampling.n` rollouts per example, in order: single answers, or episodes if there is an environment. There
        may be no examples. `indices` are those of the prompts among all ranks' prompts, so that random numbers do not
        depend on the number of ranks. Every rank must call it."""
        jobs = self._jobs(examples, sampling, sparsity, indices, record)
        longest = self.config.most_sampled(sampling.max_new_tokens)
        return self.engines.generate(jobs, self._count(len(examples) * sampling.n, longest))

    def _jobs(
        self,
        examples: Sequence[Example],
        sampling: Sampling,
        sparsity: Sparsity,
        indices: Sequence[int],
        record: Sequence[bool] | None = None,
        keep_hidden: Sequence[int] | None = None,
    ) -> list[Job]:
        records = list(record or [False] * len(examples))
        hidden = list(keep_hidden or [0] * len(examples))
        if self.config.environment is None:
            prompts = [list(example.prompt_ids or ()) for example in examples]
            return [
                Job(prompt, sampling, sparsity, index, recorded, kept)
                for prompt, index, recorded, kept in zip(prompts, indices, records, hidden)
            ]
        return [
            Job(
                (),
                sampling,
                sparsity,
                index,
                start=Start(example.record(), self.seed("environment", index), index, sample, recorded, sample < kept),
            )
            for example, index, recorded, kept in zip(examples, indices, records, hidden)
            for sample in range(sampling.n)
        ]

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

    def _collect_round(self, drawn: Drawn, clock: Clock) -> RolloutBatch:
        """One round of dynamic sampling, or the only one. The monitor watches the first round."""
        n, examples, first = self.config.sampling.n, drawn.examples, drawn.first
        self.position, self.seen = drawn.position, drawn.seen
        self.show_phase("rollouts")
        with clock.phase("rollout"):
            longest = self.config.most_sampled(self.config.sampling.max_new_tokens)
            count = self._count(len(examples) * n, longest)
            rollouts = self.engines.collect(drawn.ticket, count, lambda: clock.phase("environment"))
        batch = RolloutBatch(rollouts, [e for e in examples for _ in range(n)], n, drawn_groups=len(examples))
        batch.drawn_tokens = sum(batch.lengths)
        if first:
            with clock.phase("mismatch"):
                batch.observed = self.monitor.step(rollouts)
            self.sparsity = batch.observed.sparsity or self.sparsity
        if self.correction.reroll:
            self._reroll(batch, self.seed("reroll"), clock)
        batch.grading = self._begin_grading(batch)
        self.stop.raise_if_stop_requested()
        if self.config.sampling.dynamic:  # the rewards tell whether another round follows
            self.grade(batch, clock)
        return batch

    def grade(self, batch: RolloutBatch, clock: Clock) -> None:
        """Wait for the rewards, which the workers compute since the rollouts ended. Every rank must call this."""
        if batch.grading is None:
            return
        self.show_phase("rewards")
        with clock.phase("reward"):
            graded, batch.grading = batch.grading(), None
            self._set_rewards(batch, graded)
        batch.no_signal_groups = int((~batch.has_signal()).sum())

    def _reroll(self, batch: RolloutBatch, seed: int, clock: Clock) -> None:
        """Continue vetoed rollouts densely. The reported mismatch stays that of the original samples."""
        temperature, device = self.config.sampling.temperature, self.world.device
        self.show_phase("scoring")
        with clock.phase("score"), self.engines.asleep():
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
            for (i, (rollout, first)), suffix in zip(vetoed.items(), self._continued(batch, vetoed, seed)):
                batch.drawn_tokens += suffix.sampled_tokens
                batch.rollouts[i] = spliced(rollout, first, suffix, self.tokenizer)
        self.show_phase("scoring")
        with clock.phase("score"), self.engines.asleep():
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

    def _continued(self, batch: RolloutBatch, vetoed: Mapping[int, tuple[Rollout, int]], seed: int) -> list[Rollout]:
        """Dense continuations of vetoed rollouts from their first vetoed token; an environment is replayed first."""
        if self.config.environment is None:
            jobs = continuations(vetoed, seed)
        else:
            seeds = [self.seed("environment", rollout.prompt_index) for rollout in batch.rollouts]
            jobs = restarts(vetoed, seeds, batch.examples, replace(self.sampling(), seed=seed))
        return self.engines.generate(jobs, lambda suffix: self.stop.raise_if_stop_requested(all_ranks=False))

    def _begin_grading(self, batch: RolloutBatch) -> Callable[[], RewardBatch]:
        answers = Answers(
            [rollout.answer() for rollout in batch.rollouts],
            [example.record() for example in batch.examples],
            finishes=[rollout.finish for rollout in batch.rollouts],
            lengths=batch.lengths,
            episodes=[rollout.reward for rollout in batch.rollouts],
        )
        return self.rewards.begin(answers)

    def _set_rewards(self, batch: RolloutBatch, graded: RewardBatch) -> None:
        if not self.graded:
            raise_if_environment_failed(batch, self.world)
            reasons = Counter(reason for _, reason in graded.failures)
            raise_if_ungraded(self.rewards.names, reasons, len(batch.rollouts), "run's first", self.world)
            self.graded = True
        batch.rewards, batch.reward_parts = graded.total, graded.parts
        batch.failures = [[] for _ in batch.rollouts]
        for i, reason in graded.failures:
            batch.failures[i].append(reason)
