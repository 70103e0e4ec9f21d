"""A learner that attends as the rollout did: the sparse policy itself is trained, and the dense one shares its weights.

    python experiments/own_mask.py --bed tiny --seeds 3 --jobs 2
    python experiments/tables.py own-mask

The idea of Shadow Mask Distillation (arXiv 2605.06850). Every token is scored and trained with the KV that its rollout
held (`Rollout.history`), so no mismatch is left to correct. Arms at each budget of R-KV:

    naive, sparse-rl, strict    a dense learner, as everywhere else
    own mask                    L = policy loss of the sparse policy
    own mask, KL                L + λ KL(sparse ‖ dense), the dense policy without gradient: it teaches

Evaluated densely and with the policy of the rollouts. A finished run is not repeated. --out receives
`own-mask/<bed>.jsonl`, one line per run.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command
import probe
import torch
from arms import DENSE, Arm
from beds import BEDS, prepared
from raw import write_raw
from run import Run, in_a_child, run_all
from torch import Tensor, nn

from alula.distill.attention.attention import use_sparse_attention
from alula.distill.attention.visibility import Visibility
from alula.learner.forward import hidden_states
from alula.learner.logprobs import chunked_logprobs
from alula.learner.packing import Packed
from alula.models.load import lm_logits, share_weights
from alula.trainer.trainer import Trainer

BUDGETS = (24, 16)
OWN = {"own mask": 0.0, "own mask, KL": 1.0}
"""λ by arm."""
BOTH = ("eval.sparse=true",)


class SparseLearner(nn.Module):
    """Takes the place of a learner's dense policy: the same parameters under the rollouts' own masks."""

    def __init__(self, trainer: Trainer, divergence: float) -> None:
        super().__init__()
        self.learner, self.divergence = trainer.learner, divergence
        self.dense = self.learner.policy
        self.twin = share_weights(self.learner.model).eval()
        use_sparse_attention(self.twin)
        self.rollouts: Sequence[Any] = []
        self.tokens, self.kl = 1, torch.zeros(())
        micro_batches, loss = self.learner._micro_batches, trainer.updater._micro_batch_loss

        def watched(rollouts: Sequence[Any]) -> Iterator[tuple[Packed, bool, bool]]:
            self.rollouts, self.tokens = rollouts, sum(len(r.token_ids) for r in rollouts)
            return micro_batches(rollouts)

        def with_divergence(*given: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
            share, metrics = loss(*given, **options)
            return share + self.divergence * self.kl / self.tokens, metrics

        self.learner._micro_batches = watched  # type: ignore[method-assign]
        self.learner.policy = self  # type: ignore[assignment]
        trainer.updater._micro_batch_loss = with_divergence  # type: ignore[method-assign]
        trainer.collector._recorded = lambda step, indices, first: [True] * len(indices)  # type: ignore[method-assign]

    def forward(self, batch: Packed, temperature: float, entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        visibility = Visibility.of([self.rollouts[i] for i in batch.index], batch.input_ids.device)
        hidden = hidden_states(self.twin, batch, visibility=visibility)
        head = self.learner.model.get_output_embeddings()
        if self.divergence and torch.is_grad_enabled():
            sparse = torch.log_softmax(lm_logits(hidden, head.weight) / temperature, -1)
            with torch.no_grad():
                dense = torch.log_softmax(
                    lm_logits(hidden_states(self.learner.model, batch), head.weight) / temperature, -1
                )
            self.kl = (sparse.exp() * (sparse - dense)).sum()
        return chunked_logprobs(
            hidden, head.weight, batch.target_ids, temperature, self.dense.chunk, None, entropy=entropy
        )


@dataclass(frozen=True)
class OwnMaskRun(Run):
    divergence: float = 0.0

    def prepare(self, trainer: Trainer) -> None:
        SparseLearner(trainer, self.divergence)


def planned(bed: Any, seed: int, work: Path) -> list[Run]:
    runs: list[Run] = [Run(bed, DENSE, seed, work)]
    for budget in BUDGETS:
        policy = bed.evictor("rkv", budget)
        runs += [
            Run(bed, Arm(f"rkv {budget}, {name}", policy, name, BOTH, "both"), seed, work)
            for name in ("naive", "sparse-rl", "strict")
        ]
        for label, divergence in OWN.items():
            tag = label.replace(", ", "-").replace(" ", "-").lower()
            arm = Arm(f"rkv {budget}, {label}", policy, "naive", BOTH, tag)
            runs.append(OwnMaskRun(bed, arm, seed, work, divergence=divergence))
    return runs


def main() -> None:
    parser = command.trainer(__doc__)
    parser.add_argument("--bed", choices=BEDS, default="tiny")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    bed, work = BEDS[options.bed], options.work / options.bed
    runs = []
    for seed in range(options.seeds):
        in_a_child(prepared, bed, seed, work, probe.print_step)
        runs += planned(bed, seed, work)
    run_all(runs, options.jobs, deadline)
    write_raw("own-mask", bed, [(run.arm, run.seed) for run in runs], work, options.out)


if __name__ == "__main__":
    main()
