"""The second half of a step, from rewarded rollouts to optimizer steps: score → correct → advantages → update."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from alula.config.run import RunConfig
from alula.engine.rollout import Rollout
from alula.learner.learner import Learner, Update
from alula.learner.packing import Packed
from alula.objective import ragged
from alula.objective.advantages import group_advantages
from alula.objective.correction import Corrected, correct
from alula.objective.mismatch_metrics import correction_metrics, mismatch_metrics
from alula.objective.policy_loss import Divisors, divisors, policy_loss
from alula.objective.veto import below_veto
from alula.trainer.batch import RolloutBatch, assign_minibatches


@dataclass(frozen=True)
class LossBatch:
    """What the loss needs to know about rollouts: one entry each, except for `reference` without a KL."""

    rollouts: list[Rollout]
    advantages: Tensor
    divisors: Divisors
    sampled: list[Tensor]
    """Log-probs under the policy that sampled."""
    dense: list[Tensor]
    """Old log-probs under the dense policy; unused in the first optimizer step if its scoring is skipped."""
    weights: list[Tensor]
    """Unused if scoring is skipped, like the next: the loss then corrects each micro-batch."""
    token_keep: list[Tensor]
    reference: list[Tensor]

    def select(self, rows: Tensor) -> "LossBatch":
        indices = rows.tolist()
        return LossBatch(
            [self.rollouts[i] for i in indices],
            self.advantages[rows],
            self.divisors.rows(rows),
            [self.sampled[i] for i in indices],
            [self.dense[i] for i in indices],
            [self.weights[i] for i in indices],
            [self.token_keep[i] for i in indices],
            [self.reference[i] for i in indices] if self.reference else [],
        )


@dataclass
class StepResult:
    """What a step's updates did. Per-rollout fields are those of this rank."""

    updates: list[Update]
    mismatch: dict[str, float]
    """Metrics of the whole step on all ranks: the mismatch as it was sampled, and what the correction dropped."""
    flops: float
    trained: int
    """Number of rollouts with a policy gradient."""
    rejected: list[bool]
    """Rollouts that were dropped whole, by a veto or by a mask."""
    vetoed: list[bool]
    """Rollouts with a token below the veto threshold as they were sampled, whatever the correction."""
    advantages: Tensor
    """[N], for dropped rollouts too."""


class Updater:
    """Applies the run's objective to a batch of rollouts.

    With `skip_scoring` the training forward of the first optimizer step gives its old log-probs. Then ξ is not known
    before the update: the loss corrects each micro-batch. Scored are the rollouts of later optimizer steps and, for the
    metrics, those that the first one does not compute.
    """

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        self.config, self.learner, self.world = config, learner, learner.world
        self.loss, self.correction = config.objective, config.objective.correction
        self.skip_scoring = config.objective.skips_scoring(self.world.device.type)

    def score(self, batch: RolloutBatch) -> None:
        """Fill in the old log-probs under the dense policy, and those under the reference."""
        temperature = self.config.sampling.temperature
        if self.skip_scoring:
            uncorrected = self._uncorrected(batch)
            computed = self._computed(batch, uncorrected, self.advantages(batch, uncorrected))
            skipped = computed & (self.assign_minibatches(batch) == 0)
            rows = (~skipped).nonzero().squeeze(-1).tolist()
            batch.dense = [torch.empty(0, device=self.world.device)] * len(batch.rollouts)
            for i, logprobs in zip(rows, self.learner.score([batch.rollouts[i] for i in rows], temperature)):
                batch.dense[i] = logprobs
        elif not self.correction.reroll:  # reroll has scored them already
            batch.dense = self.learner.score(batch.rollouts, temperature)
        if self.loss.kl > 0:
            batch.reference = self.learner.score(batch.rollouts, temperature, reference=True)

    def assign_minibatches(self, batch: RolloutBatch) -> Tensor:
        """int64 [N]: the optimizer step of each rollout."""
        settings, seed = self.config.learner, self.config.seed
        return assign_minibatches(batch, settings.updates, settings.minibatch, seed, self.world).to(self.world.device)

    def correct(self, batch: RolloutBatch, minibatch: Tensor) -> Corrected:
        """Weights and keep mask of all tokens; no correction yet if scoring is skipped."""
        return self._uncorrected(batch) if self.skip_scoring else self._correct(batch, minibatch)

    def advantages(self, batch: RolloutBatch, corrected: Corrected) -> Tensor:
        """[N]: against the group; 0 for rollouts that are not trainable."""
        settings = self.config.objective
        counted = None if self.correction.vetoed_in_baseline else corrected.keep.cpu()
        if (worked := batch.counted_mask()) is not None:
            counted = worked if counted is None else counted & worked
        rewards = torch.tensor(batch.rewards, dtype=torch.float32)
        advantages = group_advantages(rewards, batch.group, settings.advantage, counted)
        return torch.where(batch.trainable_mask(settings.mask_truncated), advantages, 0.0).to(self.world.device)

    def update(self, batch: RolloutBatch, minibatch: Tensor, corrected: Corrected, advantages: Tensor) -> StepResult:
        """Take the optimizer steps."""
        loss_batch = self._loss_batch(batch, minibatch, corrected, advantages)
        computed = self._computed(batch, corrected, advantages)
        updates, flops = [], 0.0
        for number in range(self.config.learner.updates):
            rows = (computed & (minibatch == number)).nonzero().squeeze(-1)
            mini = loss_batch.select(rows)
            unscored = self.skip_scoring and number == 0
            loss = partial(self._micro_batch_loss, mini, unscored=unscored)
            update = self.learner.update(mini.rollouts, loss, self.config.sampling.temperature)
            updates.append(update)
            flops += self.learner.flops(mini.rollouts).total
            if unscored:
                for i, logprobs in zip(rows.tolist(), update.logprobs):
                    batch.dense[i] = logprobs
        if self.skip_scoring:  # now ξ of the whole step is known
            corrected = self._correct(batch, minibatch)
        return StepResult(
            updates=updates,
            mismatch=self._mismatch(batch, corrected),
            flops=flops,
            trained=int(self._has_gradient(batch, corrected, advantages).sum()),
            rejected=(~corrected.keep).tolist(),
            vetoed=self._vetoed(batch),
            advantages=advantages,
        )

    def _correct(self, batch: RolloutBatch, minibatch: Tensor) -> Corrected:
        device = self.world.device
        return correct(
            ragged.concatenate(batch.dense, device),
            ragged.concatenate(batch.sampled(device), device),
            batch.sequence(device),
            self.correction,
            sequences=len(batch.rollouts),
            step=minibatch,
            steps=self.config.learner.updates,
            reduce=self.world.all_sum,
        )

    def _uncorrected(self, batch: RolloutBatch) -> Corrected:
        return Corrected.none(batch.sequence(self.world.device), len(batch.rollouts))

    def _has_gradient(self, batch: RolloutBatch, corrected: Corrected, advantages: Tensor) -> Tensor:
        """bool [N]: with advantage 0 or without a kept token, a rollout's policy gradient is exactly 0."""
        sequence = batch.sequence(self.world.device)
        return (advantages != 0) & (ragged.total(corrected.token_keep.long(), sequence, len(advantages)) > 0)

    def _computed(self, batch: RolloutBatch, corrected: Corrected, advantages: Tensor) -> Tensor:
        """bool [N]: rollouts that the update computes. With a KL it computes all, since each has a KL gradient."""
        if self.config.objective.skip_no_signal and self.loss.kl == 0:
            return self._has_gradient(batch, corrected, advantages)
        return torch.ones_like(advantages, dtype=torch.bool)

    def _loss_batch(
        self, batch: RolloutBatch, minibatch: Tensor, corrected: Corrected, advantages: Tensor
    ) -> LossBatch:
        device = self.world.device
        counts = divisors(
            self.loss,
            self.correction,
            batch.sequence(device),
            len(batch.rollouts),
            corrected,
            max_length=self.config.most_sampled(),
            step=minibatch,
            steps=self.config.learner.updates,
            reduce=self.world.all_sum,
        )
        return LossBatch(
            batch.rollouts,
            advantages,
            counts,
            batch.sampled(device),
            batch.dense,
            list(corrected.weights.split(batch.lengths)),
            list(corrected.token_keep.split(batch.lengths)),
            batch.reference,
        )

    def _micro_batch_loss(
        self, mini: LossBatch, logprobs: Tensor, entropy: Tensor, packed: Packed, *, unscored: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A `LossFn` of the learner, for the optimizer step on `mini`."""
        counts = mini.divisors.rows(torch.tensor(packed.index, device=logprobs.device))
        old = logprobs.detach() if unscored else packed.flat(mini.dense)
        if self.skip_scoring:
            corrected = correct(
                old, packed.flat(mini.sampled), packed.sequence, self.correction, sequences=len(packed.index)
            )
            weights, token_keep = corrected.weights, corrected.token_keep
            counts = self._count_accepted(counts, corrected, packed)
        else:
            weights, token_keep = packed.flat(mini.weights), packed.flat(mini.token_keep)
        return policy_loss(
            logprobs,
            old,
            packed.rows(mini.advantages)[packed.sequence],
            weights,
            packed.sequence,
            self.loss,
            counts,
            reference_logprobs=packed.flat(mini.reference) if mini.reference else None,
            kl_mask=token_keep if self.correction.mask_kl else None,
            entropies=entropy,
        )

    def _count_accepted(self, counts: Divisors, corrected: Corrected, packed: Packed) -> Divisors:
        """If scoring is skipped the divisors were counted before the correction: |o_i| becomes the accepted tokens."""
        if self.correction.inner != "accepted":
            return counts
        accepted = ragged.total(corrected.token_keep.double(), packed.sequence, len(packed.index)).clamp(min=1)
        share = accepted / torch.tensor(packed.response_lengths, device=accepted.device)
        return Divisors(counts.policy * share, counts.kl * share if self.correction.mask_kl else counts.kl)

    def _mismatch(self, batch: RolloutBatch, corrected: Corrected) -> dict[str, float]:
        """The mismatch as it was sampled, before a reroll; what was dropped, after it."""
        log_ratios = batch.log_ratios_before_reroll or self._log_ratios(batch)
        metrics = mismatch_metrics(
            ragged.concatenate(log_ratios, self.world.device),
            ragged.sequence([len(log_ratio) for log_ratio in log_ratios], self.world.device),
            len(batch.rollouts),
            self.correction.veto,
            self.correction.clamp,
            self.world.all_gather,
        )
        return metrics | correction_metrics(corrected, self.world.all_gather)

    def _vetoed(self, batch: RolloutBatch) -> list[bool]:
        if batch.rerolled:
            return batch.rerolled
        low = below_veto(ragged.concatenate(self._log_ratios(batch), self.world.device), self.correction.veto)
        return (ragged.first(low, batch.sequence(self.world.device), len(batch.rollouts)) >= 0).tolist()

    def _log_ratios(self, batch: RolloutBatch) -> list[Tensor]:
        return [dense - sampled for dense, sampled in zip(batch.dense, batch.sampled(self.world.device))]
