"""The house: who may import whom, and how long things may be."""

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
def test_imports_point_one_way_and_nothing_is_too_long(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    package = path.relative_to(ROOT).parts[0]
    command_line = path == ROOT / "suite" / "cli.py" or path.parent == ROOT / "suite" / "commands"
    for name, at_top in imported(tree):
        if name in FORBIDDEN[package]:
            assert command_line, f"{package} imports {name}"
            assert not at_top, f"{name} is imported lazily, inside a function"
    loop = path == ROOT / "suite" / "train.py"
    assert text.count("\n") <= (300 if loop else 400)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert loop or node.end_lineno - node.lineno < 80, f"{node.name} is too long"


def test_no_test_is_in_a_file_too_long_to_read() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert [str(path) for path in files if path.read_text(encoding="utf-8").count("\n") > 400] == []
