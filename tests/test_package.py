"""The package: its declared dependencies cover what it imports, and its version is one number."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import yaml

import alula

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITH_ANOTHER = {
    "huggingface_hub": "transformers",
    "jinja2": "torch",
    "pyarrow": "datasets",
    "pydantic_core": "pydantic",
    "tokenizers": "transformers",
    "triton": "torch",
}
"""Packages that a declared dependency always brings along."""
ASIDE = {"_typeshed"}
OF_AN_EXTRA = {"integrations", "serve", "ray_rollouts.py", "worker_pool.py"}
"""Packages and modules of Alula that are imported only where an extra is installed."""


def normal(name: str) -> str:
    return re.split(r"[\s<>=\[;]", name)[0].lower().replace("_", "-")


def test_every_import_is_a_declared_dependency():
    core = {normal(name) for name in PROJECT["dependencies"]}
    extra = {normal(name) for names in PROJECT["optional-dependencies"].values() for name in names}
    homes = packages_distributions()
    undeclared = set()
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for top in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"alula"} - ASIDE:
                allowed = core if node in tree.body and not OF_AN_EXTRA & set(path.parts) else core | extra
                brought = {normal(WITH_ANOTHER.get(top, home)) for home in homes.get(top, [top])}
                if not brought & allowed:
                    undeclared.add((str(path.relative_to(ROOT)), top))
    assert undeclared == set()


def test_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == alula.__version__
    assert f"## {alula.__version__}" in (ROOT / "CHANGELOG.md").read_text()
