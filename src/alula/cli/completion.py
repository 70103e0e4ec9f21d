"""Shell completion: the words typed so far, and completions of recipes and settings."""

import os
from pathlib import Path


def typed_words() -> list[str]:
    """The command line that a shell asks to complete; empty outside of a completion."""
    if "_ALULA_COMPLETE" not in os.environ:
        return []
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")  # bash, or any other shell
    return line.split()[1:]


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes of the package, and YAML files of the current folder. If none matches, shells complete file names."""
    from alula.config.recipes import recipe_names

    here = sorted(path.name for path in Path().iterdir() if path.suffix in (".yaml", ".yml"))
    return [name for name in [*recipe_names(), *here] if name.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """Dotted names of all settings."""
    from alula.config.load import all_settings

    return [name for name in all_settings() if name.startswith(incomplete)]
