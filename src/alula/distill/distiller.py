"""DistillSparse (Sparrow, arXiv 2606.08446, Alg. 1): φ pulls the sparse policy towards the dense one.

    L = L_policy(sparse) + λ · D(sparse ‖ dense)        θ frozen, φ trained

    L_policy  = the clipped objective with ρ = q_θφ / q_recorded: no ξ, no rollout dropped
    D         = a divergence of `alula.distill.compare`, a mean over the step's tokens

Rollouts are those already made; the sparse forward pass is the policy that sampled them (`alula.distill.view`).
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alula.distill.adapter import Adapter, fresh
from alula.distill.compare import Compared, against_hidden, against_scores
from alula.distill.config import DistillConfig
from alula.distill.measure import QUANTILE, Acceptance
from alula.distill.policy import SparsePolicy
from alula.engine.rollout import Rollout, Scores
from alula.errors import require
from alula.mismatch.tail import lower_quantile
from alula.rl.correction import Correction
from alula.rl.distributed import World
from alula.rl.logprobs import chunked_logprobs, topk_logprobs
from alula.rl.losses import Loss, divisors, policy_loss
from alula.rl.optimizer import MasterAdamW
from alula.rl.packing import Packed, collate, pack


class Distiller:
    """Trains φ for the dense policy `model`, whose parameters it reads and never changes.

    `model` holds whole, plain parameters: the learner's own where there is one process and no LoRA, else a copy that
    is kept up to date. `loss` is the run's policy loss, for its kind and clip. Under several ranks each takes its own
    rollouts and the gradients of φ are summed.
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
        self.loss = loss or Loss()
        start = adapter or fresh(model, config.rank, config.alpha, config.targets, config.seed)
        self.policy = SparsePolicy(model, start, config.activation_checkpointing)
        self.optimizer = MasterAdamW(self.policy.adapter_parameters(), config.lr)
        self.steps = 0
        """Optimizer steps tried."""
        self.skipped = 0

    def adapter(self) -> Adapter:
        """φ as it is now, for the engine."""
        return self.policy.adapter()

    def load(self, adapter: Adapter) -> None:
        """Continue from a saved φ, with fresh moments."""
        ours = self.policy.layers
        require(
            adapter.rank == self.policy.rank and set(adapter.weights) == set(ours),
            f"distill: the adapter has rank {adapter.rank} and {len(adapter.weights)} modules, the settings ask for "
            f"rank {self.policy.rank} and {len(ours)}; use the settings it was made with.",
        )
        for name, (a, b) in adapter.weights.items():
            for key, value in ((f"{name}.lora_A", a), (f"{name}.lora_B", b)):
                self.optimizer.masters[key].data.copy_(value)
        self.optimizer.publish()

    # -- which rollouts -----------------------------------------------------------------------------------

    def chosen(self, prompts: int, step: int) -> list[bool]:
        """Which prompts of training step `step` are distilled, a `fraction` of them: a function of the seed."""
        count = max(1, round(self.config.fraction * prompts))
        picked = random.Random(f"{self.config.seed}/{step}").sample(range(prompts), min(count, prompts))
        return [index in set(picked) for index in range(prompts)]

    # -- training -----------------------------------------------------------------------------------------

    def step(
        self,
        rollouts: Sequence[Rollout],
        advantages: Tensor | None = None,
        teacher: Sequence[Scores] | None = None,
    ) -> dict[str, float]:
        """Train φ on sparse rollouts, with one advantage each where the policy loss takes part.

        `teacher` are the learner's scores before θ's update, for teacher=before. The metrics are taken from the
        training forward, so they describe φ before its update; acceptance is of this rank.
        """
        config, started = self.config, perf_counter()
        self._check(rollouts, advantages, teacher)
        parts: list[dict[str, float]] = []
        alphas: list[Tensor] = []
        order = list(range(len(rollouts)))
        random.Random(f"{config.seed}/{self.steps}").shuffle(order)
        for index in range(config.minibatches):
            parts.append(self._update(rollouts, order[index :: config.minibatches], advantages, teacher, alphas))
        tokens = sum(part["tokens"] for part in parts)
        metrics = {
            name: sum(part[name] * part["tokens"] for part in parts) / max(tokens, 1)
            for name in parts[0]
            if name != "tokens"
        }
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
        config, device = self.config, self.world.device
        lengths = torch.tensor([len(rollouts[i]) for i in index], device=device)
        divisor = divisors(
            self.loss, Correction.none(), torch.repeat_interleave(torch.arange(len(index), device=device), lengths),
            len(index), reduce=self.world.sum,
        )  # fmt: skip
        row = {i: n for n, i in enumerate(index)}
        tokens = float(self.world.sum(lengths.sum().double()))
        sums: dict[str, Tensor] = {}

        def add(name: str, value: Tensor) -> None:
            sums[name] = sums.get(name, 0.0) + value.detach().double().sum()

        with self.policy.dense_frozen():
            for batch in self._batches(rollouts, index):
                found = self._compare(batch, rollouts, teacher)
                recorded = batch.flat([r.logprobs for r in rollouts])  # type: ignore[misc]
                share = found.logprobs.sum() * 0.0
                if config.loss != "policy":
                    divergence = found.divergence.sum() / tokens
                    share = share + config.weight * divergence
                    add("divergence", found.divergence)
                if config.loss != "divergence":
                    assert advantages is not None
                    rows = torch.tensor([row[i] for i in batch.index], device=device)
                    policy, measured = policy_loss(
                        found.logprobs, recorded, batch.rows(advantages)[batch.sequence], torch.ones_like(recorded),
                        batch.sequence, self.loss, divisor.rows(rows),
                    )  # fmt: skip
                    share = share + policy
                    add("policy_loss", policy * tokens)
                    add("clip_fraction", measured["clip_fraction"] * len(recorded))
                share.backward()
                add("loss", share * tokens)
                add("sampled_drift", (found.logprobs.detach() - recorded).abs())
                if found.acceptance is not None and found.kl is not None:
                    alphas.append(found.acceptance)
                    add("kl", found.kl)
        names = sorted(self.world.gather(sorted(sums))[0] if self.world.many else sums)
        totals = self.world.sum(torch.stack([torch.as_tensor(sums.get(n, 0.0), device=device) for n in names]).double())
        means = dict(zip(names, (totals / max(tokens, 1)).tolist()))
        norm, taken = self._optimize(means["loss"])
        return means | {"grad_norm": norm, "skipped": float(not taken), "tokens": tokens}

    def _optimize(self, loss: float) -> tuple[float, bool]:
        if self.world.many:
            for master in self.optimizer.masters.values():
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                self.world.sum(master.grad)
        norm, taken = self.optimizer.step(self.config.lr, self.config.max_grad_norm, finite_loss=math.isfinite(loss))
        self.steps += 1
        self.skipped += not taken
        return norm, taken

    def _compare(self, batch: Packed, rollouts: Sequence[Rollout], teacher: Sequence[Scores] | None) -> Compared:
        config, temperature = self.config, rollouts[0].sampling.scored_temperature
        head, targets = self.policy.head, batch.target_ids
        if config.loss == "policy":
            hidden = self.policy(batch, rollouts)
            logprobs, _ = chunked_logprobs(hidden, head[0], targets, temperature, config.chunk, head[1], entropy=False)
            return Compared(logprobs, torch.zeros_like(logprobs))
        dense = None
        if config.teacher == "after":
            with torch.no_grad():
                dense = self.policy.dense(batch)
        hidden = self.policy(batch, rollouts)
        if config.whole_vocabulary:
            assert dense is not None
            overlap = config.divergence == "overlap"
            return against_hidden(hidden, dense, head, targets, temperature, overlap, config.chunk)
        scores = self._scores(batch, dense, teacher, temperature)
        return against_scores(hidden, scores, head, targets, temperature, config.chunk)

    def _scores(
        self, batch: Packed, dense: Tensor | None, teacher: Sequence[Scores] | None, temperature: float
    ) -> Scores:
        """The dense policy's log-probs of the batch's tokens, or of its top-K lists: taken now, or given."""
        config, head = self.config, self.policy.head
        wants_list = config.divergence == "topk-kl"
        if dense is not None:
            k = config.top_k if wants_list else 1
            best = topk_logprobs(dense, head[0], batch.target_ids, k, temperature, config.chunk, head[1])
            return Scores(best.logprobs, best.topk_ids, best.topk_logprobs) if wants_list else Scores(best.logprobs)
        assert teacher is not None
        flat = batch.flat([score.logprobs for score in teacher])
        if not wants_list:
            return Scores(flat)
        ids, values = zip(*((score.topk_ids, score.topk_logprobs) for score in teacher))
        return Scores(flat, batch.flat(ids), batch.flat(values))  # type: ignore[arg-type]

    # -- measuring ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, rollouts: Sequence[Rollout]) -> Acceptance:
        """Exact α of every token: the sparse policy with φ as it is now against the dense policy."""
        self._check_rollouts(rollouts)
        temperature = rollouts[0].sampling.scored_temperature
        alpha, kl = ([torch.empty(0)] * len(rollouts) for _ in range(2))
        for batch in self._batches(rollouts, range(len(rollouts))):
            found = against_hidden(
                self.policy(batch, rollouts), self.policy.dense(batch), self.policy.head, batch.target_ids,
                temperature, False, self.config.chunk,
            )  # fmt: skip
            assert found.acceptance is not None
            assert found.kl is not None
            for i, a, k in zip(batch.index, batch.split(found.acceptance), batch.split(found.kl)):
                alpha[i], kl[i] = a, k
        return Acceptance.of(rollouts, alpha, kl)

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs of the rollouts' own tokens under the sparse policy that sampled them, with φ as it is now."""
        self._check_rollouts(rollouts)
        found = [torch.empty(0)] * len(rollouts)
        for batch in self._batches(rollouts, range(len(rollouts))):
            weight, bias = self.policy.head
            logprobs, _ = chunked_logprobs(
                self.policy(batch, rollouts), weight, batch.target_ids, rollouts[0].sampling.scored_temperature,
                self.config.chunk, bias, entropy=False,
            )  # fmt: skip
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

    def _check_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        require(len(rollouts) > 0, "distill: no rollouts.")
        temperatures = {r.sampling.scored_temperature for r in rollouts}
        require(len(temperatures) == 1, f"distill: rollouts of temperatures {sorted(temperatures)}; use one per step.")

    def _check(self, rollouts: Sequence[Rollout], advantages: Tensor | None, teacher: Sequence[Scores] | None) -> None:
        self._check_rollouts(rollouts)
        require(
            all(r.logprobs is not None for r in rollouts),
            "distill: rollouts without log-probs; sample without top-p and top-k.",
        )
        require(
            advantages is not None or self.config.loss == "divergence",
            f"distill.loss={self.config.loss} needs advantages; without rewards use loss=divergence.",
        )
        require(
            teacher is not None or self.config.teacher == "after" or self.config.loss == "policy",
            "distill.teacher=before needs the dense scores taken before the update; pass teacher=.",
        )
