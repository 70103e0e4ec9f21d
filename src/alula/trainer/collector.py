"""From prompts to rewarded rollouts: the engine samples, reroll repairs, dynamic sampling draws again.

Reroll: a vetoed rollout is generated again, densely, from its first vetoed token on."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from alula.config.run import RunConfig
from alula.data import Example, PromptStream
from alula.distributed import World
from alula.engine.engine import Engine
from alula.engine.rollout import KVUse, Rollout, Sampling
from alula.engine.sequence import Request
from alula.errors import RunFailed
from alula.learner.learner import Learner
from alula.mismatch.control.monitor import Monitor, Observed
from alula.objective.advantages import has_signal
from alula.objective.correction import correct
from alula.rewards import Rewards
from alula.sparsity.policy import DENSE, Sparsity
from alula.trainer.batch import RolloutBatch
from alula.trainer.signals import StopRequest
from alula.trainer.step_metrics import Clock

if TYPE_CHECKING:
    from alula.distill.run_stage import RunDistiller


class Collector:
    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        learner: Learner,
        rewards: Rewards,
        monitor: Monitor,
        world: World,
        stop: StopRequest,
        distill: "RunDistiller | None" = None,
    ) -> None:
        self.config, self.engine, self.learner = config, engine, learner
        self.rewards, self.monitor, self.world, self.stop = rewards, monitor, world, stop
        self.distill = distill
        self.observed = Observed()
        self.correction = config.correction
        self.say: Callable[[str], Any] = lambda phase: None
        self.graded = False
        """Whether every reward has graded some answer of a step since the process began."""

    @property
    def sparsity(self) -> Sparsity:
        return self.monitor.sparsity

    def collect(self, step: int, stream: PromptStream, clock: Clock) -> RolloutBatch:
        """This rank's share of a step: `sampling.prompts` groups, drawn again under dynamic sampling until so many
        have a signal or the rounds are used up."""
        s = self.config.sampling
        rounds: list[RolloutBatch] = []
        wanted = len(self.world.local_slice(range(s.prompts)))
        with_signal = 0
        for round_ in range(s.max_rounds if s.dynamic else 1):
            if self.world.all_max(max(0, wanted - with_signal)) == 0 and rounds:
                break
            examples = self.world.local_slice(stream.next(s.prompts))
            rounds.append(self._round(examples, (step, round_), clock))
            with_signal += rounds[-1].drawn_groups - rounds[-1].no_signal_groups
        whole = RolloutBatch.join(rounds)
        signal = has_signal(torch.tensor(whole.rewards), whole.group)[:: s.n].tolist()
        loud = [g for g, has in enumerate(signal) if has]
        silent = [g for g, has in enumerate(signal) if not has]
        return whole if len(rounds) == 1 else whole.choose(sorted((loud + silent)[:wanted]))

    def _round(self, examples: list[Example], place: tuple[int, int], clock: Clock) -> RolloutBatch:
        s = self.config.sampling
        self.say("rollouts")
        with clock.phase("rollout"):
            sampling = self.sampling("rollouts", *place, n=s.n)
            prompts = [list(example.prompt_ids or ()) for example in examples]
            record = self.distill.record(place, len(prompts), self.sparsity) if self.distill else False
            rollouts = self.generate(prompts, sampling, self.sparsity, watched=place[1] == 0, record=record)
        if place[1] == 0:
            with clock.phase("mismatch"):
                self.observed = self.monitor.step(rollouts)
        batch = RolloutBatch(rollouts, [e for e in examples for _ in range(s.n)], s.n)
        batch.drawn_tokens = sum(map(len, rollouts))
        if self.correction.reroll:
            self._reroll(batch, self.seed("reroll", *place), clock)
        self.say("rewards")
        with clock.phase("reward"):
            self._reward(batch)
        self.stop.raise_if_stop_requested()
        batch.drawn_groups = len(examples)
        signal = has_signal(torch.tensor(batch.rewards), batch.group)[:: s.n]
        batch.no_signal_groups = int((~signal).sum())
        return batch

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        sparsity: Sparsity | None,
        *,
        watched: bool = False,
        record: bool | list[bool] = False,
    ) -> list[Rollout]:
        """`Engine.generate`, which a request to stop can leave between two rollouts."""
        rollouts: list[Any] = [None] * (len(prompts) * sampling.n)
        if prompts:
            requests = self.engine.requests(prompts, sampling, sparsity, record=record)
            if watched:
                self.monitor.watch(requests)
            for rollout in self._stream(requests):
                rollouts[rollout.prompt_index * sampling.n + rollout.sample_index] = rollout
        return rollouts

    def _stream(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        for rollout in self.engine.stream(requests):
            yield rollout
            self.stop.raise_if_stop_requested(all_ranks=False)

    def _reroll(self, batch: RolloutBatch, seed: int, clock: Clock) -> None:
        """Vetoed rollouts get a dense continuation; the mismatch that is reported is that of what was sampled."""
        temperature, device = self.config.sampling.temperature, self.world.device
        self.say("scoring")
        with clock.phase("score"), self.engine.asleep():
            batch.dense = [scores.logprobs for scores in self.learner.score(batch.rollouts, temperature)]
        sparse = batch.sampled(device)
        batch.log_ratios_before_reroll = [dense - sampled for dense, sampled in zip(batch.dense, sparse)]
        corrected = correct(
            torch.cat(batch.dense),
            torch.cat(sparse),
            batch.sequence(device),
            self.correction,
            sequences=len(batch.rollouts),
        )
        vetoed = {i: (batch.rollouts[i], k) for i, k in enumerate(corrected.first_vetoed.tolist()) if k >= 0}
        batch.rerolled = [i in vetoed for i in range(len(batch.rollouts))]
        self.say("rerolls")
        with clock.phase("rollout"):
            if vetoed:
                for suffix in self._stream(continuations(self.engine, vetoed, seed)):
                    rollout, first = vetoed[suffix.prompt_index]
                    batch.drawn_tokens += len(suffix)
                    batch.rollouts[suffix.prompt_index] = spliced(rollout, first, suffix, self.engine.tokenizer)
        self.say("scoring")
        with clock.phase("score"), self.engine.asleep():
            again = self.learner.score([batch.rollouts[i] for i in vetoed], temperature)
            for i, scores in zip(vetoed, again):
                batch.dense[i] = scores.logprobs

    def _reward(self, batch: RolloutBatch) -> None:
        graded = self.rewards.score(
            [rollout.decoded() for rollout in batch.rollouts],
            [example.record() for example in batch.examples],
            finishes=[rollout.finish for rollout in batch.rollouts],
            lengths=[len(rollout) for rollout in batch.rollouts],
        )
        if not self.graded:
            reasons = Counter(reason for _, reason in graded.failures)
            self.refuse_ungraded(self.rewards.names, reasons, len(batch.rollouts), "run's first")
            self.graded = True
        batch.rewards, batch.reward_parts = graded.total, graded.parts
        batch.failures = [[] for _ in batch.rollouts]
        for i, reason in graded.failures:
            batch.failures[i].append(reason)

    def sampling(self, *words: object, n: int = 1) -> Sampling:
        """As the run samples, seeded for a purpose."""
        s = self.config.sampling
        return Sampling(n=n, max_new_tokens=s.max_new_tokens, temperature=s.temperature, seed=self.seed(*words))

    def refuse_ungraded(self, names: list[str], failures: Mapping[str, int], count: int, which: str) -> None:
        """A reward that fails on every answer counts 0 to the end of the run, whatever prompts and model are.

        `failures`: of this rank's `count` answers, by reason. Every rank must call this.
        """
        shares = self.world.all_gather((dict(failures), count))
        answers = sum(count for _, count in shares)
        for name in names:
            start = f"{name}: "
            reasons: Counter[str] = Counter()
            for share, _ in shares:
                reasons.update({why: times for why, times in share.items() if why.startswith(start)})
            if reasons.total() >= answers:
                raise RunFailed(
                    f"the reward {name} failed on every one of the {which} {answers} answers, most often with "
                    f"{reasons.most_common(1)[0][0].removeprefix(start)!r}. Correct it, or raise rewards.timeout where "
                    "it is only slow; `alula train --check` tries it on the data."
                )

    def seed(self, *words: object) -> int:
        """A seed of its own for every rank, step and purpose."""
        return random.Random(f"{self.config.seed}/{self.world.rank}/{words}").getrandbits(62)


def continuations(engine: Engine, rollouts: Mapping[int, tuple[Rollout, int]], seed: int) -> list[Request]:
    """A dense request for each (rollout, first vetoed token), known by its key in `prompt_index`.

    The prefix becomes part of the prompt, so its KV is whole again; as many tokens may follow as were left.
    """
    requests = []
    for index, (rollout, first) in rollouts.items():
        left = rollout.sampling.max_new_tokens - first
        sampling = replace(rollout.sampling, n=1, max_new_tokens=left, seed=seed + index)
        [request] = engine.requests([rollout.prompt_ids + rollout.token_ids[:first]], sampling, DENSE)
        request.prompt_index = index
        requests.append(request)
    return requests


def spliced(rollout: Rollout, first: int, suffix: Rollout, tokenizer: object) -> Rollout:
    """The prefix as the sparse policy sampled it, the suffix as the dense one did, each with its own log-probs."""
    tokens = rollout.token_ids[:first] + suffix.token_ids
    return replace(
        rollout,
        token_ids=tokens,
        logprobs=torch.cat([rollout.sampler_logprobs()[:first], suffix.sampler_logprobs()]),
        finish=suffix.finish,
        text=tokenizer.decode(tokens, skip_special_tokens=True),  # type: ignore[attr-defined]
        kv=kv_of_both(rollout, first, suffix),
    )


def kv_of_both(rollout: Rollout, first: int, suffix: Rollout) -> KVUse:
    """Means over the answer's own tokens; what the discarded suffix held is not in them."""
    sparse, dense = rollout.kv, suffix.kv
    whole = len(rollout.prompt_ids) + (first + 1) / 2  # what the dense policy holds, on average, over the prefix

    def mean(before: float, after: float) -> float:
        return (min(before, whole) * first + after * len(suffix)) / max(first + len(suffix), 1)

    held = mean(sparse.mean_tokens, dense.mean_tokens)
    return KVUse(
        peak_tokens=max(sparse.peak_tokens, dense.peak_tokens),
        mean_tokens=held,
        dense_mean_tokens=mean(whole, dense.dense_mean_tokens),
        mean_read_tokens=mean(sparse.mean_read_tokens, dense.mean_read_tokens),
        peak_pages=max(sparse.peak_pages, dense.peak_pages),
        peak_bytes=max(sparse.peak_bytes, dense.peak_bytes),
        mean_bytes=held * dense.peak_bytes / max(dense.peak_tokens, 1),
        evictions=sparse.evictions,
        pages_freed=sparse.pages_freed,
        swaps=sparse.swaps + dense.swaps,
    )
