"""From a YAML file and `key=value` overrides to a checked `RunConfig`; what is wrong is said in one sentence."""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from alula.config.run import RunConfig
from alula.config.settings import UNKNOWN, fields_of, first_error, is_section
from alula.errors import SettingError, require
from alula.sparsity.policy import Evict, sparsity_settings

SHORTHANDS: dict[tuple[str, ...], Callable[[str], dict[str, Any]]] = {
    ("objective", "correction"): lambda preset: {"preset": preset},
    ("sparsity",): sparsity_settings,
}
"""Sections that may be written as one word, and the settings that the word stands for."""
PRESET = ("objective", "correction", "preset")
"""By this name, too, a correction is chosen as a whole."""
TEMPLATES = [(["data"], "prompt"), (["data"], "answer")]
"""Settings that may begin with a {field}, which YAML would take for a mapping."""


class Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-6 for a text; here it is the number that everybody means."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe at `path` with `section.setting=value` overrides, whose values are read as YAML. A run's folder stands
    for its config.yaml, wherever the folder is now."""
    path = Path(path)
    folder = path if path.is_dir() else None
    if folder:
        path = folder / "config.yaml"
        require(
            path.is_file(), f"recipe {str(folder)!r}: a folder without config.yaml; name a recipe or a run's folder."
        )
    if not path.is_file():
        raise SettingError(f"recipe {str(path)!r}: no such file.")
    tree = parse_yaml(path.read_text(), f"recipe {path}")
    if not isinstance(tree, dict):
        raise SettingError(f"recipe {path}: must be a mapping of settings.")
    if folder:
        tree["out"] = str(folder)
    for text in overrides:
        override(tree, text)
    tree.setdefault("out", f"runs/{path.stem}")
    return read_tree(tree)


def read_tree(tree: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise describe(error, tree) from error


def to_yaml(config: RunConfig) -> str:
    """The settings in force, defaults filled in; `load_config` reads it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def override(tree: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SettingError(f"override {text!r}: write section.setting=value.")
    *sections, leaf = name.split(".")
    place = tree
    for depth, section in enumerate(sections):
        inner = place.get(section)
        path = tuple(sections[: depth + 1])
        if isinstance(inner, str) and path in SHORTHANDS:
            inner = SHORTHANDS[path](inner)
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise SettingError(f"override {text!r}: {'.'.join(path)} is {inner!r}, which has no settings inside.")
        place[section] = dict(inner)
        place = place[section]
    template = (sections[-1:], leaf) in TEMPLATES and value.startswith("{")
    chosen = value if template else parse_yaml(value, f"override {text!r}")
    if (*sections, leaf) == PRESET:
        place.clear()  # a run's config.yaml holds every setting of another preset here
    place[leaf] = chosen


def parse_yaml(text: str, what: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise SettingError(f"{what}: not YAML ({' '.join(str(error).split())}).") from error


def describe(error: ValidationError, tree: dict[str, Any]) -> SettingError:
    """The first error as one sentence: setting, value and hint."""
    for one in error.errors():
        if one["type"] in UNKNOWN:
            return unknown_setting(one, tree)
    message = str(first_error(error, RunConfig))
    options = rf"^sparsity\.evict\.(?!({'|'.join(fields_of(Evict))})\b)"  # a method's option, named without its section
    return SettingError(re.sub(options, "sparsity.evict.options.", message))


ELSEWHERE = {
    "beta": "objective.kl",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "learning_rate": "learner.lr",
    "max_completion_length": "sampling.max_new_tokens",
    "max_steps": "steps",
    "model_name_or_path": "model.source",
    "num_generations": "sampling.n",
    "num_iterations": "learner.updates",
    "output_dir": "out",
    "per_device_train_batch_size": "sampling.prompts",
}
"""What other frameworks call a setting -> its name here."""


def unknown_setting(error: ErrorDetails, tree: dict[str, Any]) -> SettingError:
    *sections, name = (str(part) for part in error["loc"])
    here = "".join(f"{section}." for section in sections)
    if name in ELSEWHERE:
        return SettingError(f"unknown setting '{here}{name}'; here it is {ELSEWHERE[name]!r}.")
    fields, elsewhere = fields_at(sections), [path for path in all_settings() if path.split(".")[-1] == name]
    if sections in (["sparsity", "evict"], ["sparsity", "select"]):
        elsewhere = []  # what another method takes is no help with this one
    if sections == ["sparsity", "evict"]:
        fields = with_own(fields, tree["sparsity"]["evict"].get("method"))
    last = {field.rpartition(".")[2]: here + field for field in fields}  # dotted names are all near, by their sections
    near = [last[word] for word in get_close_matches(name, last, n=1)] or elsewhere
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(last.values()))}."
    return SettingError(f"unknown setting '{here}{name}'; {hint}")


def all_settings(section: Any = RunConfig, prefix: str = "") -> list[str]:
    """Every setting's dotted name, sections included."""
    names = []
    for name, field in fields_of(section).items():
        names.append(prefix + name)
        for inner in sections_in(field.annotation):
            names += all_settings(inner, f"{prefix}{name}.")
    return names


def fields_at(path: Sequence[str]) -> list[str]:
    section: Any = RunConfig
    for name in path:
        if name in fields_of(section):  # an index of a list is not a field
            section = next(iter(sections_in(fields_of(section)[name].annotation)), section)
    return list(fields_of(section))


def with_own(fields: list[str], method: Any) -> list[str]:
    """An evictor's settings with the options of this method, by name."""
    from alula.sparsity.evict import METHODS, own_settings  # torch, only where something is wrong

    if method not in list(METHODS):
        return fields
    return [field for field in fields if field != "options"] + [f"options.{name}" for name in own_settings(method)]


def sections_in(annotation: Any) -> list[Any]:
    """Section classes inside `Section`, `Section | None` or `list[Section]`."""
    if is_section(annotation):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]
