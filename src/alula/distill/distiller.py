"""DistillSparse (Sparrow, arXiv 2606.08446, Alg. 1): an adapter φ pulls the sparse policy towards the dense one.

    L = L_policy(sparse) + λ · KL(sparse ‖ dense)        weights θ frozen, adapter φ trained

    L_policy  the clipped objective with ρ = q_θφ / q_recorded: no correction weights, no dropped rollouts
    KL        exact, over the whole vocabulary; a mean over the step's tokens

The rollouts are the training step's own. The sparse forward pass is the policy that sampled them
(`attention.visibility`). Without rewards (`distill.first`, `alula distill`) the loss is the KL alone.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.distill.divergence import compare_policies, sparse_logprobs
from alula.distill.sparse_policy import SparsePolicy
from alula.distributed import World
from alula.engine.rollout import Rollout
from alula.errors import require
from alula.learner.optimizer import MasterAdamW
from alula.learner.packing import Packed, collate, pack
from alula.mismatch.tail import Tail, lower_quantile, tail
from alula.models.lora import Adapter, init_adapter
from alula.objective.correction import Correction
from alula.objective.policy_loss import Divisors, divisors, policy_loss
from alula.objective.settings import Loss
from alula.settings import DistillSettings

EPS = 1e-6
"""AdamW's epsilon. Where the two policies agree, as on short answers, the gradient is rounding noise of about 1e-8; a
smaller epsilon would turn that noise into steps of full size."""
QUANTILE = 0.05


class Distiller:
    """Trains the adapter φ for the dense policy `model`, whose parameters it reads and never changes.

    `model` holds full, plain parameters: the learner's own with one process and no LoRA, else a copy that is kept up
    to date. `adapter` continues from a saved adapter; `base_model` is the model's name in the files to save. `loss` is
    the run's policy loss. `compiled` applies where `settings.compile` is unset; by default layers are compiled on a
    GPU. Under several ranks each rank takes its own rollouts, and the gradients are summed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: DistillSettings | None = None,
        *,
        adapter: Adapter | None = None,
        base_model: str = "",
        loss: Loss | None = None,
        world: World | None = None,
        compiled: bool | None = None,
    ) -> None:
        self.settings = settings = settings or DistillSettings()
        self.world = world or World(device=model.device)
        self.loss = replace(loss or Loss(), kl=0.0)  # the reference here is the dense policy
        initial = adapter or init_adapter(model, settings.rank, settings.alpha, settings.targets, settings.seed)
        initial = replace(initial, base_model=base_model or initial.base_model)
        compiled = compiled if settings.compile is None else settings.compile
        compiled = self.world.device.type == "cuda" if compiled is None else compiled
        self.policy = SparsePolicy(model, initial, settings.activation_checkpointing, compiled)
        self.optimizer = MasterAdamW(self.policy.adapter_parameters(), settings.lr, eps=EPS, compute=model.dtype)
        self.steps = 0
        """Optimizer steps tried."""
        self.skipped = 0

    def adapter(self) -> Adapter:
        """The adapter as it is now, for the engine or a file."""
        return self.policy.adapter()

    def is_chosen(self, index: int) -> bool:
        """Whether the prompt with this index in the run is distilled: one random prompt of every 1 / fraction."""
        fraction = self.settings.fraction

        def first_of(stratum: int) -> int:
            return math.ceil(stratum / fraction - 1e-9)

        stratum = int(index * fraction) + 1
        while first_of(stratum) > index:
            stratum -= 1
        size = first_of(stratum + 1) - first_of(stratum)
        return index == first_of(stratum) + random.Random(f"{self.settings.seed}/{stratum}").randrange(size)

    # -- training -----------------------------------------------------------------------------------------

    def step(
        self, rollouts: Sequence[Rollout], advantages: Tensor | None = None, minibatches: int | None = None
    ) -> dict[str, float]:
        """Train the adapter on sparse rollouts, with one advantage each; without advantages, on the KL alone.

        `minibatches` replaces the settings' number of optimizer steps. The metrics come from the training forward, so
        they describe the adapter before its update.
        """
        started = perf_counter()
        minibatches = minibatches or self.settings.minibatches
        self._check(rollouts)
        order, total = self.world.global_order([(r.prompt_index, r.sample_index) for r in rollouts])
        assigned = [position * minibatches // total for position in order]
        alphas: list[Tensor] = []
        parts = []
        for minibatch in range(minibatches):
            index = [i for i, number in enumerate(assigned) if number == minibatch]
            parts.append(self._update(rollouts, index, advantages, alphas))
        tokens = sum(part["tokens"] for part in parts)
        metrics = {name: sum(p[name] * p["tokens"] for p in parts) / max(tokens, 1) for name in parts[0]}
        gathered = [alpha for rank in self.world.all_gather([alpha.cpu() for alpha in alphas]) for alpha in rank]
        if gathered:
            alpha = torch.cat(gathered).numpy()
            metrics |= {"acceptance_mean": float(alpha.mean()), "acceptance_tail": lower_quantile(alpha, QUANTILE)}
        return metrics | {"tokens": tokens, "time": perf_counter() - started}

    def _update(
        self, rollouts: Sequence[Rollout], index: list[int], advantages: Tensor | None, alphas: list[Tensor]
    ) -> dict[str, float]:
        """One optimizer step, none if no rank has tokens; the metrics are means over its tokens, on all ranks."""
        step_divisors = self._divisors(rollouts, index)
        count = step_divisors.policy.new_tensor(sum(len(rollouts[i]) for i in index))
        tokens = float(self.world.all_sum(count))
        names = ("loss", "policy_loss", "clip_fraction", "drift", "kl")
        if tokens == 0:  # AdamW would move the adapter on its momentum
            return dict.fromkeys((*names, "grad_norm", "skipped", "tokens"), 0.0)
        row = {i: position for position, i in enumerate(index)}
        sums = dict.fromkeys(names, torch.zeros((), dtype=torch.float64, device=self.world.device))
        for batch in self._batches(rollouts, index):
            dense = self.policy.dense(batch)
            with self.policy.dense_frozen():
                compared = compare_policies(
                    self.policy(batch, rollouts),
                    dense,
                    self.policy.head,
                    batch.target_ids,
                    rollouts[0].sampling.scored_temperature,
                    self.settings.chunk,
                )
                recorded = batch.flat([_logprobs(r) for r in rollouts])
                share = self.settings.weight * compared.kl.sum() / tokens
                if advantages is not None:
                    rows = torch.tensor([row[i] for i in batch.index], device=self.world.device)
                    policy, measured = policy_loss(
                        compared.logprobs,
                        recorded,
                        batch.rows(advantages)[batch.sequence],
                        torch.ones_like(recorded),
                        batch.sequence,
                        self.loss,
                        step_divisors.rows(rows),
                    )
                    share = share + policy
                    sums["policy_loss"] = sums["policy_loss"] + policy.detach() * tokens
                    sums["clip_fraction"] = sums["clip_fraction"] + measured["clip_fraction"] * len(recorded)
                self.optimizer.backward(share)
                sums["loss"] = sums["loss"] + share.detach() * tokens
                sums["drift"] = sums["drift"] + (compared.logprobs.detach() - recorded).abs().sum()
                sums["kl"] = sums["kl"] + compared.kl.detach().sum()
                alphas.append(compared.acceptance)
        means = dict(zip(names, (self.world.all_sum(torch.stack(list(sums.values()))) / tokens).tolist()))
        norm, taken = self._optimize(finite_loss=math.isfinite(means["loss"]))
        return means | {"grad_norm": norm, "skipped": float(not taken), "tokens": tokens}

    def _optimize(self, finite_loss: bool) -> tuple[float, bool]:
        for master in self.optimizer.masters.values() if self.world.is_distributed else ():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            self.world.all_sum(master.grad)
        norm, taken = self.optimizer.step(self.settings.lr, self.settings.max_grad_norm, finite_loss)
        self.steps += 1
        self.skipped += not taken
        return norm, taken

    def _divisors(self, rollouts: Sequence[Rollout], index: Sequence[int]) -> Divisors:
        lengths = torch.tensor([len(rollouts[i]) for i in index], dtype=torch.int64, device=self.world.device)
        sequence = torch.repeat_interleave(torch.arange(len(index), device=self.world.device), lengths)
        limit = max((rollout.sampling.max_new_tokens for rollout in rollouts), default=1)
        return divisors(self.loss, Correction.none(), sequence, len(index), max_length=limit, reduce=self.world.all_sum)

    # -- measuring ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, rollouts: Sequence[Rollout]) -> "Acceptance":
        """Exact α of every token: the sparse policy with the present adapter against the dense policy."""
        temperature = self._temperature(rollouts)
        alpha, kl = ([torch.empty(0)] * len(rollouts) for _ in range(2))
        for batch in self._batches(rollouts, range(len(rollouts))):
            dense = self.policy.dense(batch)
            with self.policy.dense_frozen():
                hidden = self.policy(batch, rollouts)
            compared = compare_policies(
                hidden, dense, self.policy.head, batch.target_ids, temperature, self.settings.chunk
            )
            for i, a, k in zip(batch.index, batch.split(compared.acceptance), batch.split(compared.kl)):
                alpha[i], kl[i] = a, k
        return Acceptance.of(rollouts, alpha, kl)

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs of the rollouts' tokens under the sparse policy that sampled them, with the present adapter."""
        self._temperature(rollouts)
        scores = [torch.empty(0)] * len(rollouts)
        for batch in self._batches(rollouts, range(len(rollouts))):
            with self.policy.dense_frozen():
                logprobs = sparse_logprobs(self.policy, batch, rollouts, self.settings.chunk)
            for i, score in zip(batch.index, batch.split(logprobs)):
                scores[i] = score
        return scores

    # -- checkpoints --------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Live tensors that a checkpoint writes and reads: the adapter in float32 and its moments."""
        return {f"distill.{name}": tensor for name, tensor in self.optimizer.tensors().items()}

    def state(self) -> dict[str, int]:
        return {"steps": self.steps, "skipped": self.skipped}

    def resume(self, state: Mapping[str, Any]) -> None:
        """After a checkpoint was read into `tensors()`."""
        self.optimizer.publish()
        self.steps, self.skipped = state["steps"], state["skipped"]

    # -- helpers ------------------------------------------------------------------------------------------

    def _batches(self, rollouts: Sequence[Rollout], index: Sequence[int]) -> Iterator[Packed]:
        useful = [i for i in index if len(rollouts[i])]
        sizes = [len(rollouts[i].prompt_ids) + len(rollouts[i]) for i in useful]
        for members in pack(sizes, self.settings.token_budget):
            yield collate(rollouts, [useful[m] for m in members], self.world.device)

    def _temperature(self, rollouts: Sequence[Rollout]) -> float:
        temperatures = {r.sampling.scored_temperature for r in rollouts}
        require(
            len(temperatures) == 1,
            f"distill: rollouts with temperatures {sorted(temperatures)}; give rollouts with a single temperature.",
        )
        return temperatures.pop()

    def _check(self, rollouts: Sequence[Rollout]) -> None:
        if rollouts or not self.world.is_distributed:
            self._temperature(rollouts)
        require(
            all(r.logprobs is not None for r in rollouts),
            "distill: rollouts without log-probs; sample without top_p and top_k.",
        )


@dataclass
class Acceptance:
    """Flat and aligned: α of every generated token, its position (prompt + generated) and its prompt."""

    alpha: np.ndarray
    positions: np.ndarray
    prompts: np.ndarray
    kl: float
    """Mean of KL(sparse ‖ dense) over the tokens."""

    @classmethod
    def of(cls, rollouts: Iterable[Rollout], alpha: Iterable[Tensor], kl: Iterable[Tensor]) -> "Acceptance":
        rollouts = list(rollouts)
        positions = [len(r.prompt_ids) + np.arange(len(r)) for r in rollouts]
        prompts = [np.full(len(r), r.prompt_index) for r in rollouts]
        alphas = torch.cat([a.cpu() for a in alpha]).numpy()
        mean = float(torch.cat([k.cpu() for k in kl]).double().mean())
        return cls(alphas, np.concatenate(positions), np.concatenate(prompts), mean)

    @property
    def mean(self) -> float:
        return float(self.alpha.mean())

    @property
    def tail(self) -> float:
        """The 5th percentile over all tokens."""
        return lower_quantile(self.alpha, QUANTILE)

    def tails(self, width: int = 2000, bins: int | None = None) -> Tail:
        """The tail per length bin, with its confidence interval over prompts."""
        return tail(self.alpha, self.positions, self.prompts, width=width, bins=bins, quantile=QUANTILE)

    def metrics(self) -> dict[str, float]:
        return {"acceptance_mean": self.mean, "acceptance_tail": self.tail, "kl": self.kl}


def _logprobs(rollout: Rollout) -> Tensor:
    assert rollout.logprobs is not None
    return rollout.logprobs
