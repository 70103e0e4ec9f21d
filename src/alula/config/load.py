"""Load a `RunConfig` from a YAML file and `section.setting=value` overrides; errors are one sentence each."""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from alula.config.recipes import recipe_names, recipe_path
from alula.config.run import RunConfig
from alula.errors import SettingError, one_or_more, require
from alula.files import read_text
from alula.section import UNKNOWN, fields_of, first_error, is_section
from alula.sparsity.policy import Evict, sparsity_settings

SHORTHANDS: dict[tuple[str, ...], Callable[[str], dict[str, Any]]] = {
    ("objective", "correction"): lambda preset: {"preset": preset},
    ("sparsity",): sparsity_settings,
}
"""Sections that may be written as one text, and how that text expands to settings."""
PRESET = ("objective", "correction", "preset")
"""An override of this setting replaces the whole correction."""
TEMPLATES = [(["data"], "prompt"), (["data"], "answer")]
"""Settings that may begin with a {field}, which YAML would read as a mapping."""


class Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number; in YAML 1.1 it is a text."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def load_config(path: str | Path, overrides: str | Sequence[str] = ()) -> RunConfig:
    """The recipe at `path` with `section.setting=value` overrides, whose values are YAML.

    A run's folder stands for its config.yaml; `out` is then the folder's present path. A name without a folder and
    without an ending, such as `toy`, is a recipe that comes with the package.
    """
    path = Path(path)
    if not path.exists() and path.name == str(path) and path.suffix not in (".yaml", ".yml"):
        path = recipe_path(path.name)
    folder = path if path.is_dir() else None
    if folder:
        path = folder / "config.yaml"
        require(
            path.is_file(), f"recipe {str(folder)!r}: a folder without config.yaml; name a recipe or a run's folder."
        )
    if not path.is_file():
        hint = f"; `alula train {path.stem}` runs the recipe of that name." if path.stem in recipe_names() else "."
        raise SettingError(f"recipe {str(path)!r}: no such file{hint}")
    tree = parse_yaml(read_text(path, f"recipe {path}"), f"recipe {path}")
    if not isinstance(tree, dict):
        raise SettingError(f"recipe {path}: must be a mapping of settings.")
    if folder:
        tree["out"] = str(folder)
    for text in one_or_more(overrides):
        override(tree, text)
    tree.setdefault("out", f"runs/{path.stem}")
    return read_tree(tree)


def read_tree(tree: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise describe(error, tree) from error


def to_yaml(config: RunConfig) -> str:
    """All settings, defaults filled in; `load_config` reads it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def override(tree: dict[str, Any], text: str) -> None:
    """Apply `section.setting=value` to the tree, in place."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SettingError(f"override {text!r}: write {name or 'section.setting'}=VALUE.")
    *sections, leaf = name.split(".")
    if sections[:2] == ["eval", "data"] and isinstance(sets := (tree.get("eval") or {}).get("data"), list):
        for one in sets:
            if not isinstance(one, dict):
                raise SettingError(f"override {text!r}: eval.data has {one!r}; write it as {{source: {one}}}.")
            override(one, f"{'.'.join([*sections[2:], leaf])}={value}")
        return
    node = tree
    for depth, section in enumerate(sections):
        inner = node.get(section)
        path = tuple(sections[: depth + 1])
        if isinstance(inner, str) and path in SHORTHANDS:
            inner = SHORTHANDS[path](inner)
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise SettingError(f"override {text!r}: {'.'.join(path)} is {inner!r}, which has no settings inside.")
        node[section] = dict(inner)
        node = node[section]
    template = (sections[-1:], leaf) in TEMPLATES and value.startswith("{")
    parsed = value if template else parse_yaml(value, f"override {text!r}")
    if (*sections, leaf) == PRESET:
        node.clear()  # drop the settings of another preset, which a run's config.yaml lists
    node[leaf] = parsed


def parse_yaml(text: str, what: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise SettingError(f"{what}: not YAML ({yaml_problem(error)}).") from error


def yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong and where, on one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
    start = f" {error.context} from line {error.context_mark.line + 1}" if error.context_mark else ""
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{start}"


def describe(error: ValidationError, tree: dict[str, Any]) -> SettingError:
    """The first error as one sentence: setting, value and hint."""
    for one in error.errors():
        if one["type"] in UNKNOWN:
            return unknown_setting(one, tree)
    message = str(first_error(error, RunConfig))
    options = rf"^sparsity\.evict\.(?!({'|'.join(fields_of(Evict))})\b)"  # a method's option, named without its section
    return SettingError(re.sub(options, "sparsity.evict.options.", message))


OTHER_NAMES = {
    "beta": "objective.kl",
    "dataset_name": "data.source",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "eval_steps": "eval.every",
    "gradient_checkpointing": "learner.activation_checkpointing",
    "learning_rate": "learner.lr",
    "loss_type": "objective.loss",
    "lr_scheduler_type": "learner.decay",
    "max_completion_length": "sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "steps",
    "model_name_or_path": "model.source",
    "num_generations": "sampling.n",
    "num_iterations": "learner.updates",
    "output_dir": "out",
    "per_device_train_batch_size": "sampling.prompts",
    "report_to": "logging.sinks",
    "reward_funcs": "rewards.use",
    "save_steps": "checkpoint.every",
}
"""Names of settings in TRL and verl -> their names here."""


def unknown_setting(error: ErrorDetails, tree: dict[str, Any]) -> SettingError:
    *sections, name = (str(part) for part in error["loc"])
    here = "".join(f"{section}." for section in sections)
    if name in OTHER_NAMES:
        return SettingError(f"unknown setting '{here}{name}'; here it is {OTHER_NAMES[name]!r}.")
    fields, elsewhere = fields_at(sections), [path for path in all_settings() if path.split(".")[-1] == name]
    if sections in (["sparsity", "evict"], ["sparsity", "select"]):
        elsewhere = []  # settings of other sections do not help here
    if sections == ["sparsity", "evict"]:
        fields = with_options(fields, tree["sparsity"]["evict"].get("method"))
    last = {field.rpartition(".")[2]: here + field for field in fields}  # compare names without their sections
    near = [last[word] for word in get_close_matches(name, last, n=1, cutoff=0.7)] or elsewhere
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


def with_options(fields: list[str], method: Any) -> list[str]:
    """An evictor's settings, with the options of its method by name."""
    from alula.sparsity.evict import METHODS, option_names  # torch: only for an error message

    if method not in list(METHODS):
        return fields
    return [field for field in fields if field != "options"] + [f"options.{name}" for name in option_names(method)]


def sections_in(annotation: Any) -> list[Any]:
    """Section classes inside `Section`, `Section | None` or `list[Section]`."""
    if is_section(annotation):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]
