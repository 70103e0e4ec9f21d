"""The learner: dense log-probs of given sequences, and optimizer steps on them.

Sequences are packed without padding into micro-batches under a token budget and scored at their response tokens only;
full logits are never materialised. Under torchrun the same code runs on every rank, each with its share of the
sequences.
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

from alula.distributed import World, iter_full_params, shard_mesh, shard_model, sum_over_replicas
from alula.errors import require
from alula.learner.forward import Policy, checkpoint_activations
from alula.learner.optimizer import MasterAdamW
from alula.learner.packing import Packed, Tokens, collate, pack, sampled_mask
from alula.models import lora
from alula.models.experts import active_share, is_experts
from alula.models.geometry import Geometry
from alula.objective.policy_loss import merge_metrics
from alula.settings import Decay, LearnerSettings

LossFn = Callable[[Tensor, Tensor, Packed], tuple[Tensor, dict[str, Tensor]]]
"""(logprobs [N], entropy [N], batch) -> this micro-batch's share of the loss, and its metrics.

Shares are summed over micro-batches and ranks, so a mean must divide by the count of the whole step. Metrics are joined
by `policy_loss.merge_metrics`. `batch` names the sequences (`index`, `sequence`) and reorders the caller's tensors
accordingly (`flat`, `rows`).
"""


@dataclass
class Update:
    """Result of one optimizer step, over all micro-batches and ranks."""

    loss: float
    metrics: dict[str, float]
    grad_norm: float
    """Before clipping."""
    lr: float
    taken: bool
    """False if the loss or a gradient was not finite; parameters and moments are then unchanged."""
    tokens: int
    """All tokens, prompts included."""
    scored_tokens: int
    micro_batches: int
    logprobs: list[Tensor]
    """float32 [sampled tokens] per sequence of this rank, from the training forward, before the step."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of forward and backward, counted as in PaLM (arXiv 2204.02311, appendix B): recomputed
    activations and logits do not count, since another implementation could do without."""

    layers: float
    """6 per parameter outside embedding and head and per token; 4 for a frozen one, which gets no gradient."""
    attention: float
    """QKᵀ and PV over the causal half: 6 · layers · heads · head_dim · length² per sequence."""
    head: float
    """6 · width · vocabulary per scored token."""

    @property
    def total(self) -> float:
        return self.layers + self.attention + self.head


class Learner:
    """Trains `model` in place; an engine built on the same parameters sees every step.

    With several ranks the parameters are sharded; an engine then needs its own copy, refreshed from `full_parameters`.
    `total_steps` is the number of optimizer steps of the whole run, which `decay` needs. `keep_reference` keeps the
    initial policy for `score(reference=True)`: a frozen copy, or nothing extra with LoRA.
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
        """Optimizer steps, skipped ones included; the learning rate depends on it."""
        self.skipped = 0
        self.reference: Policy | None = None
        model.eval()
        if settings.lora:
            lora.attach_trainable(model, settings.lora.rank, settings.lora.alpha, settings.lora.seed)
        elif keep_reference:
            self.reference = Policy(copy.deepcopy(model).requires_grad_(False), settings.logprob_chunk)
        self.policy = Policy(model, settings.logprob_chunk)
        if settings.checkpoints_activations:
            checkpoint_activations(model)
        compiled = settings.compile
        if compiled is None:
            compiled = self.world.device.type == "cuda" and not self.world.is_distributed
        mesh = shard_mesh(self.world, settings.shard) if self.world.is_distributed else None
        for policy in filter(None, (self.policy, self.reference)):
            if compiled:
                for layer in policy.layers:
                    layer.compile(dynamic=True)
            if mesh is not None:
                shard_model(policy, policy.layers, mesh)
        self.optimizer = MasterAdamW(
            model.named_parameters(),
            settings.lr,
            settings.betas,
            settings.eps,
            settings.weight_decay,
            compute=self.dtype,
        )

    @torch.no_grad()
    def score(self, sequences: Sequence[Tokens], temperature: float = 1.0, *, reference: bool = False) -> list[Tensor]:
        """float32 [sampled tokens] per sequence: log-probs under the policy, or under the initial one (`reference`)."""
        require(
            not reference or self.reference is not None or self.settings.lora is not None,
            "reference=True: the learner kept no initial policy; set objective.kl above 0 in a run, or "
            "keep_reference=True in Learner.",
        )
        policy = self.reference if reference and self.reference else self.policy
        without_adapter = reference and self.reference is None
        logprobs = [torch.empty(0, device=self.world.device) for _ in sequences]
        with lora.disabled(self.model) if without_adapter else nullcontext():
            for batch, real, _ in self._micro_batches(sequences):
                packed_logprobs, _ = policy(batch, temperature, entropy=False)
                if real:
                    for i, sequence_logprobs in zip(batch.index, batch.split(packed_logprobs)):
                        logprobs[i] = sequence_logprobs
        return logprobs

    def update(self, sequences: Sequence[Tokens], loss_fn: LossFn, temperature: float = 1.0) -> Update:
        """One optimizer step on all sequences of all ranks."""
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        parts: list[dict[str, Tensor]] = []
        logprobs = [torch.empty(0, device=self.world.device) for _ in sequences]
        counts = torch.zeros(3, dtype=torch.int64)
        for batch, real, last in self._micro_batches(sequences):
            if self.world.is_distributed:
                sum_over_replicas(self.policy, last)
            packed_logprobs, entropy = self.policy(batch, temperature)
            if not real:
                self.optimizer.backward(packed_logprobs.sum() * 0.0)
                continue
            share, measured = loss_fn(packed_logprobs, entropy, batch)
            if not share.requires_grad:  # every rank must take part in the backward, even with a constant loss
                share = share + packed_logprobs.sum() * 0.0
            self.optimizer.backward(share)
            loss += share.detach()
            if measured:
                parts.append(measured)
            for i, sequence_logprobs in zip(batch.index, batch.split(packed_logprobs.detach())):
                logprobs[i] = sequence_logprobs
            counts += torch.tensor([batch.input_ids.numel(), len(batch.targets), 1])
        total = float(self.world.all_sum(loss))
        lr = self.learning_rate()
        norm, taken = self.optimizer.step(lr, self.settings.max_grad_norm, finite_loss=math.isfinite(total))
        self.steps += 1
        self.skipped += not taken
        gathered = self.world.all_gather((_on_cpu(parts), counts.tolist()))
        all_parts = [part for rank_parts, _ in gathered for part in rank_parts]
        tokens, scored_tokens, micro_batches = (sum(count) for count in zip(*(counts for _, counts in gathered)))
        return Update(
            loss=total,
            metrics=merge_metrics(all_parts) if all_parts else {},
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
        """Cost of an update on these sequences; those without a response are not computed."""
        scored = [s for s in sequences if s.token_ids]
        return training_flops(self.model, [_length(s) for s in scored], sum(int(sampled_mask(s).sum()) for s in scored))

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters under transformers' names: gathered from all ranks, adapters merged, in the model's dtype. A tied
        head is left out. Every rank must iterate over all of them."""
        if self.settings.lora:
            return ((name, value.to(self.dtype)) for name, value in lora.merged_parameters(self.model))
        return iter_full_params(self.model.named_parameters(), self.dtype)

    def adapter(self) -> lora.Adapter:
        """The LoRA that is trained, gathered from all ranks. Every rank must call it."""
        assert self.settings.lora is not None
        return lora.attached(self.model, self.settings.lora.rank, self.settings.lora.alpha)

    def tensors(self) -> dict[str, Tensor]:
        """Live tensors of a checkpoint: trained weights in float32 and moments."""
        return self.optimizer.tensors()

    def state(self) -> dict[str, int]:
        return {"steps": self.steps, "skipped": self.skipped}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue after a checkpoint was read into `tensors()`."""
        self.optimizer.publish()
        self.steps, self.skipped = state["steps"], state["skipped"]

    def _micro_batches(self, sequences: Sequence[Tokens]) -> Iterator[tuple[Packed, bool, bool]]:
        """(packed sequences with responses, True, whether it is the last). All ranks must run the same number of
        forwards, so ranks with fewer micro-batches add dummy ones that count for nothing (False)."""
        useful = [i for i, sequence in enumerate(sequences) if sequence.token_ids]
        batches = pack([_length(sequences[i]) for i in useful], self.settings.tokens)
        count = self.world.all_max(len(batches))
        for number, members in enumerate(batches, start=1):
            yield collate(sequences, [useful[m] for m in members], self.world.device), True, number == count
        for number in range(len(batches) + 1, count + 1):
            dummy = SimpleNamespace(prompt_ids=[0], token_ids=[0])
            yield collate([dummy], [0], self.world.device), False, number == count


def learning_rate(
    step: int, peak: float, warmup: int = 0, total: int = 0, decay: Decay = "constant", floor: float = 0.0
) -> float:
    """Rate of optimizer step `step`, counted from 0.

    peak · (step + 1) / warmup during warm-up. After it `peak`, or a linear or cosine decay to `floor` · `peak` at step
    `total`, constant from there.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if decay == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 1 - done if decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (floor + (1 - floor) * left)


def training_flops(model: PreTrainedModel, lengths: Sequence[int], scored: int) -> Flops:
    """One update on sequences of `lengths` tokens, prompts included, of which `scored` are response tokens."""
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    body = (p for p in model.parameters() if p is not embedding and p is not head)
    active = active_share(model)
    per_token = sum(_flops_factor(p) * p.numel() * (active if is_experts(p) else 1) for p in body)
    geometry = Geometry.of(model)
    return Flops(
        layers=float(per_token * sum(lengths)),
        attention=6.0 * geometry.layers * geometry.attention_width * sum(n * n for n in lengths),
        head=float(_flops_factor(head) * config.hidden_size * config.vocab_size * scored),
    )


def _flops_factor(parameter: Tensor) -> int:
    return 6 if parameter.requires_grad else 4


def trains_in_place(settings: LearnerSettings, world: World) -> bool:
    """Whether an engine on the model's parameters sees every step: not if these are sharded or have adapters."""
    return not world.is_distributed and settings.lora is None


def _length(sequence: Tokens) -> int:
    return len(sequence.prompt_ids) + len(sequence.token_ids)


def _on_cpu(parts: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The metrics of all micro-batches on the CPU, copied at once."""
    if not parts:
        return []
    names = list(parts[0])
    table = torch.stack([torch.stack([part[name].detach().double() for name in names]) for part in parts]).cpu()
    return [dict(zip(names, row.unbind())) for row in table]
