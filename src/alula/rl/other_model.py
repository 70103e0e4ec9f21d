"""A published schedule on a model that it was not made for: it is taken, but not in silence.

One that `alula plan` wrote is made out to its model and refused with any other (`Schedule.check`); a preset names its
model in its notes only. A model of that shape may have been trained from it, under any name; one of another shape not.
"""

from collections.abc import Sequence

from transformers import PreTrainedConfig

from alula.shapes import SHAPES
from alula.sparsity.policy import Sparsity
from alula.sparsity.schedule import Schedule

SIZES = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
ADVICE = "Measure it with `alula calibrate --verify`, or make one for this model: `alula calibrate`, then `alula plan`."


def made_for_another(policies: Sequence[Sparsity], config: PreTrainedConfig) -> list[str]:
    """A sentence for every schedule whose model has another shape than `config` says."""
    budgets = [part.budget for sparsity in policies for part in (sparsity.evict, sparsity.select) if part is not None]
    return [said for budget in budgets if isinstance(budget, Schedule) and (said := difference(budget, config))]


def difference(schedule: Schedule, config: PreTrainedConfig) -> str | None:
    origin = str(schedule.notes.get("model", ""))
    model, shape = config.get_text_config(), SHAPES.get(origin.rpartition("/")[2].lower(), {})
    for size in SIZES:
        here = getattr(model, size, None)
        if shape and here != shape[size]:
            return (
                f"Schedule {schedule.name!r} was made for {origin} ({size}={shape[size]}, here {here}): "
                "the tail that it holds there says nothing about this model."
            )
    return None
