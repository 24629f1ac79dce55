"""Runs every benchmark of this folder (or those named) and prints one line per figure."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks


def main(names: list[str]) -> int:
    """Each module offers `figures()`, which yields (what, value, unit)."""
    found = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name != "__main__")
    unknown = sorted(set(names) - set(found))
    if unknown:
        print(f"benchmarks: unknown {', '.join(unknown)}; known: {', '.join(found)}", file=sys.stderr)
        return 2
    for name in names or found:
        for what, value, unit in importlib.import_module(f"benchmarks.{name}").figures():
            print(f"{name:10} {what:52} {value:12,.1f} {unit}", flush=True)
    return 0


sys.exit(main(sys.argv[1:]))
