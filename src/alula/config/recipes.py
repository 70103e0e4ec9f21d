"""Recipes that come with the package, by name: `toy` is src/alula/recipes/toy.yaml."""

from difflib import get_close_matches
from pathlib import Path

from alula.errors import SettingError

FOLDER = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """The file of the recipe `name`; raises for a name that does not exist."""
    path = FOLDER / f"{name}.yaml"
    if name not in recipe_names():
        near = get_close_matches(name, recipe_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`alula recipes` lists the recipes that come with Alula."
        raise SettingError(f"recipe {name!r}: neither a file nor a recipe of Alula; {hint}")
    return path


def first_sentence(path: Path) -> str:
    """The first sentence of the comment at the top of a recipe."""
    comment: list[str] = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(comment).split(". ")[0].rstrip(".") + "."
