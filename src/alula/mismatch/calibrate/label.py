"""Policies and families in as few words as a command line needs for them: what is the default anyway is left out."""

from dataclasses import fields
from inspect import signature
from typing import Any

from alula.mismatch.calibrate.file import Configuration
from alula.sparsity.policy import Evict, Select, Sparsity, describe_budget

USUAL = {
    Evict: {name: one.default for name, one in signature(Evict.__init__).parameters.items()},
    Select: {one.name: one.default for one in fields(Select)},
}


def label(policy: Sparsity) -> str:
    """`rkv:512+128`, `snapkv:48+8,window=4 & block-topk:1024`: `parse_sparsity` reads it back."""
    return " & ".join(part_label(part) for part in (policy.evict, policy.select) if part is not None) or "dense"


def part_label(part: Evict | Select) -> str:
    head = f"{part.method}:{describe_budget(part.budget)}" + (f"+{part.buffer}" if isinstance(part, Evict) else "")
    return ",".join([head, *(f"{name}={value}" for name, value in changed(part).items() if name != "buffer")])


def family_label(family: Configuration) -> str:
    """`rkv:buffer=64`, `snapkv:budget=48:buffer=8&block-topk`: `parse_methods` reads it back."""
    policy = family.sparsity(1 << 30)
    one, beside = (policy.evict, None) if policy.select is None else (policy.select, policy.evict)
    assert one is not None
    words = [part_words(one)] if beside is None else [part_words(beside, budget=beside.budget), part_words(one)]
    return "&".join(words)


def part_words(part: Evict | Select, **more: Any) -> str:
    return ":".join([part.method, *(f"{name}={value}" for name, value in (more | changed(part)).items())])


def changed(part: Evict | Select) -> dict[str, Any]:
    """Its settings that are not what they are by default."""
    settings, usual = vars(part) | dict(getattr(part, "options", ())), USUAL[type(part)]
    named = ("method", "budget", "options")
    return {k: v for k, v in settings.items() if k not in named and (k not in usual or usual[k] != v)}
