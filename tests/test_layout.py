"""The house: who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("suite", "ablations", "evals", "reports")
FORBIDDEN = {
    "suite": {"ablations", "evals", "reports"},
    "ablations": {"evals", "reports"},
    "evals": {"ablations", "reports"},
    "reports": set(),
}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(tree: ast.Module) -> set[tuple[str, bool]]:
    """(top-level package, whether at the top of the file) of every import."""
    top = {id(node) for node in tree.body}
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        found |= {(name.split(".")[0], id(node) in top) for name in names}
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_point_one_way(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    package = path.relative_to(ROOT).parts[0]
    command_line = path == ROOT / "suite" / "cli.py" or path.parent == ROOT / "suite" / "commands"
    for name, at_top in imported(tree):
        if name in FORBIDDEN[package]:
            assert command_line, f"{package} imports {name}"
            assert not at_top, f"{name} is imported lazily, inside a function"
