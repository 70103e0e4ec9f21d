"""Tasks of an environment of the `verifiers` package, as rows of data."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from alula.errors import SettingError, require


def load_env(name: str, options: Mapping[str, Any], setting: str) -> Any:
    """verifiers' environment for the taskset `name`; `options` are fields of its EnvConfig."""
    try:
        from verifiers.v1.configs.env import EnvConfig
        from verifiers.v1.env import Env
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import environment_class, load_environment
    except ModuleNotFoundError as error:
        raise SettingError(
            f"{setting}=verifiers:{name} needs the package verifiers 0.4 or newer (no module {error.name!r}); install "
            "it: pip install 'alula[verifiers]'."
        ) from error
    try:
        cls = environment_class(name, str(options.get("id", "")))
        config_cls: Any = concrete_type(cls, EnvConfig, origin=Env) or EnvConfig
        taskset = {**dict(options.get("taskset", {})), "id": name}
        return load_environment(config_cls.model_validate({**options, "taskset": taskset}))
    except (ModuleNotFoundError, ValueError, TypeError, AttributeError) as error:
        raise SettingError(f"{setting}=verifiers:{name} cannot be loaded: {' '.join(str(error).split())}") from error


def task_rows(name: str, size: int | None, options: Mapping[str, Any], setting: str) -> Iterator[dict[str, Any]]:
    """One row per task: its fields, with `prompt` as text. `options` are the taskset's."""
    taskset = load_env(name, {"taskset": dict(options)}, setting).taskset
    require(size is not None or taskset.bounded, f"{setting}=verifiers:{name} has no end; set a size.")
    for task in islice(iter(taskset), size):
        row = task.data.model_dump(mode="json", exclude_defaults=True)
        yield {**row, "idx": task.data.idx, "prompt": task.data.prompt_text}
