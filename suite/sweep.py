"""A study as an Optuna study: its cells are trials, created once, worked on under leases, never run twice.

The study's folder holds `study.json` (the declaration and how its cells stand), the storage unless another one is
named, and a folder per cell. Arms, values and seeds may be added later; nothing that is there changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from suite import failures, trials
from suite.config import RunConfig, fingerprint, from_json
from suite.declaration import (
    cell_record,
    check_folder,
    check_storage,
    declaration,
    read_declaration,
    recorded_url,
    shown_url,
)
from suite.failures import Failure, Retries, write_json
from suite.lease import Lease, Leases, Watch, is_gone, last_step, owner_of
from suite.provenance import different_versions, provenance, same_code
from suite.status import CellStatus, State, StudyStatus
from suite.storage import Store, masked
from suite.study import Cell, Study

CURVE = "eval/validation/accuracy"
"""The metric whose course the Optuna dashboard shows."""


class Sweep:
    """A study's cells in an Optuna storage. Get one from `open` (declares the cells) or `attach` (a worker)."""

    def __init__(self, folder: Path, store: Store, study: optuna.Study, retries: Retries | None = None) -> None:
        self.folder, self.store, self.study = folder, store, study
        self.leases = Leases(store, study, retries)
        self.watch = Watch()
        self._declared: tuple[object, dict[str, Any]] = (None, {})

    @classmethod
    def open(
        cls,
        study: Study,
        folder: Path,
        plugins: Sequence[Path] = (),
        storage: str | None = None,
        command: str = "",
        *,
        rerun_stale: bool = False,
        allow_mixed: bool = False,
    ) -> Sweep:
        """Declares a study's cells. Those that are there already stay as they are, so opening twice changes nothing.

        `plugins` are Python files that workers must import (the study's, its axes'). `rerun_stale` queues finished
        cells whose arm or commit changed; the old folders are kept under `stale/`. `allow_mixed` records other library
        versions, or code that changed while workers run, instead of refusing them. Raises ValueError for a study or
        folder or storage that cannot be used, or a folder that holds another study.
        """
        cells = study.cells()
        check_folder(folder)
        old = read_declaration(folder) if (folder / "study.json").exists() else None
        if old is not None and old["name"] != study.name:
            raise ValueError(f"folder {folder} holds study {old['name']!r}, not {study.name!r}; choose another folder")
        store = Store(storage or recorded_url(folder, old))
        check_storage(folder, store, old)
        with store.lock():
            inner = trials.create_study(store, study)
            sweep = cls(folder, store, inner)
            sweep._admit(allow_mixed)
            sweep._declare(study, cells, rerun_stale)
            tree = declaration(study, cells, plugins, command, shown_url(folder, store))
            write_json(folder / "study.json", tree)
            sweep.snapshot()
        return sweep

    @classmethod
    def attach(cls, folder: Path, storage: str | None = None, patience_s: float = 0.0) -> Sweep:
        """The sweep of a folder that `open` has written; ValueError if there is none."""
        tree = read_declaration(folder)
        store = Store(storage or recorded_url(folder, tree), patience_s)
        try:
            return cls(folder, store, optuna.load_study(study_name=tree["name"], storage=store.optuna))
        except KeyError:
            raise ValueError(
                f"storage {masked(store.url)} holds no study {tree['name']!r}; name the one it was run with"
            ) from None

    # What workers do

    def claim(
        self, owner: str, arms: Collection[str] | None = None, seeds: Collection[int] | None = None
    ) -> Lease | None:
        """A lease on the next cell (of these arms and seeds) that nobody works on; None if there is none now."""
        declared = {cell["declared"] for cell in self.declared["cells"]}

        def wanted(trial: FrozenTrial) -> bool:
            attrs = trial.user_attrs
            return (
                attrs["fingerprint"] in declared
                and (arms is None or attrs["arm"] in arms)
                and (seeds is None or attrs["seed"] in seeds)
            )

        return self.leases.claim(owner, wanted)

    def config(self, lease: Lease) -> RunConfig:
        """The configuration of a claimed cell; ValueError if its file was changed since the cell was declared."""
        path = self.cell_folder(lease) / "config.json"
        config = from_json(json.loads(path.read_text(encoding="utf-8"))["run"])
        if fingerprint(config) != lease.fingerprint:
            raise ValueError(f"{path} is not the configuration that cell {lease.cell} was declared with; restore it")
        return config

    def cell_folder(self, lease: Lease) -> Path:
        """Where a cell keeps its files."""
        return self.folder / "cells" / lease.cell

    def report(self, lease: Lease, progress: dict[str, Any]) -> None:
        """Renews a lease and shows progress (`step`, `steps`, `metrics`, ...). Raises LeaseLost."""
        self.leases.renew(lease, progress)

    def finish(self, lease: Lease, metrics: dict[str, float], progress: dict[str, Any] | None = None) -> None:
        """Completes a cell with the study's metric as the trial's value. Raises LeaseLost.

        A result without that metric, or one that is not finite, raises ValueError and completes nothing.
        """
        name = self.declared["metric"]
        if name not in metrics:
            raise ValueError(
                f"the run of cell {lease.cell} gave no metric {name!r}; it gave {', '.join(sorted(metrics)) or 'none'}"
            )
        value = float(metrics[name])
        if not math.isfinite(value):
            raise ValueError(f"the run of cell {lease.cell} gave {name} = {value}")
        finite = {key: float(number) for key, number in metrics.items() if math.isfinite(number)}
        self.leases.finish(lease, value, metrics=finite, progress=progress or {}, **provenance())

    def fail(self, lease: Lease, failure: Failure, text: str = "") -> bool:
        """Ends an attempt that went wrong; True if the cell will be tried again. Raises LeaseLost."""
        again = self.leases.fail(lease, failure)
        self._keep(lease.cell, lease.arm, lease.number, failure, text, lease.owner)
        return again

    def unfinished(self, arms: Collection[str] | None = None, seeds: Collection[int] | None = None) -> bool:
        """Whether a cell (of these arms and seeds) still waits or runs."""
        left = {
            trial.user_attrs["fingerprint"]
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING))
        }
        return any(
            cell["declared"] in left
            and (arms is None or cell["arm"] in arms)
            and (seeds is None or cell["seed"] in seeds)
            for cell in self.declared["cells"]
        )

    def release(self, lease: Lease) -> None:
        """Gives a cell back to the queue, to be resumed from its checkpoint. Raises LeaseLost."""
        self.leases.release(lease)

    def recover(self, dead: dict[str, str] | None = None) -> list[str]:
        """Takes cells from workers that are gone, and says which: processes of this machine that no longer run,
        owners silent for the time to live, and those in `dead` (owner's last part -> what became of it)."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        silent = {trial._trial_id for trial in self.watch.silent(running)}
        freed = []
        for trial in running:
            lease = trial.user_attrs.get("lease") or {}
            owner = str(lease.get("owner", "")) if isinstance(lease, dict) else ""
            cause = (dead or {}).get(owner.rpartition("|")[2])
            if cause is None and is_gone(owner):
                cause = "its process no longer runs"
            if cause is None and trial._trial_id in silent:
                cause = f"no sign of life for {self.watch.ttl_s:.0f} s"
            if cause is not None:
                failure = Failure("lost", "WorkerLost", cause, last_step(trial))
                if self.leases.expire(trial, failure):
                    attrs = trial.user_attrs
                    number = lease.get("number", 0) if isinstance(lease, dict) else 0
                    self._keep(attrs["cell"], attrs["arm"], number, failure, "", owner)
                    freed.append(attrs["cell"])
        return freed

    # What the user does

    def retry(
        self, arms: Collection[str] | None = None, seeds: Collection[int] | None = None, kinds: bool = True
    ) -> int:
        """Queues failed cells again (of these arms and seeds), each as a new trial; how many there were.

        With `kinds` false, cells that failed for a reason that comes again are left: a loss that is not finite.
        """
        count = 0
        with self.store.lock():
            latest = trials.latest(self.study)
            for cell in self.declared["cells"]:
                trial = latest.get(cell["declared"])
                if (
                    trial is not None
                    and trial.state == TrialState.FAIL
                    and (arms is None or cell["arm"] in arms)
                    and (seeds is None or cell["seed"] in seeds)
                    and (kinds or not str(trial.user_attrs.get("reason", "")).startswith("not finite"))
                ):
                    trials.repeat(self.study, trial)
                    count += 1
        return count

    def snapshot(self) -> StudyStatus:
        """How the study stands now; also brings the cells in `study.json` up to date."""
        tree = self.declared
        latest, finished = trials.latest(self.study), trials.finished(self.study)
        cells = tuple(self._cell(cell, latest, finished) for cell in tree["cells"])
        status = StudyStatus(tree["name"], {arm["name"]: arm["label"] for arm in tree["arms"]}, cells)
        shown = [
            {"declared": was["declared"], **{key: getattr(cell, key) for key in _SHOWN}}
            for was, cell in zip(tree["cells"], cells, strict=True)
        ]
        if shown != tree["cells"]:
            with self.store.lock():
                if self.declared is tree:
                    write_json(self.folder / "study.json", {**tree, "cells": shown})
        return status

    @property
    def declared(self) -> dict[str, Any]:
        """What `study.json` says now."""
        found = (self.folder / "study.json").stat()
        mark = (found.st_mtime_ns, found.st_ino)
        if self._declared[0] != mark:
            self._declared = (mark, read_declaration(self.folder))
        return self._declared[1]

    def mixed(self) -> str | None:
        """Why this process may not work on the study beside the others: other code or libraries. None if it may."""
        theirs, mine = self.study.user_attrs.get("provenance"), provenance()
        if theirs is None:
            return None
        differing = different_versions(theirs, mine)
        if differing:
            return f"study {self.study.study_name!r} runs with other library versions: {', '.join(differing)}"
        if not same_code(theirs, mine):
            return f"study {self.study.study_name!r} runs other code: {_code(theirs)} there, {_code(mine)} here"
        return None

    def _admit(self, allow_mixed: bool) -> None:
        theirs, mine = self.study.user_attrs.get("provenance"), provenance()
        reason = self.mixed()
        if reason and not allow_mixed:
            running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            # Code may change between runs: finished cells are then shown as stale. Libraries may not, nor code at work.
            if different_versions(theirs or {}, mine) or any(not is_gone(owner_of(trial)) for trial in running):
                raise ValueError(f"{reason}; bring them together, or pass --allow-mixed to record both")
        if theirs != mine:
            self.study.set_user_attr("provenance", mine)

    def _declare(self, study: Study, cells: Sequence[Cell], rerun_stale: bool) -> None:
        latest, finished = trials.latest(self.study), trials.finished(self.study)
        new, base = [], {}
        for cell in cells:
            trial = latest.get(cell.fingerprint)
            if trial is None:
                if rerun_stale or (cell.arm, cell.seed) not in finished:
                    new.append(cell)
            elif rerun_stale and trial.state == TrialState.COMPLETE and not same_code(trial.user_attrs, provenance()):
                self._set_aside(cell)
                new.append(cell)
                base[cell.fingerprint] = trial.user_attrs["lease"]["number"]
        # The file first: a trial without its configuration could be claimed and not be run.
        for cell in cells:
            path = self.folder / "cells" / cell.name / "config.json"
            if not path.exists() and (cell in new or cell.fingerprint in latest):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, cell_record(study, cell))
        trials.add(self.study, study, new, base)
        trials.withdraw(self.store, self.study, {cell.fingerprint for cell in cells})

    def _set_aside(self, cell: Cell) -> None:
        folder = self.folder / "cells" / cell.name
        if folder.exists():
            (self.folder / "stale").mkdir(exist_ok=True)
            taken = {path.name for path in (self.folder / "stale").iterdir()}
            count = next(n for n in range(1, len(taken) + 2) if f"{cell.name}-{n}" not in taken)
            folder.rename(self.folder / "stale" / f"{cell.name}-{count}")

    def _keep(self, cell: str, arm: str, attempt: int, failure: Failure, text: str, owner: str) -> None:
        rerun = ["suite", "retry", self.declared["name"], "--arm", arm]
        failures.keep(self.folder / "cells" / cell, attempt, failure, text, rerun, owner)

    def _cell(
        self, cell: dict[str, Any], latest: dict[str, FrozenTrial], finished: dict[tuple[str, int], FrozenTrial]
    ) -> CellStatus:
        trial = latest.get(cell["declared"])
        stale = None
        if trial is None:
            trial = finished.get((cell["arm"], cell["seed"]))
            stale = "finished under another definition of the arm"
        elif trial.state == TrialState.COMPLETE and not same_code(trial.user_attrs, provenance()):
            stale = f"finished by {_code(trial.user_attrs)}, the code is now {_code(provenance())}"
        if trial is None:
            raise ValueError(
                f"storage {masked(self.store.url)} lacks cell {cell['name']}; was it exchanged or emptied?"
            )
        return _status(trial, stale)


_SHOWN = ("arm", "seed", "name", "fingerprint", "status", "folder", "error", "attempts")
_STATES: dict[TrialState, State] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.FAIL: "failed",
    TrialState.PRUNED: "failed",
}


def _status(trial: FrozenTrial, stale: str | None) -> CellStatus:
    attrs, complete = trial.user_attrs, trial.state == TrialState.COMPLETE
    progress = attrs.get("progress", {})
    attempts = attrs.get("attempts", [])
    last = attempts[-1]["reason"] if attempts and not complete else None
    return CellStatus(
        arm=attrs["arm"],
        seed=attrs["seed"],
        name=attrs["cell"],
        fingerprint=attrs["fingerprint"],
        status="stale" if stale else _STATES[trial.state],
        folder=f"cells/{attrs['cell']}",
        error=stale or last,
        attempts=len(attempts) + (trial.state in (TrialState.RUNNING, TrialState.COMPLETE)),
        step=progress.get("step", 0),
        steps=progress.get("steps", 0),
        metrics={**progress.get("metrics", {}), **attrs.get("metrics", {})},
        seconds=progress.get("seconds", 0.0),
        started_at=progress.get("started_at", 0),
        tokens_per_second=progress.get("tokens_per_second", 0.0),
    )


def _code(record: dict[str, Any]) -> str:
    return f"commit {str(record.get('commit', 'unknown'))[:8]}{' with changes' if record.get('dirty') else ''}"
