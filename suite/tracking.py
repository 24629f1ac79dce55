"""Weights & Biases for one run: rows by optimizer step, tables, and a resume that loses nothing.

wandb keeps its rows in a process of its own and writes them to disk now and then. Killed, that process takes the last
seconds with it, also rows older than a checkpoint. Every row therefore goes first into a journal beside the W&B files;
at resume the rows that the training will not log again are logged anew from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from suite.metrics import describe, describe_table
from suite.wandb_log import has_ended

if TYPE_CHECKING:
    import pandas as pd
    import wandb

RESERVED_COLUMNS = frozenset({"run_id", "arm", "seed", "step", "table"})
"""Columns that the reader adds to every logged table."""

_END_S = 60.0
_FLUSH_S = 1.0  # wandb's own 15 s would hide a running cell, and lose more of a killed one

# each of these gives way to its environment variable (WANDB_SILENT, WANDB_CONSOLE, ...)
_QUIET: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "symlink": False,
    "summary_warnings": 0,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": _FLUSH_S,
}

# the offline reader relies on these
_FIXED: dict[str, Any] = {"use_dot_wandb": False, "x_history_value_encoding": "json"}


class Tracker:
    """One W&B run, offline unless WANDB_MODE says otherwise, with `step` as the axis of every metric.

    project, group and name are the study, the arm and the cell. WANDB_MODE (`online`, `offline`, `disabled`),
    WANDB_PROJECT, WANDB_ENTITY, WANDB_BASE_URL, WANDB_TAGS, WANDB_SILENT and the like are respected; WANDB_DIR,
    WANDB_RUN_ID, WANDB_RUN_GROUP and WANDB_NAME are not, since the report finds a cell by them.
    All files lie in `folder`/wandb. Used as a context manager, an exception ends the run with exit code 1.

    To resume, pass the `run_id`, the step, and the number of rows `logged` kept in the checkpoint. Of the rows of the
    first attempt the first `resume_rows` (None: all) are kept, up to and including `resume_step`; the others are
    dropped, as the resumed training logs them again. In offline mode each
    resume writes one more W&B file, which holds the kept rows too; online the run is continued (wandb's
    `resume="allow"`). A row may then be there twice: readers keep the last value of a step and a key.

    Raises ValueError for a secret in the configuration and for a negative `resume_step`; OSError where `folder` cannot
    be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        group: str,
        name: str,
        config: dict[str, Any],
        run_id: str | None = None,
        resume_step: int = 0,
        resume_rows: int | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        if resume_step < 0:
            raise ValueError(f"resume_step is {resume_step}: a step is 0 or more")
        _refuse_secrets(config)
        self.run_id: str = run_id or uuid.uuid4().hex[:12]
        self._first_step = resume_step
        self._folder = Path(folder) / "wandb"
        self._folder.mkdir(parents=True, exist_ok=True)
        journal = journal_of(folder, self.run_id)
        kept = [row for row in read_journal(journal)[:resume_rows] if row["step"] <= resume_step]
        segment = sum(1 for _ in self._folder.glob(f"*run-*-{self.run_id}*"))
        config = {**config, "tracking": {"segment": segment, "resume_step": resume_step}}
        self._run = _init(self._folder.parent, project, group, name, config, self.run_id, tags)
        self._mode = "disabled" if self._run.disabled else "offline" if self._run.offline else "online"
        self._row = self._run.starting_step  # rows that the server holds already: 0 but for an online resume
        unsent = [row for row in kept if row["row"] >= self._row]
        kept = kept[: len(kept) - len(unsent)] + [{**row, "row": self._row + i} for i, row in enumerate(unsent)]
        self._journal = _new_journal(journal if self._mode != "disabled" else Path(os.devnull), kept)
        for row in kept[len(kept) - len(unsent) :]:
            self._replay(row)
        self.logged = len(kept)
        """Rows of the run so far, those of earlier attempts included: what a checkpoint keeps for a resume."""
        self._hash = hashlib.sha256()
        for row in kept:
            self._hash.update(_content(row))

    @property
    def rows_hash(self) -> str | None:
        """SHA-256 of the rows so far, hex; None where no journal is kept. `holds` compares a journal with it."""
        return None if self._mode == "disabled" else self._hash.hexdigest()

    @property
    def url(self) -> str | None:
        """Address of the run's page; None unless the run is online."""
        return self._run.url if self._mode == "online" else None

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Log one row: every value under `step`, the number of optimizer steps; NaN and infinities are kept as such.

        Raises ValueError for a name that suite.metrics does not describe, for a value that is no real number, and for
        a step before the one resumed from.
        """
        self._check_step(step)
        values = {name: _number(name, value) for name, value in metrics.items()}
        self._write({"row": self._row, "step": step, "metrics": values})
        self._send({"step": step, **values})

    def log_table(
        self, step: int, name: str, table: pd.DataFrame | tuple[Sequence[str], Sequence[Sequence[Any]]]
    ) -> None:
        """Log a table under `step`, whole, however many rows it has: a frame, or (columns, rows) of JSON scalars.

        Raises ValueError for a name that suite.metrics does not describe, for a column name in RESERVED_COLUMNS or
        given twice, and for a row of another length than the columns.
        """
        self._check_step(step)
        describe_table(name)
        if isinstance(table, tuple):
            columns, rows = list(table[0]), [list(row) for row in table[1]]
        else:
            columns, rows = [str(c) for c in table.columns], table.astype(object).to_numpy().tolist()
        taken = sorted(RESERVED_COLUMNS & set(columns))
        if taken or len(set(columns)) < len(columns):
            raise ValueError(f"table {name!r}: columns {columns} repeat a name or use a reserved one {taken}")
        uneven = next((i for i, row in enumerate(rows) if len(row) != len(columns)), None)
        if uneven is not None:
            raise ValueError(f"table {name!r}: row {uneven} has {len(rows[uneven])} cells for {len(columns)} columns")
        if self._mode == "disabled":
            return
        row = self._row
        path = self._send_table(step, name, columns, rows)
        self._write({"row": row, "step": step, "table": name, "path": path, "sum": _sum(self._folder / path)})

    def sync(self) -> None:
        """Put every row logged so far safely on disk. To be called before a checkpoint is written."""
        if self._mode != "disabled":
            os.fsync(self._journal.fileno())

    def finish(self, exit_code: int = 0) -> None:
        """End the run; everything logged is in the W&B file afterwards. A second call does nothing.

        Raises TimeoutError when an offline file does not get its end within a minute.
        """
        if self._journal.closed:
            return
        self.sync()
        self._journal.close()
        self._run.finish(exit_code=exit_code)
        if self._mode == "offline":
            _wait_for_end(Path(self._run.settings.sync_file))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(0 if kind is None else 1)

    def _check_step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < self._first_step:
            raise ValueError(f"step is {step!r}: it must be an int, and at least {self._first_step}")

    def _write(self, row: dict[str, Any]) -> None:
        self._journal.write(json.dumps(row) + "\n")
        self._hash.update(_content(row))
        self.logged += 1

    def _send(self, values: dict[str, Any]) -> None:
        self._run.log(values)
        self._row += 1

    def _send_table(self, step: int, name: str, columns: list[Any], rows: list[Any]) -> str:
        """Log the table; returns the path of its JSON file, relative to the W&B folder."""
        import wandb

        wandb.Table.MAX_ROWS = max(wandb.Table.MAX_ROWS, len(rows))  # wandb would cut at 10,000 rows, silently
        table = wandb.Table(columns=columns, allow_mixed_types=True)
        table.data = rows  # given to the constructor, every cell would go through type inference: 0.4 ms a row
        if self._mode == "offline":
            # a bound table is one file of the run; unbound, wandb also leaves two copies in the user's home for good
            table.bind_to_run(self._run, name, self._row)
        self._send({"step": step, name: table})
        file = Path(self._run.dir, table.to_json(self._run)["path"])
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        return os.path.relpath(file.resolve(), self._folder.resolve())

    def _replay(self, row: dict[str, Any]) -> None:
        if "metrics" in row:
            self._send({"step": row["step"], **row["metrics"]})
        else:
            kept = json.loads((self._folder / row["path"]).read_text(encoding="utf-8"))
            self._send_table(row["step"], row["table"], kept["columns"], kept["data"])


class Silent(Tracker):
    """The tracker of a rank that logs nothing."""

    def __init__(self) -> None:
        self.run_id, self.logged = "", 0
        self._mode = "disabled"

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Nothing is logged."""

    def log_table(self, step: int, name: str, table: object) -> None:
        """Nothing is logged."""

    def sync(self) -> None:
        """Nothing is written."""

    def finish(self, exit_code: int = 0) -> None:
        """Nothing is written."""


def _init(
    folder: Path, project: str, group: str, name: str, config: dict[str, Any], run_id: str, tags: Sequence[str]
) -> wandb.Run:
    import wandb

    mode = os.environ.get("WANDB_MODE", "offline")
    settings = {key: value for key, value in _QUIET.items() if f"WANDB_{key.upper()}" not in os.environ}
    run = wandb.init(
        dir=str(
            folder.absolute()
        ),  # wandb's process may have been started elsewhere: a notebook's, found by WANDB_SERVICE
        project=os.environ.get("WANDB_PROJECT", project),
        group=group,
        name=name,
        id=run_id,
        config=config,
        tags=[*tags, *filter(None, os.environ.get("WANDB_TAGS", "").split(","))],
        mode=mode,  # type: ignore[arg-type]  # wandb says which values it knows
        resume="allow" if mode == "online" else None,
        reinit="create_new",
        settings=wandb.Settings(**settings, **_FIXED),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _wait_for_end(path: Path) -> None:
    """wandb closes the file of a finished run only after it has said that it is done."""
    deadline = time.monotonic() + _END_S
    pause = 0.001
    while not has_ended(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: W&B has not written the end of the run in {_END_S:.0f} s; is the disk full?")
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _number(name: str, value: Any) -> float | int:
    describe(name)
    if not isinstance(value, Real):
        raise ValueError(f"{name} is a {type(value).__name__}, {value!r}: a metric is one real number")
    return int(value) if isinstance(value, Integral) else float(value)


def _refuse_secrets(config: dict[str, Any]) -> None:
    text = json.dumps(config, default=str)
    for name, value in os.environ.items():
        secret = re.search(r"(API_KEY|TOKEN|SECRET|PASSWORD)$", name) and len(value) >= 8
        if secret and json.dumps(value)[1:-1] in text:
            raise ValueError(f"the configuration holds the value of {name}: a secret is never logged, leave it out")


def journal_of(folder: Path, run_id: str) -> Path:
    """The journal of the rows of a run in its folder."""
    return folder / "wandb" / f"{run_id}.jsonl"


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The rows of a journal up to the first that is not whole, or whose table is not. No file, no rows."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    rows: list[dict[str, Any]] = []
    for line in lines[:-1]:
        try:
            row = json.loads(line)
            _content(row)
            if "sum" in row and _sum(path.parent / row["path"]) != row["sum"]:
                return rows
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return rows
        rows.append(row)
    return rows


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def holds(rows: Sequence[Mapping[str, Any]], count: int, rows_hash: str | None) -> bool:
    """Whether a journal begins with the rows that a checkpoint counted, as they were; True if it kept no hash."""
    digest = hashlib.sha256()
    for row in rows[:count]:
        digest.update(_content(row))
    return rows_hash is None or (len(rows) >= count and digest.hexdigest() == rows_hash)


def _content(row: Mapping[str, Any]) -> bytes:
    """What a row says, without its number, which a resume may change."""
    kept = {name: row[name] for name in ("step", "metrics" if "metrics" in row else "table")}
    return json.dumps(kept, sort_keys=True).encode()


def _new_journal(path: Path, rows: list[dict[str, Any]]) -> TextIO:
    """Replace the journal by `rows` at once, so that a kill leaves the old one or the new one, and open it to append.

    The handle passes every line on to the system when it is complete: the death of this process loses none.
    """
    if str(path) != os.devnull:
        fresh = path.with_suffix(".new")
        with fresh.open("w", encoding="utf-8") as handle:
            handle.writelines(json.dumps(row) + "\n" for row in rows)
            handle.flush()
            os.fsync(handle.fileno())
        fresh.replace(path)
    return path.open("a", encoding="utf-8", buffering=1)
