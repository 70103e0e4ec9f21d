"""From scored and rewarded rollouts to optimizer steps: correction, advantages, divisors, losses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from alula.config import RunConfig
from alula.rl import ragged
from alula.rl.advantages import group_advantages
from alula.rl.correction import Corrected, correct
from alula.rl.experience import Experience, minibatches
from alula.rl.learner import Learner, LossFn, Update
from alula.rl.losses import Divisors, divisors, policy_loss
from alula.rl.packing import Packed


@dataclass
class Learned:
    """What a step did to the policy."""

    updates: list[Update]
    corrected: Corrected | None
    """None where nothing was scored: one-update mode without a rollout that teaches."""
    flops: float
    taught: int
    """Rollouts of this rank that the policy's gradient came from."""
    vetoed: list[bool]
    """Rollouts of this rank that were dropped by a veto."""
    advantages: Tensor
    """[N]: of every rollout of this rank, dropped ones too."""


class Updater:
    """The objective of a run, applied to a step's rollouts in `learner.updates` optimizer steps."""

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        self.config, self.learner, self.world = config, learner, learner.world
        self.loss, self.correction = config.loss, config.correction
        self.one_update = config.objective.one_update

    def score(self, batch: Experience) -> None:
        """Dense old log-probs (in one-update mode the update gives them), and those of the reference."""
        temperature = self.config.sampling.temperature
        if not self.one_update and not batch.dense:
            batch.dense = [scores.logprobs for scores in self.learner.score(batch.rollouts, temperature)]
        if self.loss.kl > 0:
            initial = self.learner.score(batch.rollouts, temperature, reference=True)
            batch.reference = [scores.logprobs for scores in initial]

    def learn(self, batch: Experience, seed: tuple[int, ...]) -> Learned:
        device, settings = self.world.device, self.config.objective
        step = minibatches(batch, self.config.learner.updates, self.config.learner.minibatch, seed).to(device)
        sequence, sparse, count = batch.sequence(device), batch.sparse(device), len(batch.rollouts)
        corrected = None
        if not self.one_update:
            corrected = correct(
                torch.cat(batch.dense), torch.cat(sparse), sequence, self.correction,
                sequences=count, step=step, reduce=self.world.sum,
            )  # fmt: skip
        counted = None if self.correction.vetoed_in_baseline or corrected is None else corrected.keep.cpu()
        rewards = torch.tensor(batch.rewards, dtype=torch.float32)
        advantages = group_advantages(rewards, batch.group, settings.advantage, counted)
        advantages = torch.where(batch.taught(settings.mask_truncated), advantages, 0.0).to(device)
        whole = divisors(
            self.loss, self.correction, sequence, count, corrected, step=step, reduce=self.world.sum
        )  # fmt: skip

        lengths = [len(rollout) for rollout in batch.rollouts]
        weights = None if corrected is None else list(corrected.weights.split(lengths))
        kept = None if corrected is None else list(corrected.token_keep.split(lengths))
        teaching = self._teaching(advantages, corrected, sequence)
        skips = settings.skip_no_signal and self.loss.kl == 0
        chosen = teaching if skips else torch.ones_like(teaching)
        vetoed = [False] * count if corrected is None else (corrected.first_vetoed >= 0).tolist()
        learned = Learned([], corrected, 0.0, int(teaching.sum()), vetoed, advantages)
        own_logprobs: list[tuple[int, Tensor]] = []
        for number in range(self.config.learner.updates):
            members = (chosen & (step == number)).nonzero().squeeze(-1)
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
            learned.updates.append(update)
            learned.flops += self.learner.flops(rollouts).total
            own_logprobs += zip(rows, update.logprobs)
        if self.one_update:
            learned.corrected = self._measured(sparse, own_logprobs)
            if learned.corrected is not None:
                for (i, _), first in zip(own_logprobs, learned.corrected.first_vetoed.tolist()):
                    vetoed[i] = first >= 0
        return learned

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
                )  # fmt: skip
                token_weights, token_keep, own = found.weights, found.token_keep, self._accepted(own, found, packed)
            else:
                token_weights, token_keep = packed.flat(weights), packed.flat(kept)
            old = sampled if self.correction.bypass else None if dense is None else packed.flat(dense)
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

    def _measured(self, sparse: list[Tensor], own: list[tuple[int, Tensor]]) -> Corrected | None:
        """One-update mode: ξ of the rollouts that were trained on, from the training forward's log-probs."""
        if not self.world.largest(len(own)):
            return None
        device = self.world.device
        empty = torch.empty(0, device=device)
        lengths = torch.tensor([len(logprobs) for _, logprobs in own], dtype=torch.int64, device=device)
        return correct(
            torch.cat([empty, *(logprobs for _, logprobs in own)]),
            torch.cat([empty, *(sparse[i] for i, _ in own)]),
            torch.repeat_interleave(torch.arange(len(own), device=device), lengths),
            self.correction,
            sequences=len(own),
            reduce=self.world.sum,
        )
