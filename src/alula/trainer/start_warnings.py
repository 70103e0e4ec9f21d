"""Warnings before the first step: valid settings that are probably unintended."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedConfig

from alula.config.run import RunConfig
from alula.mismatch.savings import sparse_limit
from alula.models.experts import unadapted_experts
from alula.models.shapes import SHAPES
from alula.sparsity.footprint import is_ever_sparse
from alula.sparsity.policy import Sparsity
from alula.sparsity.schedule import Schedule
from alula.trainer.health_checks import HealthWarning

SIZES = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
OTHER_MODEL_ADVICE = (
    "Measure it with `alula calibrate --verify`, or plan one for this model: `alula calibrate`, then `alula plan`."
)


def start_warnings(
    config: RunConfig, model: PreTrainedConfig, prompt: int, layers: int, experts: int, parameters: int
) -> Iterator[HealthWarning]:
    """All of them. `prompt` is the length of the longest one, `experts` and `parameters` those of the model."""
    if warning := never_sparse(config, prompt, layers):
        yield HealthWarning("never-sparse", *warning)
    for warning in experts_left_out(config, experts, parameters):
        yield HealthWarning("experts-left-out", *warning)
    for message in schedules_of_other_models(config.policies(), model):
        yield HealthWarning("other-model", message, OTHER_MODEL_ADVICE)


def never_sparse(config: RunConfig, prompt: int, layers: int) -> tuple[str, str] | None:
    """Message and advice if no sequence of the run is long enough for its policy to be sparse. `prompt` is the length
    of the longest one."""
    answer, sparsity = config.most_generated(prompt), config.sparsity
    if sparsity.dense or is_ever_sparse(sparsity, prompt, answer, layers):
        return None
    limit, smaller = sparse_limit(sparsity, prompt + answer)
    return (
        f"Nothing will be sparse: no sequence exceeds {limit} ({sparsity.describe()}; the longest has "
        f"{prompt + answer:,} tokens), so this is a dense run.",
        f"Lower the {smaller}, raise sampling.max_new_tokens, or set sparsity=dense.",
    )


def experts_left_out(config: RunConfig, experts: int, parameters: int) -> list[tuple[str, str]]:
    """(message, advice) for every adapter of the run that does not reach the model's experts."""
    adapters = (("learner.lora", config.learner.lora), ("distill", config.distill))
    warnings = [unadapted_experts(experts, parameters, name) for name, adapter in adapters if adapter]
    return [warning for warning in warnings if warning]


def schedules_of_other_models(policies: Sequence[Sparsity], config: PreTrainedConfig) -> list[str]:
    """A warning for every schedule whose model has another shape than `config`.

    A schedule that `alula plan` wrote is bound to its model and raises with any other (`Schedule.check`). A preset
    names its model only in its notes: a model of the same shape may have been trained from it, under any name.
    """
    parts = [part for sparsity in policies for part in (sparsity.evict, sparsity.select) if part is not None]
    schedules = [part.budget for part in parts if isinstance(part.budget, Schedule)]
    return [message for schedule in schedules if (message := _other_model(schedule, config))]


def _other_model(schedule: Schedule, config: PreTrainedConfig) -> str | None:
    planned_for = str(schedule.notes.get("model", ""))
    model, sizes = config.get_text_config(), SHAPES.get(planned_for.rpartition("/")[2].lower(), {})
    for size in SIZES:
        value = getattr(model, size, None)
        if sizes and value != sizes[size]:
            return (
                f"Schedule {schedule.name!r} was planned for {planned_for} ({size}={sizes[size]}, here {value}): "
                "the tail that it guarantees there says nothing about this model."
            )
    return None
