"""From scored and rewarded rollouts to optimizer steps: correction, advantages, divisors, losses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from alula.config.run import RunConfig
from alula.learner.learner import Learner, LossFn, Update
from alula.learner.packing import Packed
from alula.objective import ragged
from alula.objective.advantages import group_advantages
from alula.objective.correction import Corrected, correct
from alula.objective.mismatch_metrics import mismatch_metrics
from alula.objective.policy_loss import Divisors, divisors, policy_loss
from alula.objective.veto import below_veto
from alula.trainer.batch import Experience, minibatches


@dataclass
class Learned:
    """What a step did to the policy."""

    updates: list[Update]
    mismatch: dict[str, float]
    """Of the whole step on all ranks, as it was sampled; and what the correction dropped of it."""
    flops: float
    taught: int
    """Rollouts of this rank that the policy's gradient came from."""
    rejected: list[bool]
    """Rollouts of this rank that were dropped whole, by a veto or by a mask."""
    vetoed: list[bool]
    """Rollouts of this rank with a token that a veto would find, as they were sampled, whatever the correction."""
    advantages: Tensor
    """[N]: of every rollout of this rank, dropped ones too."""


class Updater:
    """The objective of a run, applied to a step's rollouts in `learner.updates` optimizer steps."""

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        self.config, self.learner, self.world = config, learner, learner.world
        self.loss, self.correction = config.loss, config.correction
        self.one_update = config.objective.one_update

    def score(self, batch: Experience) -> None:
        """Dense old log-probs, and those of the reference.

        In one-update mode the update itself gives the old log-probs of what it computes; only what it leaves out is
        scored, so that the mismatch is measured on the whole step all the same.
        """
        temperature = self.config.sampling.temperature
        if self.one_update:
            computed = self._computed(self._advantages(batch, None) != 0)
            rows = (~computed).nonzero().squeeze(-1).tolist()
            scored = self.learner.score([batch.rollouts[i] for i in rows], temperature)
            batch.left_out = {i: scores.logprobs for i, scores in zip(rows, scored)}
        elif not batch.dense:
            batch.dense = [scores.logprobs for scores in self.learner.score(batch.rollouts, temperature)]
        if self.loss.kl > 0:
            initial = self.learner.score(batch.rollouts, temperature, reference=True)
            batch.reference = [scores.logprobs for scores in initial]

    def learn(self, batch: Experience, seed: tuple[int, ...]) -> Learned:
        device = self.world.device
        step = minibatches(batch, self.config.learner.updates, self.config.learner.minibatch, seed).to(device)
        sequence, sparse, count = batch.sequence(device), batch.sparse(device), len(batch.rollouts)

        def corrected_from(dense: list[Tensor]) -> Corrected:
            return correct(
                torch.cat(dense),
                torch.cat(sparse),
                sequence,
                self.correction,
                sequences=count,
                step=step,
                reduce=self.world.all_sum,
            )

        corrected = None if self.one_update else corrected_from(batch.dense)
        advantages = self._advantages(batch, corrected)
        whole = divisors(
            self.loss,
            self.correction,
            sequence,
            count,
            corrected,
            max_length=self.config.sampling.max_new_tokens,
            step=step,
            reduce=self.world.all_sum,
        )

        lengths = [len(rollout) for rollout in batch.rollouts]
        weights = None if corrected is None else list(corrected.weights.split(lengths))
        kept = None if corrected is None else list(corrected.token_keep.split(lengths))
        computed = self._computed(self._teaching(advantages, corrected, sequence))
        updates, flops, own_logprobs = [], 0.0, dict(batch.left_out)
        for number in range(self.config.learner.updates):
            members = (computed & (step == number)).nonzero().squeeze(-1)
            rows = members.tolist()
            rollouts = [batch.rollouts[i] for i in rows]
            loss_fn = self._loss_fn(
                advantages[members],
                whole.rows(members),
                [sparse[i] for i in rows],
                [batch.dense[i] for i in rows] if batch.dense else None,
                [weights[i] for i in rows] if weights else None,
                [kept[i] for i in rows] if kept else None,
                [batch.reference[i] for i in rows] if batch.reference else None,
            )
            update = self.learner.update(rollouts, loss_fn, self.config.sampling.temperature)
            updates.append(update)
            flops += self.learner.flops(rollouts).total
            own_logprobs |= zip(rows, update.logprobs)
        dense = batch.dense or [own_logprobs[i] for i in range(count)]
        if corrected is None:
            corrected = corrected_from(dense)
        teaching = self._teaching(advantages, corrected, sequence)
        low = below_veto(torch.cat(dense) - torch.cat(sparse), self.correction.veto)
        vetoed = batch.rerolled or (ragged.first(low, sequence, count) >= 0).tolist()
        mismatch = self._mismatch(batch, corrected)
        return Learned(updates, mismatch, flops, int(teaching.sum()), (~corrected.keep).tolist(), vetoed, advantages)

    def _advantages(self, batch: Experience, corrected: Corrected | None) -> Tensor:
        settings = self.config.objective
        counted = None if self.correction.vetoed_in_baseline or corrected is None else corrected.keep.cpu()
        rewards = torch.tensor(batch.rewards, dtype=torch.float32)
        advantages = group_advantages(rewards, batch.group, settings.advantage, counted)
        return torch.where(batch.taught(settings.mask_truncated), advantages, 0.0).to(self.world.device)

    def _computed(self, teaching: Tensor) -> Tensor:
        """bool [N]: the rollouts that the update computes: with a KL all of them, since it teaches too."""
        skips = self.config.objective.skip_no_signal and self.loss.kl == 0
        return teaching if skips else torch.ones_like(teaching)

    def _teaching(self, advantages: Tensor, corrected: Corrected | None, sequence: Tensor) -> Tensor:
        """bool [N]: a rollout of advantage 0 or without a kept token has a policy gradient of exactly 0."""
        teaching = advantages != 0
        if corrected is not None:
            teaching &= ragged.total(corrected.token_keep.long(), sequence, len(advantages)) > 0
        return teaching

    def _loss_fn(
        self,
        advantages: Tensor,
        divisors: Divisors,
        sparse: list[Tensor],
        dense: list[Tensor] | None,
        weights: list[Tensor] | None,
        kept: list[Tensor] | None,
        reference: list[Tensor] | None,
    ) -> LossFn:
        """The loss of a micro-batch of one optimizer step's rollouts."""

        def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed) -> tuple[Tensor, dict[str, Tensor]]:
            rows = torch.tensor(packed.index, device=logprobs.device)
            own = divisors.rows(rows)
            sampled = packed.flat(sparse)
            if weights is None or kept is None:  # one-update mode: the old log-probs are these
                found = correct(
                    logprobs.detach(), sampled, packed.sequence, self.correction, sequences=len(packed.index)
                )
                token_weights, token_keep, own = found.weights, found.token_keep, self._accepted(own, found, packed)
            else:
                token_weights, token_keep = packed.flat(weights), packed.flat(kept)
            old = None if dense is None else packed.flat(dense)
            return policy_loss(
                logprobs,
                old,
                packed.rows(advantages)[packed.sequence],
                token_weights,
                packed.sequence,
                self.loss,
                own,
                reference_logprobs=None if reference is None else packed.flat(reference),
                kl_mask=token_keep if self.correction.mask_kl else None,
                entropies=entropy,
            )

        return loss_fn

    def _accepted(self, own: Divisors, found: Corrected, packed: Packed) -> Divisors:
        """In one-update mode the divisors were made before the veto was known: |o_i| becomes the accepted tokens."""
        if self.correction.inner != "accepted":
            return own
        accepted = ragged.total(found.token_keep.double(), packed.sequence, len(packed.index)).clamp(min=1)
        share = accepted / torch.tensor(packed.response_lengths, device=accepted.device)
        return Divisors(own.policy * share, own.kl * share if self.correction.mask_kl else own.kl)

    def _mismatch(self, batch: Experience, corrected: Corrected) -> dict[str, float]:
        """The mismatch of what was sampled, before a reroll repaired it, and what was dropped of what came out."""
        if not batch.as_sampled:
            return corrected.metrics
        device = self.world.device
        sequence = ragged.sequence([len(one) for one in batch.as_sampled], device)
        return corrected.metrics | mismatch_metrics(
            torch.cat(batch.as_sampled),
            sequence,
            len(batch.rollouts),
            self.correction.veto,
            self.correction.clamp,
            self.world.all_sum,
        )
