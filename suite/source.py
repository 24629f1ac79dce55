"""What a result was computed from, by content: the project's source that a run imports, plugins, and input files.

A commit says less (two uncommitted edits share it) and more (a new axis or an edited page changes it, and no result).
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path

from suite.config import RunConfig, flatten

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("suite", "evals")
_START = "suite.run"
_NAME = re.compile(r"(?:suite|evals)(?:\.\w+)+")

INPUTS = (
    *("task.source", "task.numina_source", "task.wildchat_source", "task.reward_model", "eval.reward_model"),
    "critic.init",
)
"""Options that may name a file or folder whose content decides a result. The model's own is `model.weights`."""


def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for found in (path.with_suffix(".py"), path / "__init__.py"):
        if found.is_file():
            return found
    return None


def _imports(tree: ast.AST) -> set[str]:
    """Every module that a file may import, at its top or later, also by a name in a string."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
            found |= {node.value, node.value.rpartition(".")[0]}
    return {name for name in found if name.split(".")[0] in _PACKAGES}


@cache
def modules() -> dict[str, str]:
    """The project's modules that a run imports, whatever its options -> a hash of what each says.

    Read once per process, so that it tells the code that was loaded and not a later edit.
    """
    out: dict[str, str] = {}
    waiting = [_START]
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if name in out or path is None:
            continue
        tree = ast.parse(path.read_bytes())
        out[name] = _hash(tree)
        waiting += _imports(tree)
        waiting += [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)]
    return dict(sorted(out.items()))


def _hash(tree: ast.AST) -> str:
    """A hash of what the code does: comments, layout and docstrings are not in it."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_text(part)]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def source_hash() -> str:
    """One hash over `modules`."""
    return hashlib.sha256(repr(modules()).encode()).hexdigest()[:16]


def plugin_hashes(files: Iterable[Path]) -> dict[str, str]:
    """Name -> hash of the study's, axes' and plugins' files; of a study what it defines beside the study itself.

    A study says its options in the cells' configurations: an arm or a claim added to it changes no other cell.
    """
    return {path.name: _plugin_hash(path, path.stat().st_mtime_ns) for path in map(Path, files) if path.is_file()}


@lru_cache(maxsize=64)
def _plugin_hash(path: Path, mtime_ns: int) -> str:
    tree = ast.parse(path.read_bytes())
    if any(isinstance(node, ast.Assign) and _assigns(node, "STUDY") for node in tree.body):
        kept = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        tree.body = [node for node in tree.body if isinstance(node, kept)]
    return _hash(tree)


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def input_hashes(config: RunConfig) -> dict[str, str]:
    """Option -> hash of the file or folder that it names, of those in `INPUTS` that name one here."""
    values = flatten(config)
    return {name: _content(Path(values[name])) for name in INPUTS if values[name] and Path(values[name]).exists()}


def _content(path: Path) -> str:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return contents_hash(files, str(path))


def contents_hash(files: Iterable[Path], base: str) -> str:
    """16 hex digits of SHA-256 over the files' contents and their names below `base`; read again when they changed."""
    marks = ((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files))
    return _contents(tuple(marks), base)


@lru_cache(maxsize=64)
def _contents(files: tuple[tuple[str, int, int], ...], base: str) -> str:
    whole = hashlib.sha256()
    for name, _, _ in files:
        with Path(name).open("rb") as opened:
            whole.update(name.removeprefix(base).encode() + b"\0" + hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()[:16]


def changed(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names whose hashes differ, or that only one side has."""
    return sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
