"""From an arm to the settings of `alula train`."""

from typing import Any

import yaml
from beds import Bed

from alula.config.load import Loader
from alula.sparsity.policy import Sparsity


def recipe_settings(bed: Bed) -> dict[str, Any]:
    return yaml.load(bed.recipe.read_text(), Loader)


def sparsity_settings(text: str) -> list[str]:
    """`rkv:24+4,window=4` as the command line spells a policy -> overrides of a recipe."""
    policy, found = Sparsity.parse(text), []
    if evict := policy.evict:
        fields = ("method", "budget", "buffer", "window", "sinks", "protect_prompt")
        found += [f"sparsity.evict.{name}={getattr(evict, name)}" for name in fields]
    if select := policy.select:
        values = vars(select) | {"budget": getattr(select.budget, "source", select.budget)}  # a schedule is its file
        found += [f"sparsity.select.{name}={value}" for name, value in values.items()]
    return found
