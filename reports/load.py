"""From W&B, offline files or the API, to tidy pandas frames: one value per run, step and metric."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from reports.wandb_file import RunFile, read_run

HISTORY_COLUMNS = ["arm", "seed", "run_id", "step", "metric", "value"]
TABLE_COLUMNS = ["run_id", "arm", "seed", "step", "table"]


@dataclass
class StudyData:
    """A study as W&B has it. Reading the same files twice gives identical frames, rows in the same order.

    One configuration counts once: of several runs with the same arm, seed and fingerprint the newest finished one is
    kept (the newest, where none finished) and the others are listed in `duplicates` alone. Where an arm was defined
    anew there is a run for each definition; which of them stands for the cell, the study's declaration says.
    """

    history: pd.DataFrame
    """Columns arm, seed, run_id, step, metric, value (float, NaN and infinities as logged), sorted by arm, seed, run,
    step, metric; one row per (run_id, step, metric), the last value logged."""
    runs: pd.DataFrame
    """One row per run, sorted by arm, seed and fingerprint: run_id, arm, seed, name, fingerprint, commit, dirty,
    finished (ended with exit code 0 and its file is whole), exit_code, truncated, damage, segments (1 + resumes),
    started_at (UTC), seconds (of all segments together), path, config (dict)."""
    tables: pd.DataFrame
    """Columns run_id, arm, seed, step, table (its name), then the columns of the tables logged."""
    duplicates: pd.DataFrame
    """The runs that do not count, as in `runs`, with the run that counts in their place in `instead`."""
    unreadable: pd.DataFrame
    """Files that belong to no run or could not be used: path, reason."""


@dataclass
class _Run:
    """One run, its segments joined."""

    run_id: str
    group: str
    name: str
    config: dict[str, Any]
    path: str
    started_at: datetime | None
    exit_code: int | None
    truncated: bool = False
    damage: str = ""
    segments: int = 1
    seconds: float = 0.0
    values: dict[tuple[int, str], float] = field(default_factory=dict)
    tables: dict[tuple[int, str], Path] = field(default_factory=dict)
    sums: dict[Path, str] = field(default_factory=dict)

    @property
    def arm(self) -> str:
        return str(self.config.get("arm", self.group))

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def cell(self) -> tuple[str, int, str]:
        """Arm, seed and fingerprint, the last empty where the run does not say it."""
        return self.arm, self.seed, str(self.config.get("fingerprint") or "")

    @property
    def finished(self) -> bool:
        return self.exit_code == 0 and not self.truncated and not self.damage

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows in the order of logging: a later value of a step and a metric replaces the earlier one."""
        runtime = 0.0
        for row in rows:
            step = int(row.get("step", row.get("_step", 0)))
            runtime = max(runtime, _number(row.get("_runtime")) or 0.0)
            for metric, logged in row.items():
                value = _number(logged)
                if value is not None and metric != "step" and not metric.startswith("_"):
                    self.values[step, metric] = value
        self.seconds += runtime


def load_study(folder: Path, *, tables: bool = True) -> StudyData:
    """Read all W&B files below `folder`; the files of a resumed run are joined by run id, the last value wins.

    Torn and damaged files are read up to that point and their runs do not count as finished; what cannot be
    used at all is listed in `unreadable`. `tables=False` leaves the tables unread.

    Raises ValueError when `folder` is no folder or holds no W&B file.
    """
    paths = sorted({*folder.rglob("offline-run-*/run-*.wandb"), *folder.rglob("run-*/run-*.wandb")})
    if not paths:
        raise ValueError(f"{folder} holds no W&B files (offline-run-*/run-*.wandb): has the study been run?")
    unreadable: list[tuple[str, str]] = []
    by_run: dict[str, list[RunFile]] = {}
    for path in paths:
        segment = read_run(path)
        if segment.run_id:
            by_run.setdefault(segment.run_id, []).append(segment)
        else:
            unreadable.append((str(path), segment.damage or "ends before the record that describes the run"))
    runs = [_join(segments, unreadable) for segments in by_run.values()]
    return _assemble(runs, unreadable, tables)


def load_api(project: str, *, filters: dict[str, Any] | None = None, api: Any = None, tables: bool = True) -> StudyData:
    """The same from a W&B server: `project` is "entity/project", `filters` as wandb.Api.runs takes them.

    Every run is scanned whole, without keys (a scan with keys drops the rows that lack one, `run.history()` samples
    500 rows). `api` defaults to wandb.Api(), which finds the login itself. Tables are downloaded.

    Raises ValueError when the project holds no run.
    """
    if api is None:
        import wandb

        api = wandb.Api()
    with tempfile.TemporaryDirectory() as downloads:
        found = [_from_api(run, Path(downloads, run.id) if tables else None) for run in api.runs(project, filters)]
        if not found:
            raise ValueError(f"the W&B project {project!r} holds no runs that pass the filters {filters}")
        return _assemble(found, [], tables)


def _join(segments: list[RunFile], unreadable: list[tuple[str, str]]) -> _Run:
    """The segments as one run. Damage before the last one only costs rows that no later one holds: it is listed."""
    segments = _once(segments, unreadable)
    segments.sort(key=lambda s: (s.config.get("tracking", {}).get("segment", 0), s.started_at, s.path))
    first, last = segments[0], segments[-1]
    unreadable += [(str(s.path), s.damage) for s in segments[:-1] if s.damage]
    run = _Run(
        last.run_id,
        last.group,
        last.name,
        {key: value for key, value in last.config.items() if key != "tracking"},
        str(last.path),
        first.started_at,
        last.exit_code,
        last.truncated,
        last.damage,
        len(segments),
    )
    for segment in segments:
        run.add_rows(segment.history)
        run.sums |= segment.sums
        run.tables |= {(step, name): path for name, files in segment.tables.items() for step, path in files.items()}
    return run


def _once(segments: list[RunFile], unreadable: list[tuple[str, str]]) -> list[RunFile]:
    """Every segment of a run once: a copy of a file would count its seconds again. Of copies the one that goes on
    longest is kept."""
    kept: dict[tuple[Any, ...], RunFile] = {}
    for segment in sorted(segments, key=lambda s: (-len(s.history), str(s.path))):
        key = (segment.config.get("tracking", {}).get("segment", 0), segment.started_at)
        if key in kept:
            unreadable.append((str(segment.path), f"a copy of {kept[key].path}, which counts alone"))
        else:
            kept[key] = segment
    return list(kept.values())


def _from_api(source: Any, downloads: Path | None) -> _Run:
    config = {key: value for key, value in source.config.items() if key not in ("_wandb", "tracking")}
    ended = {"finished": 0, "failed": 1}.get(source.state)
    started = pd.Timestamp(source.created_at).to_pydatetime()
    run = _Run(source.id, source.group or "", source.name, config, source.url, started, ended)
    rows = list(source.scan_history())
    run.add_rows(rows)
    for row in rows if downloads else ():
        for name, value in row.items():
            if isinstance(value, dict) and value.get("_type") == "table-file":
                source.file(value["path"]).download(root=str(downloads), replace=True)
                run.tables[int(row["step"]), name] = Path(str(downloads), value["path"])
    return run


def _assemble(found: list[_Run], unreadable: list[tuple[str, str]], with_tables: bool) -> StudyData:
    usable = []
    for run in found:
        if isinstance(run.config.get("seed"), int):
            usable.append(run)
        else:
            unreadable.append((run.path, f"run {run.run_id} has no integer 'seed' in its configuration"))
    usable.sort(key=lambda run: (run.finished, run.started_at, run.run_id))
    kept = {run.cell: run for run in usable}
    runs = [kept[cell] for cell in sorted(kept)]
    replaced = sorted((run for run in usable if kept[run.cell] is not run), key=lambda run: (run.cell, run.run_id))
    tables = _tables(runs, unreadable) if with_tables else pd.DataFrame(columns=TABLE_COLUMNS)
    duplicates = _run_frame(replaced)
    duplicates["instead"] = pd.Series([kept[run.cell].run_id for run in replaced], dtype="str")
    return StudyData(
        history=_history(runs),
        runs=_run_frame(runs),
        tables=tables,
        duplicates=duplicates,
        unreadable=pd.DataFrame(sorted(unreadable), columns=["path", "reason"], dtype="str"),
    )


def _history(runs: list[_Run]) -> pd.DataFrame:
    rows = [
        (r.arm, r.seed, r.run_id, step, name, r.values[step, name]) for r in runs for step, name in sorted(r.values)
    ]
    frame = pd.DataFrame(rows, columns=HISTORY_COLUMNS)
    text = {"arm": "str", "run_id": "str", "metric": "str"}
    return frame.astype({**text, "seed": "int64", "step": "int64", "value": "float64"})


def _run_frame(runs: list[_Run]) -> pd.DataFrame:
    config = [r.config for r in runs]
    frame = pd.DataFrame(
        {
            "run_id": pd.Series([r.run_id for r in runs], dtype="str"),
            "arm": pd.Series([r.arm for r in runs], dtype="str"),
            "seed": pd.Series([r.seed for r in runs], dtype="int64"),
            "name": pd.Series([r.name for r in runs], dtype="str"),
            "fingerprint": pd.Series([c.get("fingerprint") for c in config], dtype="str"),
            "commit": pd.Series([c.get("commit") for c in config], dtype="str"),
            "dirty": pd.Series([c.get("dirty") for c in config], dtype="boolean"),
            "finished": pd.Series([r.finished for r in runs], dtype="bool"),
            "exit_code": pd.Series([r.exit_code for r in runs], dtype="Int64"),
            "truncated": pd.Series([r.truncated for r in runs], dtype="bool"),
            "damage": pd.Series([r.damage for r in runs], dtype="str"),
            "segments": pd.Series([r.segments for r in runs], dtype="int64"),
            "started_at": pd.Series([r.started_at for r in runs], dtype="datetime64[us, UTC]"),
            "seconds": pd.Series([r.seconds for r in runs], dtype="float64"),
            "path": pd.Series([r.path for r in runs], dtype="str"),
        }
    )
    frame["config"] = pd.Series(config, dtype="object")
    return frame


def _tables(runs: list[_Run], unreadable: list[tuple[str, str]]) -> pd.DataFrame:
    frames = []
    for run in runs:
        for (step, name), path in sorted(run.tables.items()):
            try:
                data = path.read_bytes()
                if run.sums.get(path) and hashlib.sha256(data).hexdigest() != run.sums[path]:
                    raise ValueError("damaged: its content is not what was logged, and it is left out")
                content = json.loads(data)
            except (OSError, ValueError) as error:
                unreadable.append((str(path), f"table {name} of run {run.run_id}: {error}"))
                continue
            frame = pd.DataFrame(content["data"], columns=content["columns"])
            origin: list[Any] = [run.run_id, run.arm, run.seed, step, name]
            for at, value in enumerate(origin):
                frame.insert(at, TABLE_COLUMNS[at], value)
            frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=TABLE_COLUMNS)


def _number(value: Any) -> float | None:
    """The number that was logged; None for what is none. A W&B server sends non-finite numbers as strings."""
    if isinstance(value, str):
        return {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.get(value)
    return float(value) if isinstance(value, (int, float)) else None
