"""The product imports what pyproject.toml declares, and nothing that only tests or dependencies bring."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FOLDERS = ("app", "engine", "kernels", "ui", "migrations")
OURS = {"llmbox"}
BY_TORCH = {"triton"}
"""Comes with torch where there is a GPU, and is imported nowhere else."""


def declared(*, extras: bool = False) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"].values() if extras else ())]
    wanted = [each for group in groups for each in group]
    return {normal(re.match(r"[\w.-]+", each)[0]) for each in wanted}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def imported_by(file: Path) -> set[str]:
    """Top names of absolute imports, those for type checkers left out."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.expr):  # holds no statement: most nodes of a file are these
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            return
        if isinstance(node, ast.Import):
            names.update(each.name.split(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text()))
    return names - OURS - BY_TORCH - set(sys.stdlib_module_names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_imported_is_declared(folder):
    packages = packages_distributions()
    known = declared(extras=True)
    undeclared = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in (ROOT / folder).rglob("*.py")
        for name in imported_by(file)
        if not {normal(each) for each in packages.get(name, [name])} & known  # extras may not be installed
    }
    assert not undeclared


def test_what_is_declared_is_imported():
    packages = packages_distributions()
    names = {
        name for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") for name in imported_by(file)
    }
    used = {normal(each) for name in names for each in packages.get(name, ())}
    assert declared() <= used
