"""What a study's folder says about itself: `study.json`, written when it is declared, read by workers and reports."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from suite.config import to_json
from suite.inert import inert_reason
from suite.provenance import provenance
from suite.storage import Store, default_url, masked
from suite.study import Cell, Study

_PASSWORD = re.compile(r"(://[^:/@\s]+):[^@\s]+@")

ROOM = 64 * 2**20
"""Bytes that must be free before a study starts."""


@dataclass(frozen=True)
class Choice:
    """Some cells of a study: those of these arms and these seeds; None chooses all."""

    arms: Collection[str] | None = None
    seeds: Collection[int] | None = None

    def takes(self, arm: str, seed: int) -> bool:
        """Whether the cell of an arm and a seed is chosen."""
        return (self.arms is None or arm in self.arms) and (self.seeds is None or seed in self.seeds)


ALL, NOTHING = Choice(), Choice(arms=())


def check_folder(folder: Path) -> None:
    """Makes the folder if need be; raises ValueError if it cannot be written or has no room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{uuid.uuid4().hex}"
        probe.write_bytes(b"room?" * 1000)
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be written: {error.strerror}; choose another one") from None
    if free < ROOM:
        raise ValueError(
            f"folder {folder} has {free / 2**20:.0f} MB left and a study needs at least {ROOM >> 20}; make room"
        )


def read_declaration(folder: Path) -> dict[str, Any]:
    """The `study.json` of a folder; ValueError if there is none or it cannot be read."""
    path = folder / "study.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict) or not {"name", "arms", "seeds", "cells"} <= tree.keys():
            raise ValueError
    except FileNotFoundError:
        raise ValueError(f"there is no study in {folder}; start it with `suite run`") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not what a sweep writes; move it away to start anew") from None
    return tree


def recorded_url(folder: Path, tree: dict[str, Any] | None) -> str:
    """The URL of a study whose storage is not named; ValueError if it was run with one that must be named again."""
    shown = (tree or {}).get("storage")
    if shown and "***" in shown:
        raise ValueError(f"study {(tree or {})['name']!r} keeps its cells in {shown}; pass --storage")
    return shown or default_url(folder)


def shown_url(folder: Path, store: Store) -> str | None:
    """The storage as `study.json` names it: not at all if it lies in the folder, so that the folder can be moved."""
    return None if store.url == default_url(folder) else masked(store.url)


def check_storage(folder: Path, store: Store, old: dict[str, Any] | None) -> None:
    if old is not None and old.get("storage") != shown_url(folder, store):
        theirs = old.get("storage") or default_url(folder)
        raise ValueError(
            f"study {old['name']!r} keeps its cells in {theirs}, not in {masked(store.url)}; name that storage"
        )


def declaration(
    study: Study, cells: Sequence[Cell], plugins: Sequence[Path], command: str, storage: str | None
) -> dict[str, Any]:
    control = study.config(study.control.name)
    arms = [
        {
            "name": arm.name,
            "label": arm.title,
            "differs": {name: list(pair) for name, pair in study.differs(arm.name).items()},
            "inert": None if arm is study.control else inert_reason(study.config(arm.name), control),
        }
        for arm in study.arms
    ]
    return {
        "name": study.name,
        "question": study.question,
        "metric": study.metric,
        "control": study.control.name,
        "arms": arms,
        "seeds": list(study.seeds),
        "claims": [asdict(claim) for claim in study.claims],
        "cells": [
            {"arm": cell.arm, "seed": cell.seed, "name": cell.name, "declared": cell.fingerprint}
            | ({"starts_from": cell.starts_from} if cell.starts_from else {})
            for cell in cells
        ],
        **provenance(),
        "command": _PASSWORD.sub(r"\1:***@", command),
        "storage": storage,
        "plugins": [str(Path(path).resolve()) for path in plugins],
    }


def cell_record(study: Study, cell: Cell) -> dict[str, Any]:
    """The `config.json` of a cell: what it is, its resolved configuration, and the code that declared it."""
    differs = {name: list(pair) for name, pair in study.differs(cell.arm).items()}
    return {
        "fingerprint": cell.fingerprint,
        "seed": cell.seed,
        "study": study.name,
        "arm": cell.arm,
        "label": study.arm(cell.arm).title,
        "differs": differs,
        **provenance(),
        "run": to_json(cell.config),
    }
