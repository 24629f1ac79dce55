"""Named slots: every choice a configuration can name is an entry of a registry."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

T = TypeVar("T")


def unknown(kind: str, name: str, known: Iterable[str], where: str = "") -> ValueError:
    """The error for a name that does not exist: says where, and suggests near names or lists all."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(known) or 'none'}"
    return ValueError(f"unknown {kind} {name!r}{f' in {where}' if where else ''}; {hint}")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One registered value and the configuration options that it reads."""

    name: str
    value: T
    reads: frozenset[str]


class Registry(Generic[T]):
    """Maps names to values; refuses a second entry under one name and suggests near names for an unknown one.

    `reads` names the options (dotted, as in the configuration) that an entry looks at, so that
    an option that nothing reads can be refused before any work.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, *, reads: Iterable[str] = ()) -> Callable[[T], T]:
        """Decorator that adds a value under `name`. Raises ValueError if the name is taken."""

        def add(value: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
            self._entries[name] = Entry(name, value, frozenset(reads))
            return value

        return add

    def __getitem__(self, name: str) -> T:
        return self.entry(name).value

    def entry(self, name: str) -> Entry[T]:
        """The entry called `name`; ValueError with near names if there is none."""
        if name not in self._entries:
            raise unknown(self.kind, name, self._entries)
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


def import_file(path: Path) -> ModuleType:
    """Import a Python file by path, once per process: a second call returns the same module.

    Files of the installed packages keep their own names, so that a file reached by path and by
    import is one module and registers its entries once. Raises ValueError if there is no such file, or what it raises.
    """
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    root = Path(__file__).resolve().parent.parent
    if path.is_relative_to(root) and (path.parent / "__init__.py").exists():
        return importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve() == path:
            return module
    name = f"suite_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ValueError) or not isinstance(error, Exception) or os.environ.get("SUITE_TRACEBACK"):
            raise
        line = next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(path)), 0
        )
        where = f", line {line}" if line else ""
        raise ValueError(
            f"{path}{where} raises {type(error).__name__}: {error}; SUITE_TRACEBACK=1 shows where"
        ) from error
    return module
