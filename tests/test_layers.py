"""Imports go down, never up or across: the layers of the package, read from its source."""

import ast
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "alula"
RECIPE = Path(__file__).parents[1] / "recipes" / "toy.yaml"

LAYERS = (
    ("errors", "terminal", "cgroups", "charts", "heap", "hub", "malloc"),
    ("cpus", "files", "imports"),
    ("section",),
    ("settings",),
    ("distributed",),
    ("ops",),
    ("models",),
    ("sparsity",),
    ("engine",),
    ("data",),
    ("environments",),
    ("rewards",),
    ("evals",),
    ("objective",),
    ("learner",),
    ("mismatch",),
    ("bench",),
    ("config",),
    ("rollouts",),
    ("distill",),
    ("serve",),
    ("run",),
    ("trainer",),
    ("report",),
    ("integrations", "demo"),
    ("cli",),
)
"""Bottom first. `settings` has the sections of a run, `config` is the whole tree."""
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def layer_of(module: str) -> str | None:
    """The layer of a module; None for the package itself, which only re-exports."""
    _, *parts = module.split(".")
    return None if parts in ([], ["__main__"]) else parts[0]


class Imports(ast.NodeVisitor):
    """Modules of the package that a file imports, also inside functions, but not under TYPE_CHECKING."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.names.update(alias.name for alias in node.names if alias.name.split(".")[0] == "alula")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute"
        if node.module and node.module.split(".")[0] == "alula":
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                self.names.add(submodule if submodule in modules() else node.module)


@cache
def imports() -> dict[str, frozenset[str]]:
    found = {}
    for module, path in modules().items():
        visitor = Imports()
        visitor.visit(ast.parse(path.read_text()))
        found[module] = frozenset(visitor.names - {module})
    return found


def edges() -> list[tuple[str, str]]:
    """(importer, imported) between different layers."""
    return [
        (module, target)
        for module, targets in imports().items()
        for target in sorted(targets)
        if layer_of(module) and layer_of(target) and layer_of(module) != layer_of(target)
    ]


def test_every_module_has_a_layer():
    assert {layer for module in modules() if (layer := layer_of(module))} == set(RANK)


def test_imports_go_down():
    upward = [
        f"{module} imports {target}" for module, target in edges() if RANK[layer_of(target)] >= RANK[layer_of(module)]
    ]
    assert upward == []


def test_modules_do_not_import_each_other():
    """No cycles, within a package either."""

    def reachable(module: str) -> set[str]:
        seen, stack = set(), [module]
        while stack:
            new = imports().get(stack.pop(), frozenset()) - seen
            seen |= new
            stack += new
        return seen

    assert [module for module in modules() if module in reachable(module)] == []


UNUSED = ("alula.distill", "alula.report", "alula.mismatch.plan", "alula.integrations")
"""Packages that a run of recipes/toy.yaml does not use."""


def loaded_modules(code: str) -> set[str]:
    script = f"import sys\n{textwrap.dedent(code)}\nprint(*sys.modules, sep='\\n')"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.slow
def test_a_run_imports_only_what_it_uses():
    code = f"""
        from alula.config.load import load_config
        import alula.trainer.trainer
        load_config({str(RECIPE)!r}, [])
    """
    names = loaded_modules(code)
    assert "alula.trainer.trainer" in names
    assert sorted(name for name in names if name.startswith(UNUSED)) == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_command_line_answers_without_torch(arguments):
    code = f"""
        from alula.cli.main import app
        try:
            app({arguments})
        except SystemExit:
            pass
    """
    assert {"torch", "transformers", "pydantic"} & loaded_modules(code) == set()
