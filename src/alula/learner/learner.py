"""The learner: dense log-probs of given sequences, and optimizer steps on them.

Sequences are packed without padding into micro-batches under a token budget, scored at their response tokens
only, and their logits never exist whole. Under torchrun the same code runs on every rank with its own share of
the sequences.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.config.settings import LearnerSettings
from alula.distributed import World, iter_full_params, shard_model
from alula.engine.rollout import Scores
from alula.errors import require
from alula.learner.flops import Flops, training_flops
from alula.learner.forward import Policy, checkpoint_activations
from alula.learner.learning_rate import learning_rate
from alula.learner.optimizer import MasterAdamW
from alula.learner.packing import Packed, Tokens, collate, pack
from alula.models import lora
from alula.objective.policy_loss import merge_metrics

LossFn = Callable[[Tensor, Tensor, Packed], tuple[Tensor, dict[str, Tensor]]]
"""(logprobs [N], entropy [N], batch) -> this micro-batch's share of the loss, and its metrics.

Shares are summed over micro-batches and ranks, so a mean carries the denominator of the whole step. Metrics are
joined by `policy_loss.merge_metrics`: `tokens` and names that end in `loss` add up, names that end in `_min` or `_max`
are extremes, the rest are means over tokens. `batch` says which sequences these are (`index`, `sequence`) and brings
the caller's tensors into their order (`flat`, `rows`).
"""


@dataclass
class Update:
    """What one optimizer step did, over all micro-batches and ranks."""

    loss: float
    metrics: dict[str, float]
    grad_norm: float
    """Before clipping."""
    lr: float
    taken: bool
    """False where the loss or a gradient was not finite: parameters and moments are then untouched."""
    tokens: int
    """Tokens that went through the model, prompts included."""
    scored_tokens: int
    micro_batches: int
    logprobs: list[Tensor]
    """float32 [len(token_ids)] per sequence of this rank, from the training forward itself, before the step."""


class Learner:
    """Trains `model` in place; an engine built on the same parameters sees every step.

    Under several ranks the parameters are sharded: an engine then needs its own copy, refreshed from
    `full_parameters`. `total_steps` are the optimizer steps of the whole run, which `decay` needs. `keep_reference`
    keeps the initial policy for `score(reference=True)`: a frozen copy, or nothing at all under LoRA.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LearnerSettings | None = None,
        world: World | None = None,
        *,
        total_steps: int = 0,
        keep_reference: bool = False,
    ) -> None:
        self.settings = settings = settings or LearnerSettings()
        settings.check_decay(total_steps)
        self.total_steps = total_steps
        self.world = world or World(device=model.device)
        self.in_place = trains_in_place(settings, self.world)
        self.model = model
        self.dtype = model.dtype
        self.steps = 0
        """Optimizer steps tried, skipped ones included: what the learning rate depends on."""
        self.skipped = 0
        self.reference: Policy | None = None
        model.eval()
        if settings.lora:
            lora.attach_trainable(model, settings.lora.rank, settings.lora.alpha, settings.lora.seed)
        elif keep_reference:
            self.reference = Policy(copy.deepcopy(model).requires_grad_(False), settings.logprob_chunk)
        self.policy = Policy(model, settings.logprob_chunk)
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        compiled = settings.compile
        if compiled is None:
            compiled = self.world.device.type == "cuda" and not self.world.is_distributed
        for policy in filter(None, (self.policy, self.reference)):
            if compiled:
                for layer in policy.layers:
                    layer.compile(dynamic=True)
            if self.world.is_distributed:
                shard_model(policy, policy.layers, self.world)
        self.optimizer = MasterAdamW(
            model.named_parameters(),
            settings.lr,
            settings.betas,
            settings.eps,
            settings.weight_decay,
            compute=self.dtype,
        )

    @torch.no_grad()
    def score(
        self, sequences: Sequence[Tokens], temperature: float = 1.0, topk: int = 0, reference: bool = False
    ) -> list[Scores]:
        """Log-probs of every response token under the policy, or under the one training began with."""
        require(
            not reference or self.reference is not None or self.settings.lora is not None,
            "reference=True: the learner kept no initial policy; a run keeps it where objective.kl is above 0, a "
            "Learner with keep_reference=True.",
        )
        policy = self.reference if reference and self.reference else self.policy
        without_adapter = reference and self.reference is None
        scores = [_nothing_scored(self.world.device, topk) for _ in sequences]
        with lora.disabled(self.model) if without_adapter else nullcontext():
            for batch, real in self._micro_batches(sequences):
                found = policy(batch, temperature, topk=topk, entropy=False)
                if real:
                    for i, logprobs in zip(batch.index, batch.split(found.logprobs)):
                        scores[i].logprobs = logprobs
                    if topk:
                        ids, best = batch.split(found.topk_ids), batch.split(found.topk_logprobs)
                        for i, these, those in zip(batch.index, ids, best):
                            scores[i].topk_ids, scores[i].topk_logprobs = these, those
        return scores

    def update(self, sequences: Sequence[Tokens], loss_fn: LossFn, temperature: float = 1.0) -> Update:
        """One optimizer step on all sequences of all ranks."""
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        parts: list[dict[str, Tensor]] = []
        logprobs = [torch.empty(0, device=self.world.device) for _ in sequences]
        counts = torch.zeros(3, dtype=torch.int64)
        for batch, real in self._micro_batches(sequences):
            scored = self.policy(batch, temperature)
            if not real:
                self.optimizer.backward(scored.logprobs.sum() * 0.0)
                continue
            share, measured = loss_fn(scored.logprobs, scored.entropy, batch)
            if not share.requires_grad:  # nothing to learn here, but every rank must take part in the backward
                share = share + scored.logprobs.sum() * 0.0
            self.optimizer.backward(share)
            loss += share.detach()
            if measured:
                parts.append(measured)
            for i, own in zip(batch.index, batch.split(scored.logprobs.detach())):
                logprobs[i] = own
            counts += torch.tensor([batch.input_ids.numel(), len(batch.targets), 1])
        total = float(self.world.all_sum(loss))
        lr = self.learning_rate()
        norm, taken = self.optimizer.step(lr, self.settings.max_grad_norm, finite_loss=math.isfinite(total))
        self.steps += 1
        self.skipped += not taken
        gathered = self.world.all_gather((_on_cpu(parts), counts.tolist()))
        everything = [part for theirs, _ in gathered for part in theirs]
        tokens, scored_tokens, micro_batches = (sum(count) for count in zip(*(counts for _, counts in gathered)))
        return Update(
            loss=total,
            metrics=merge_metrics(everything) if everything else {},
            grad_norm=norm,
            lr=lr,
            taken=taken,
            tokens=tokens,
            scored_tokens=scored_tokens,
            micro_batches=micro_batches,
            logprobs=logprobs,
        )

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        s = self.settings
        return learning_rate(self.steps, s.lr, s.warmup_steps, self.total_steps, s.decay, s.min_lr_ratio)

    def flops(self, sequences: Sequence[Tokens]) -> Flops:
        """What an update on these sequences costs; sequences without a response are not computed."""
        scored = [s for s in sequences if s.token_ids]
        return training_flops(self.model, [_length(s) for s in scored], sum(len(s.token_ids) for s in scored))

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values as transformers knows them: gathered from all ranks, adapters merged, in the model's
        dtype. Every rank must run through all of them. A tied head is not named."""
        if self.settings.lora:
            return ((name, value.to(self.dtype)) for name, value in lora.merged_parameters(self.model))
        return iter_full_params(self.model.named_parameters(), self.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Live tensors that a checkpoint writes and reads: trained weights in float32 and moments."""
        return self.optimizer.tensors()

    def state(self) -> dict[str, int]:
        return {"steps": self.steps, "skipped": self.skipped}

    def resume(self, state: Mapping[str, Any]) -> None:
        """After a checkpoint was read into `tensors()`."""
        self.optimizer.publish()
        self.steps, self.skipped = state["steps"], state["skipped"]

    def _micro_batches(self, sequences: Sequence[Tokens]) -> Iterator[tuple[Packed, bool]]:
        """Packed sequences that have something to score. All ranks must make the same number of forwards, so
        those with less to do add a token or two that count for nothing (False)."""
        useful = [i for i, sequence in enumerate(sequences) if sequence.token_ids]
        batches = pack([_length(sequences[i]) for i in useful], self.settings.token_budget)
        missing = self.world.all_max(len(batches)) - len(batches)
        for members in batches:
            yield collate(sequences, [useful[m] for m in members], self.world.device), True
        for _ in range(missing):
            yield collate([SimpleNamespace(prompt_ids=[0], token_ids=[0])], [0], self.world.device), False


def trains_in_place(settings: LearnerSettings, world: World) -> bool:
    """Whether an engine on the model's parameters sees every step: not if these are sharded or have adapters."""
    return not world.is_distributed and settings.lora is None


def _length(sequence: Tokens) -> int:
    return len(sequence.prompt_ids) + len(sequence.token_ids)


def _nothing_scored(device: torch.device, topk: int) -> Scores:
    """Of a rollout without tokens."""
    if not topk:
        return Scores(torch.empty(0, device=device))
    ids = torch.empty(0, topk, dtype=torch.int64, device=device)
    return Scores(torch.empty(0, device=device), ids, torch.empty(0, topk, device=device))


def _on_cpu(parts: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Every micro-batch's metrics in one copy from the device."""
    if not parts:
        return []
    names = list(parts[0])
    table = torch.stack([torch.stack([part[name].detach().double() for name in names]) for part in parts]).cpu()
    return [dict(zip(names, row.unbind())) for row in table]
