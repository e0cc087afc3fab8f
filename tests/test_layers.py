"""Imports point upward in the layers of docs/design.md, and the command line does not pay for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent
LAYERS = [
    ("errors", "metrics", "process", "seconds", "wording", "checkpoints", "given", "recipe"),
    ("data",),
    ("control",),
    ("sync",),
    ("train",),
    ("launch",),
    ("view",),
    ("report",),
    ("web",),
    ("models",),
    ("testing",),
    ("bench",),
    ("cli", "__main__"),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
WITHOUT_TORCH = ["shoal", "shoal.cli", "shoal.control.serve", "shoal.data.ledger", "shoal.data.audit",
                 "shoal.sync.memory", "shoal.sync.words", "shoal.launch.local", "shoal.testing", "shoal.data.progress",
                 "shoal.view.top", "shoal.view.doctor", "shoal.view.logs", "shoal.report.page",
                 "shoal.sync.topology"]  # fmt: skip


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "shoal" and len(parts) > 1 else None


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "shoal":
            found.update(f"shoal.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_its_own_layer_and_those_above(path: Path) -> None:
    inside = path.relative_to(ROOT).with_suffix("").parts
    if inside == ("__init__",):
        return
    own = RANK[inside[0]]
    for module in imports_of(path):
        layer = layer_of(module)
        if layer is not None and layer in RANK:
            assert RANK[layer] <= own, f"{inside} imports {module}"


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_the_command_line_needs_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, f"{module} imports torch"


def test_no_module_imports_itself_by_way_of_others() -> None:
    paths = {".".join(("shoal", *path.relative_to(ROOT).with_suffix("").parts)): path for path in ROOT.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}

    def imported(path: Path) -> set[str]:
        """When the module is loaded. What a function imports comes later."""
        found: set[str] = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                inside = (f"{node.module}.{alias.name}" for alias in node.names)
                found.update(name if name in paths else node.module for name in inside)
            elif isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
        return found & paths.keys() - {"shoal"}  # whose names are loaded lazily

    TopologicalSorter({name: imported(path) for name, path in paths.items()}).prepare()  # a CycleError names them
