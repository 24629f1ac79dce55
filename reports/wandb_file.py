"""What the file of a W&B run, `run-<id>.wandb`, says about the run: rows, configuration, tables, how it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from suite.wandb_log import DamagedFile, Record, RecordReader, read_records

__all__ = ["DamagedFile", "Record", "RecordReader", "RunFile", "read_records", "read_run"]


@dataclass
class RunFile:
    """What one `.wandb` file says about its run. A run that was resumed has several files."""

    path: Path
    run_id: str = ""
    """Empty when the file ends before the record that describes the run."""
    project: str = ""
    group: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    """One dict per row logged, in order, with wandb's own `_step`, `_runtime` and `_timestamp`."""
    summary: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, dict[int, Path]] = field(default_factory=dict)
    """Name of a table -> step -> its JSON file ({"columns": [...], "data": [...]}); the file may be missing."""
    sums: dict[Path, str] = field(default_factory=dict)
    """SHA-256 of a table's file as it was logged."""
    exit_code: int | None = None
    """None when the run never said that it ended."""
    truncated: bool = False
    """The file stops in the middle of a record. One that stops between two shows only in the missing exit code."""
    damage: str = ""
    """What is wrong inside the file, empty where nothing is; the rest of the RunFile is what stands before it."""
    started_at: datetime | None = None


def read_run(path: Path) -> RunFile:
    """Read one file as far as it can be read; `truncated` and `damage` say what is missing. Never raises for its bytes.

    Raises OSError where the file cannot be opened.
    """
    run = RunFile(path)
    reader = read_records(path)
    try:
        for record in reader:
            _apply(run, record)
    except DamagedFile as error:
        run.damage = str(error)
    run.truncated = reader.truncated
    return run


def _apply(run: RunFile, record: Record) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "history":
        row = _nested({}, record.history.item)
        run.history.append(row)
        step = row["step"] if "step" in row else row["_step"]
        for name, value in row.items():
            if isinstance(value, dict) and value.get("_type") == "table-file" and "path" in value:
                file = run.path.parent / "files" / value["path"]
                run.tables.setdefault(name, {})[int(step)] = file
                run.sums[file] = str(value.get("sha256", ""))
    elif kind == "summary":
        _nested(run.summary, record.summary.update)
    elif kind == "run":
        described = record.run
        run.run_id, run.project = described.run_id, described.project
        run.group, run.name = described.run_group, described.display_name
        run.started_at = described.start_time.ToDatetime(tzinfo=UTC)
        _nested(run.config, described.config.update)
        run.config.pop("_wandb", None)
    elif kind == "config":
        _nested(run.config, record.config.update)
        run.config.pop("_wandb", None)
    elif kind == "exit":
        run.exit_code = record.exit.exit_code


def _nested(into: dict[str, Any], items: Any) -> dict[str, Any]:
    """Set the (key or nested key, JSON) items of a record in `into`, which is returned."""
    for item in items:
        *outer, last = item.nested_key or [item.key]
        inner = into
        for key in outer:
            if not isinstance(inner.get(key), dict):
                inner[key] = {}
            inner = inner[key]
        inner[last] = json.loads(item.value_json)
    return into
