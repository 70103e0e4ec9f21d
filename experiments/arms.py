"""Which runs answer which question. An arm that two questions share is one run."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from beds import Bed
from settings import sparsity_settings

from alula.sparsity.policy import Sparsity

Budgets = Mapping[str, Any]
"""Compressor -> the budget that the probe chose for a seed; of those that take part. `schedule` -> its file."""

PRESETS = {"naive": "none", "sparse-rl": "sparse-rl", "tis": "tis", "reroll": "reroll", "strict": "strict"}
ABLATIONS = {
    "reject-only": "{preset: sparse-rl, weight: none}",
    "reweight-only": "{preset: sparse-rl, veto: null}",
    "sparse-rl": "sparse-rl",
    "veto-1e-5": "{preset: sparse-rl, veto: 1e-5}",
    "veto-1e-3": "{preset: sparse-rl, veto: 1e-3}",
    "sparse-rl-code": "sparse-rl-code",
    "kept-baseline": "{preset: sparse-rl, vetoed_in_baseline: false}",
    "strict": "strict",
}
PARTS = {
    "reject-kept": "{preset: strict, veto: 1e-4}",
    "reject-1e-3": "{preset: strict, vetoed_in_baseline: true}",
    "kept-1e-3": "{preset: strict, weight: token}",
    "strict-1e-2": "{preset: strict, veto: 1e-2}",
}
"""What `strict` is made of: each leaves out one of its three parts, and the last goes further."""
FIELD = {name: name for name in ("tis", "mis", "icepop", "geometric", "prefix-only")}
"""Corrections that others use, and a control."""
CORRECTIONS = PRESETS | ABLATIONS | PARTS | FIELD
RELEASED = (
    "objective.loss=grpo",
    "objective.clip_low=0.2",
    "objective.clip_high=0.2",
    "objective.kl=1e-4",
    "objective.kl_clamp=10",
    "learner.updates=4",
)
"""The objective of Sparse-RL's scripts, less its correction."""
OTHERS = ("snapkv", "streaming", "keydiff")
METHODS = ("rkv", *OTHERS, "block-topk")


@dataclass(frozen=True)
class Arm:
    label: str
    """The same for all seeds, whose budgets may differ."""
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
        """Name of its run folder, without the seed."""
        policy = Sparsity.parse(self.sparsity)
        parts = [f"{p.method}-{p.budget}" for p in (policy.evict, policy.select) if p is not None]
        return "-".join([*(parts or ["dense"]), self.correction, *filter(None, [self.tag])])

    def matches(self, pattern: str) -> bool:
        """Whether a regular expression finds something in the name or in the label; ^ and $ are those of either."""
        return any(re.search(pattern, text) for text in (self.name, self.label))

    @property
    def settings(self) -> list[str]:
        return [*sparsity_settings(self.sparsity), f"objective.correction={CORRECTIONS[self.correction]}", *self.extra]


DENSE = Arm("dense", "dense", "naive")


def neighbour(bed: Bed, size: int, steps: int) -> int:
    """The budget this many steps of the bed's grid above, or the last one there."""
    return bed.budgets[max(0, min(bed.budgets.index(size) + steps, len(bed.budgets) - 1))]


def collapse(bed: Bed, budgets: Budgets, methods: tuple[str, ...]) -> list[Arm]:
    """Does training on sparse rollouts collapse, and does a correction save it?"""
    arms = [DENSE, Arm("dense, sparse-rl", "dense", "sparse-rl")]
    for method in methods:
        arms += [Arm(f"{method} {name}", bed.evictor(method, budgets[method]), name) for name in PRESETS]
    return arms


def main_collapse(bed: Bed, budgets: Budgets) -> list[Arm]:
    return collapse(bed, budgets, ("rkv",))


def other_compressors(bed: Bed, budgets: Budgets) -> list[Arm]:
    return collapse(bed, budgets, tuple(method for method in OTHERS if method in budgets))


def correction(bed: Bed, budgets: Budgets) -> list[Arm]:
    """What matters in Sparse-RL's correction?"""
    milder = neighbour(bed, budgets["rkv"], 1)
    names = ("naive", *ABLATIONS)
    tempting = [Arm(name, bed.evictor("rkv", budgets["rkv"]), name) for name in (*names, *PARTS)]
    return tempting + [Arm(f"{name}, milder", bed.evictor("rkv", milder), name) for name in names]


def presets(bed: Bed, budgets: Budgets) -> list[Arm]:
    """Do the corrections that others use do better? Does Sparse-RL's released objective?"""
    arms = [DENSE, Arm("dense, released", "dense", "naive", RELEASED, "released")]
    for size, suffix in ((budgets["rkv"], ""), (neighbour(bed, budgets["rkv"], 1), ", milder")):
        policy = bed.evictor("rkv", size)
        arms += [Arm(f"{name}{suffix}", policy, name) for name in ("naive", "sparse-rl", "strict", *FIELD)]
        extra = (*RELEASED, "sparsity.evict.sinks=0")
        arms.append(Arm(f"sparse-rl-code, released{suffix}", policy, "sparse-rl-code", extra, "released"))
    return arms


def budget(bed: Bed, budgets: Budgets) -> list[Arm]:
    """Accuracy against KV saved: the chosen budget, and one, two and four steps of the grid above it; what needs no
    large budget also one step below."""
    arms = [DENSE]
    usual = ("naive", "sparse-rl", "reroll")
    tried = {0: (*usual, "strict"), 1: (*usual, "strict"), 2: (*usual, "strict"), 4: usual[:2], -1: ("strict",)}
    for step, names in tried.items():  # four steps above there is nothing to reroll
        size = neighbour(bed, budgets["rkv"], step)
        arms += [Arm(f"rkv chosen {step:+d}, {name}", bed.evictor("rkv", size), name) for name in names]
    return arms


def threshold(bed: Bed, budgets: Budgets) -> list[Arm]:
    """Does the tail before training predict the outcome, the same for eviction as for selection?"""
    evict = [Arm(f"rkv {size}", bed.evictor("rkv", size), "tis") for size in bed.budgets]
    return evict + [Arm(f"block-topk {size}", bed.selector(size), "tis") for size in bed.read_budgets]


def distill(bed: Bed, budgets: Budgets) -> list[Arm]:
    """Does an adapter of the sparse policy change the outcome at the same budget?"""
    policy, names = bed.evictor("rkv", budgets["rkv"]), ("naive", "sparse-rl", "reject-only", "strict", "tis")
    arms = [Arm(name, policy, name) for name in names]
    arms += [Arm(f"{name}, distilled", policy, name, bed.distill, "distill") for name in names]
    first = (*bed.distill, bed.distill_first)
    return arms + [Arm(f"{name}, distilled first", policy, name, first, "distill-first") for name in names]


def control(bed: Bed, budgets: Budgets) -> list[Arm]:
    """Does a controller that counts vetoed rollouts save a run that begins at the tempting budget?"""

    def held(method: str, name: str, limit: int) -> Arm:
        ladder = [size for size in (*bed.budgets, 2 * bed.budgets[-1]) if size >= budgets[method]]  # the last is dense
        settings = ("enabled=true", "on_violation=adapt", f"vetoed={limit / 100}", f"ladder={ladder}")
        extra = tuple(f"control.{setting}" for setting in settings)
        label, policy = f"{method} {name}, held at {limit} %", bed.evictor(method, budgets[method])
        return Arm(label, policy, name, extra, "control" if limit == 10 else f"control-{limit}")

    names = ("naive", "sparse-rl", "tis", "strict")
    arms = [DENSE, *(Arm(f"rkv {name}", bed.evictor("rkv", budgets["rkv"]), name) for name in names)]
    for limit in (5, 10):
        arms += [held("rkv", name, limit) for name in names]
        arms += [held(method, "sparse-rl", limit) for method in OTHERS if method in budgets]
    five, ten = (held("rkv", "sparse-rl", limit) for limit in (5, 10))
    distilled = replace(ten, label=f"{ten.label}, distilled", extra=(*ten.extra, *bed.distill), tag="control-distill")
    first = replace(
        five,
        label=f"{five.label}, distilled first",
        tag="control-5-distill-first",
        extra=(*five.extra, *bed.distill, bed.distill_first),
    )
    return [*arms, distilled, first]


def transfer(bed: Bed, budgets: Budgets) -> list[Arm]:
    """Does the τ of one bed predict the outcome on another? Two neighbouring budgets of R-KV with tails on either side
    of τ, and a growing schedule of block-topk that `alula plan` made for τ."""
    below = budgets["rkv"]
    above = neighbour(bed, below, 1)
    arms = [DENSE, *(Arm(f"below, {name}", bed.evictor("rkv", below), name) for name in ("tis", "sparse-rl", "strict"))]
    arms += [Arm(f"above, {name}", bed.evictor("rkv", above), name) for name in ("tis", "sparse-rl")]
    if "schedule" in budgets:
        arms.append(Arm("schedule, tis", bed.selector(budgets["schedule"]), "tis"))
    return arms


QUESTIONS: dict[str, Callable[[Bed, Budgets], list[Arm]]] = {
    "collapse": main_collapse,
    "threshold": threshold,
    "budget": budget,
    "correction": correction,
    "presets": presets,
    "compressors": other_compressors,
    "distill": distill,
    "control": control,
    "transfer": transfer,
}
BY_PROBE = ("threshold", "budget", "transfer")
"""Read against what the probe says of a budget."""
PROBED = {"threshold": ("rkv", "block-topk"), "compressors": OTHERS, "control": ("rkv", *OTHERS)}
"""Compressors that must be probed before a question's runs; for the others `rkv`."""
