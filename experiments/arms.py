"""Which runs answer which question. An arm that two questions share is one run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from beds import Bed
from settings import sparsity_settings

from alula.sparsity.parse import parse_sparsity

Budgets = Mapping[str, int]
"""Compressor -> the budget that the probe chose."""

PRESETS = {"naive": "none", "sparse-rl": "sparse-rl", "tis": "tis", "reroll": "reroll"}
ABLATIONS = {
    "reject-only": "{preset: sparse-rl, weight: none}",
    "reweight-only": "{preset: sparse-rl, veto: null}",
    "sparse-rl": "sparse-rl",
    "veto-1e-5": "{preset: sparse-rl, veto: 1e-5}",
    "veto-1e-3": "{preset: sparse-rl, veto: 1e-3}",
    "sparse-rl-code": "sparse-rl-code",
}
CORRECTIONS = PRESETS | ABLATIONS
OTHERS = ("snapkv", "streaming", "keydiff")


@dataclass(frozen=True)
class Arm:
    sparsity: str
    """As the command line spells it."""
    correction: str
    """A name in CORRECTIONS."""
    extra: tuple[str, ...] = ()
    """Further settings."""
    tag: str = ""
    """Tells `extra` apart in the name."""

    @property
    def name(self) -> str:
        """Of its run folder, less the seed."""
        policy = parse_sparsity(self.sparsity)
        parts = [f"{p.method}-{p.budget}" for p in (policy.evict, policy.select) if p is not None]
        return "-".join([*(parts or ["dense"]), self.correction, *filter(None, [self.tag])])

    @property
    def settings(self) -> list[str]:
        return [*sparsity_settings(self.sparsity), f"objective.correction={CORRECTIONS[self.correction]}", *self.extra]


DENSE = Arm("dense", "naive")


def collapse(bed: Bed, budgets: Budgets, methods: tuple[str, ...]) -> list[Arm]:
    """Does training on sparse rollouts collapse, and does a correction save it?"""
    arms = [DENSE, Arm("dense", "sparse-rl")]
    for method in methods:
        arms += [Arm(bed.evictor(method, budgets[method]), name) for name in PRESETS]
    return arms


def main_collapse(bed: Bed, budgets: Budgets) -> list[Arm]:
    return collapse(bed, budgets, ("rkv",))


def other_compressors(bed: Bed, budgets: Budgets) -> list[Arm]:
    return collapse(bed, budgets, OTHERS)


def correction(bed: Bed, budgets: Budgets) -> list[Arm]:
    """What matters in Sparse-RL's correction?"""
    return [Arm(bed.evictor("rkv", budgets["rkv"]), name) for name in ABLATIONS]


def budget(bed: Bed, budgets: Budgets) -> list[Arm]:
    """Accuracy against KV saved, at four budgets from the chosen one up."""
    first = bed.budgets.index(budgets["rkv"])
    four = [bed.budgets[min(first + step, len(bed.budgets) - 1)] for step in (-1, 0, 2, 4)]
    names = ("naive", "sparse-rl", "reroll")
    return [DENSE, *(Arm(bed.evictor("rkv", size), name) for size in dict.fromkeys(four) for name in names)]


def threshold(bed: Bed, budgets: Budgets) -> list[Arm]:
    """Does the tail before training predict the outcome, the same for eviction as for selection?"""
    evict = [Arm(bed.evictor("rkv", size), "tis") for size in bed.budgets]
    return evict + [Arm(bed.selector(size), "tis") for size in bed.read_budgets]


def distill(bed: Bed, budgets: Budgets) -> list[Arm]:
    """Does an adapter of the sparse policy change the outcome at the same budget?"""
    extra = ("distill.rank=8", "distill.lr=1e-3", "distill.fraction=1.0", "distill.activation_checkpointing=false")
    policy = bed.evictor("rkv", budgets["rkv"])
    names = ("naive", "sparse-rl", "tis")
    return [Arm(policy, name) for name in names] + [Arm(policy, name, extra, "distill") for name in names]


QUESTIONS: dict[str, Callable[[Bed, Budgets], list[Arm]]] = {
    "collapse": main_collapse,
    "threshold": threshold,
    "budget": budget,
    "correction": correction,
    "compressors": other_compressors,
    "distill": distill,
}
ONE_SEED = ("threshold",)
"""A dose-response: many budgets, one run each."""
PROBED = {"threshold": ("rkv", "block-topk"), "compressors": OTHERS}
"""Compressors that must be probed before a question's runs; for the others `rkv`."""
