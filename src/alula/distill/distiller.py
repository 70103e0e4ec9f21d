"""DistillSparse (Sparrow, arXiv 2606.08446, Alg. 1): φ pulls the sparse policy towards the dense one.

    L = L_policy(sparse) + λ · D(sparse ‖ dense)        θ frozen, φ trained

    L_policy  = the clipped objective with ρ = q_θφ / q_recorded: no ξ, no rollout dropped
    D         = a divergence of `alula.distill.divergence`, a mean over the step's tokens

Rollouts are those already made; the sparse forward pass is the policy that sampled them (`attention.visibility`).
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.distill.config import DistillConfig
from alula.distill.divergence import against_hidden, compared, sparse_logprobs
from alula.distill.measure import QUANTILE, Acceptance
from alula.distill.sparse_policy import SparsePolicy
from alula.distributed import World
from alula.engine.rollout import Rollout, Scores
from alula.errors import require
from alula.learner.optimizer import MasterAdamW
from alula.learner.packing import Packed, collate, pack
from alula.mismatch.tail import lower_quantile
from alula.models.lora import Adapter, init_adapter
from alula.objective.correction import Correction
from alula.objective.policy_loss import Divisors, divisors, policy_loss
from alula.objective.settings import Loss

EPS = 1e-6
"""AdamW's: where the two policies are the same, as on short answers, the gradient is rounding noise of about 1e-8, and
a smaller value would turn that into steps of full size."""


class Distiller:
    """Trains φ for the dense policy `model`, whose parameters it reads and never changes.

    `model` holds whole, plain parameters: the learner's own where there is one process and no LoRA, else a copy that
    is kept up to date. `adapter` continues from a saved φ. `loss` is the run's policy loss, for its kind and clip.
    Under several ranks each takes its own rollouts and the gradients of φ are summed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: DistillConfig | None = None,
        *,
        adapter: Adapter | None = None,
        loss: Loss | None = None,
        world: World | None = None,
    ) -> None:
        self.config = config = config or DistillConfig()
        self.world = world or World(device=model.device)
        self.loss = replace(loss or Loss(), kl=0.0)  # φ's reference is the dense policy, in the divergence
        start = adapter or init_adapter(model, config.rank, config.alpha, config.targets, config.seed)
        compiled = self.world.device.type == "cuda" if config.compile is None else config.compile
        self.policy = SparsePolicy(model, start, config.activation_checkpointing, compiled)
        self.optimizer = MasterAdamW(self.policy.adapter_parameters(), config.lr, eps=EPS, compute=model.dtype)
        self.steps = 0
        """Optimizer steps tried."""
        self.skipped = 0

    def adapter(self) -> Adapter:
        """φ as it is now, for the engine or a file."""
        return self.policy.adapter()

    def chosen(self, prompts: int, *seed: int) -> list[bool]:
        """Which of a step's prompts are distilled, a `fraction` of them: a function of the seeds."""
        count = min(prompts, max(1, round(self.config.fraction * prompts)))
        picked = set(random.Random(f"{self.config.seed}/{seed}").sample(range(prompts), count))
        return [index in picked for index in range(prompts)]

    # -- training -----------------------------------------------------------------------------------------

    @contextmanager
    def by_divergence(self, minibatches: int) -> Iterator[None]:
        """Steps without rewards: the divergence alone, from the dense policy as it is."""
        own = self.config
        self.config = replace(own, loss="divergence", teacher="after", minibatches=minibatches)
        try:
            yield
        finally:
            self.config = own

    def step(
        self, rollouts: Sequence[Rollout], advantages: Tensor | None = None, teacher: Sequence[Scores] | None = None
    ) -> dict[str, float]:
        """Train φ on sparse rollouts, with one advantage each where the policy loss takes part.

        `teacher` are the learner's scores before θ's update, for teacher=before. The metrics come from the training
        forward, so they describe φ before its update; acceptance is that of this rank's rollouts.
        """
        started, config = perf_counter(), self.config
        self._check(rollouts, advantages, teacher)
        order = list(range(len(rollouts)))
        random.Random(f"{config.seed}/{self.steps}").shuffle(order)
        alphas: list[Tensor] = []
        parts = [
            self._update(rollouts, order[number :: config.minibatches], advantages, teacher, alphas)
            for number in range(config.minibatches)
        ]
        tokens = sum(part["tokens"] for part in parts)
        metrics = {name: sum(p[name] * p["tokens"] for p in parts) / max(tokens, 1) for name in parts[0]}
        if not config.whole_vocabulary:
            del metrics["kl"]
        if alphas:
            every = torch.cat(alphas).cpu().numpy()
            metrics |= {"acceptance_mean": float(every.mean()), "acceptance_tail": lower_quantile(every, QUANTILE)}
        return metrics | {"tokens": tokens, "time": perf_counter() - started}

    def _update(
        self,
        rollouts: Sequence[Rollout],
        index: list[int],
        advantages: Tensor | None,
        teacher: Sequence[Scores] | None,
        alphas: list[Tensor],
    ) -> dict[str, float]:
        """One optimizer step; the metrics are means over its tokens, on all ranks."""
        whole = self._divisors(rollouts, index)
        tokens = max(1.0, float(self.world.all_sum(whole.policy.new_tensor(sum(len(rollouts[i]) for i in index)))))
        row = {i: place for place, i in enumerate(index)}
        names = ("loss", "divergence", "policy_loss", "clip_fraction", "drift", "kl")
        sums = dict.fromkeys(names, torch.zeros((), dtype=torch.float64, device=self.world.device))
        for batch in self._batches(rollouts, index):
            dense = self.policy.dense(batch) if self.config.asks_teacher_now else None
            with self.policy.dense_frozen():
                found = compared(self.policy, self.config, batch, rollouts, dense, teacher)
                recorded = batch.flat([_logprobs(r) for r in rollouts])
                share = self.config.weight * found.divergence.sum() / tokens
                if self.config.loss != "divergence":
                    assert advantages is not None
                    rows = torch.tensor([row[i] for i in batch.index], device=self.world.device)
                    policy, measured = policy_loss(
                        found.logprobs,
                        recorded,
                        batch.rows(advantages)[batch.sequence],
                        torch.ones_like(recorded),
                        batch.sequence,
                        self.loss,
                        whole.rows(rows),
                    )
                    share = share + policy
                    sums["policy_loss"] = sums["policy_loss"] + policy.detach() * tokens
                    sums["clip_fraction"] = sums["clip_fraction"] + measured["clip_fraction"] * len(recorded)
                self.optimizer.backward(share)
                sums["loss"] = sums["loss"] + share.detach() * tokens
                sums["divergence"] = sums["divergence"] + found.divergence.detach().sum()
                sums["drift"] = sums["drift"] + (found.logprobs.detach() - recorded).abs().sum()
                if found.acceptance is not None and found.kl is not None:
                    alphas.append(found.acceptance)
                    sums["kl"] = sums["kl"] + found.kl.sum()
        means = dict(zip(names, (self.world.all_sum(torch.stack(list(sums.values()))) / tokens).tolist()))
        norm, taken = self._optimize(finite_loss=math.isfinite(means["loss"]))
        return means | {"grad_norm": norm, "skipped": float(not taken), "tokens": tokens}

    def _optimize(self, finite_loss: bool) -> tuple[float, bool]:
        for master in self.optimizer.masters.values() if self.world.is_distributed else ():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            self.world.all_sum(master.grad)
        norm, taken = self.optimizer.step(self.config.lr, self.config.max_grad_norm, finite_loss)
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
    def measure(self, rollouts: Sequence[Rollout]) -> Acceptance:
        """Exact α of every token: the sparse policy with φ as it is now against the dense policy."""
        temperature = self._temperature(rollouts)
        alpha, kl = ([torch.empty(0)] * len(rollouts) for _ in range(2))
        for batch in self._batches(rollouts, range(len(rollouts))):
            dense = self.policy.dense(batch)
            with self.policy.dense_frozen():
                hidden = self.policy(batch, rollouts)
            found = against_hidden(
                hidden, dense, self.policy.head, batch.target_ids, temperature, False, self.config.chunk
            )
            assert found.acceptance is not None
            assert found.kl is not None
            for i, a, k in zip(batch.index, batch.split(found.acceptance), batch.split(found.kl)):
                alpha[i], kl[i] = a, k
        return Acceptance.of(rollouts, alpha, kl)

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs of the rollouts' own tokens under the sparse policy that sampled them, with φ as it is now."""
        self._temperature(rollouts)
        found = [torch.empty(0)] * len(rollouts)
        for batch in self._batches(rollouts, range(len(rollouts))):
            with self.policy.dense_frozen():
                logprobs = sparse_logprobs(self.policy, self.config, batch, rollouts)
            for i, own in zip(batch.index, batch.split(logprobs)):
                found[i] = own
        return found

    # -- checkpoints --------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Live tensors that a checkpoint writes and reads: φ in float32 and its moments."""
        return {f"distill.{name}": tensor for name, tensor in self.optimizer.tensors().items()}

    def state(self) -> dict[str, int]:
        return {"steps": self.steps, "skipped": self.skipped}

    def resume(self, state: Mapping[str, Any]) -> None:
        """After a checkpoint was read into `tensors()`."""
        self.optimizer.publish()
        self.steps, self.skipped = state["steps"], state["skipped"]

    # -- small helpers ------------------------------------------------------------------------------------

    def _batches(self, rollouts: Sequence[Rollout], index: Sequence[int]) -> Iterator[Packed]:
        useful = [i for i in index if len(rollouts[i])]
        sizes = [len(rollouts[i].prompt_ids) + len(rollouts[i]) for i in useful]
        for members in pack(sizes, self.config.token_budget):
            yield collate(rollouts, [useful[m] for m in members], self.world.device)

    def _temperature(self, rollouts: Sequence[Rollout]) -> float:
        found = {r.sampling.scored_temperature for r in rollouts}
        require(len(found) == 1, f"distill: rollouts of temperatures {sorted(found)}; give some, of one temperature.")
        return found.pop()

    def _check(self, rollouts: Sequence[Rollout], advantages: Tensor | None, teacher: Sequence[Scores] | None) -> None:
        if rollouts or not self.world.is_distributed:
            self._temperature(rollouts)
        require(
            all(r.logprobs is not None for r in rollouts),
            "distill: rollouts without log-probs; sample without top-p and top-k.",
        )
        loss, divergence = self.config.loss, self.config.divergence
        require(
            advantages is not None or loss == "divergence",
            f"distill.loss={loss} needs advantages; without rewards use loss=divergence.",
        )
        needed = self.config.teacher == "before" and loss != "policy"
        listed = divergence != "topk-kl" or all(score.topk_ids is not None for score in teacher or ())
        require(
            not needed or (teacher is not None and listed),
            f"distill.teacher=before with divergence={divergence} needs the dense scores taken before the update"
            + ("." if divergence != "topk-kl" else ", with their top-K lists."),
        )


def _logprobs(rollout: Rollout) -> Tensor:
    assert rollout.logprobs is not None
    return rollout.logprobs
