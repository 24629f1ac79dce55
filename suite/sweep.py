"""A study as an Optuna study: its cells are trials, created once, worked on under leases, never run twice.

The study's folder holds `study.json` (the declaration and how its cells stand), the storage unless another one is
named, and a folder per cell. Arms, values and seeds may be added later; nothing that is there changes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from suite import failures, frozen, lineage, source, starts, trials
from suite.config import RunConfig, fingerprint, flatten, from_json
from suite.declaration import (
    ALL,
    NOTHING,
    Choice,
    cell_record,
    check_folder,
    check_storage,
    declaration,
    read_declaration,
    recorded_url,
    shown_url,
)
from suite.failures import Failure, Retries, write_json
from suite.lease import Lease, Leases, Watch, is_gone, last_step, number_of, owner_of
from suite.provenance import code_name, different_versions, provenance, same_code
from suite.status import CellStatus, StudyStatus
from suite.storage import Store, masked
from suite.study import Cell, Study, cell_name

CODE = "code"
"""The folder, in a study's, of what its runs were made from: a JSON of modules for each code, and copies of the files
of study, axes and plugins under their hashes."""

_SHOWN = ("arm", "seed", "name", "fingerprint", "status", "folder", "error", "attempts")

CURVE = "eval/validation/accuracy"
"""The metric whose course the Optuna dashboard shows."""


class Sweep:
    """A study's cells in an Optuna storage. Get one from `open` (declares the cells) or `attach` (a worker)."""

    def __init__(self, folder: Path, store: Store, study: optuna.Study, retries: Retries | None = None) -> None:
        self.folder, self.store, self.study = folder, store, study
        self.leases = Leases(store, study, retries)
        self.watch = Watch()
        self._declared: tuple[object, dict[str, Any]] = (None, {})
        self._inputs: dict[str, dict[str, Any]] = {}
        self._configs: dict[str, RunConfig] = {}

    @classmethod
    def open(
        cls,
        study: Study,
        folder: Path,
        plugins: Sequence[Path] = (),
        storage: str | None = None,
        command: str = "",
        *,
        rerun_stale: Choice = NOTHING,
        allow_mixed: bool = False,
    ) -> Sweep:
        """Declares a study's cells. Those that are there already stay as they are, so opening twice changes nothing.

        `plugins` are Python files that workers must import (the study's, its axes'). `rerun_stale` chooses the
        stale cells that are queued again; their old folders are kept under `stale/`. `allow_mixed` records other
        library versions, or code that changed while workers run, instead of refusing them. Raises ValueError for a
        study or folder or storage that cannot be used, or a folder that holds another study.
        """
        starts.prepare(study.models())
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
            sweep._archive(plugins)
            sweep._declare(study, cells, rerun_stale, plugins)
            tree = declaration(study, cells, plugins, command, shown_url(folder, store))
            write_json(folder / "study.json", tree | {frozen.ATTRIBUTE: sweep._refreeze(tree)})
            sweep.snapshot()
        return sweep

    @classmethod
    def attach(
        cls,
        folder: Path,
        storage: str | None = None,
        patience_s: float = 0.0,
        give_up: Callable[[], bool] = lambda: False,
    ) -> Sweep:
        """The sweep of a folder that `open` has written; ValueError if there is none. The last two: see `Store`."""
        tree = read_declaration(folder)
        store = Store(storage or recorded_url(folder, tree), patience_s, give_up)
        try:
            return cls(folder, store, optuna.load_study(study_name=tree["name"], storage=store.optuna))
        except KeyError:
            raise ValueError(
                f"storage {masked(store.url)} holds no study {tree['name']!r}; name the one it was run with"
            ) from None

    # What workers do

    def claim(self, owner: str, choice: Choice = ALL) -> Lease | None:
        """A lease on the next chosen cell that nobody works on; None if there is none now.

        A cell that starts from another one waits until that one has ended. If it failed, so will this one, at once.
        """
        declared, open_cells = {cell["declared"] for cell in self.declared["cells"]}, self._not_ended()

        def wanted(trial: FrozenTrial) -> bool:
            attrs = trial.user_attrs
            chosen = attrs["fingerprint"] in declared and choice.takes(attrs["arm"], attrs["seed"])
            return chosen and attrs.get("starts_from") not in open_cells

        lease = self.leases.claim(owner, wanted)
        if lease is not None:
            self.leases.mark(lease, code_name(provenance()))
            self._freeze(lease.arm)
            # as they are when the run starts
            self._inputs[lease.cell] = self._made_from(lease.cell)
        return lease

    def _freeze(self, arm: str) -> None:
        """Fix the claims on an arm of which a cell has started."""

        def action() -> None:
            with self.store.lock():
                record = self.frozen()
                after = frozen.started(record, self.declared["claims"], self.declared["seeds"], arm)
                if after != record:
                    self.study.set_user_attr(frozen.ATTRIBUTE, after)
                    write_json(self.folder / "study.json", self.declared | {frozen.ATTRIBUTE: after})

        known = {entry["claim"]["name"] for entry in self.declared.get(frozen.ATTRIBUTE, ())}
        if any(arm in (c["arm"], c["than"]) and c["name"] not in known for c in self.declared.get("claims", ())):
            self.store.call(action)

    def _refreeze(self, tree: Mapping[str, Any]) -> list[frozen.Entry]:
        """The record of claims after this declaration; in the storage too."""
        record, found = self.frozen(), self._trials()
        begun = {trial.user_attrs["arm"] for trial in found if trial.user_attrs["lease"]["number"]}
        seen = {
            arm["name"]: {seed for name, seed in trials.finished(found) if name == arm["name"]} for arm in tree["arms"]
        }
        after = frozen.declared(record, tree["claims"], tree["seeds"], begun, seen)
        if after != record:
            self.study.set_user_attr(frozen.ATTRIBUTE, after)
        return after

    def frozen(self) -> list[frozen.Entry]:
        """The claims as the storage has them since their first cells started: see `suite.frozen`."""
        return list(self.store.call(lambda: self.study.user_attrs).get(frozen.ATTRIBUTE, ()))

    def config(self, lease: Lease) -> RunConfig:
        """The configuration of a claimed cell, with the place of the model that it starts from.

        ValueError if its file was changed since the cell was declared, or it starts from a cell that is not complete.
        """
        path = self.cell_folder(lease) / "config.json"
        config = from_json(json.loads(path.read_text(encoding="utf-8"))["run"])
        if fingerprint(config) != lease.fingerprint:
            raise ValueError(f"{path} is not the configuration that cell {lease.cell} was declared with; restore it")
        return lineage.placed(config, self.folder, lease.arm, self._trials()) if config.model.parent else config

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
        made_from = self._inputs.get(lease.cell) or self._made_from(lease.cell)
        self.leases.finish(lease, value, metrics=finite, progress=progress or {}, **made_from, **provenance())

    def fail(self, lease: Lease, failure: Failure, text: str = "") -> bool:
        """Ends an attempt that went wrong; True if the cell will be tried again. Raises LeaseLost."""
        again = self.leases.fail(lease, failure)
        self._keep(lease.cell, lease.arm, lease.number, failure, text, lease.owner)
        return again

    def unfinished(self, choice: Choice = ALL) -> bool:
        """Whether a chosen cell still waits or runs."""
        left = self._not_ended()
        return any(
            cell["declared"] in left and choice.takes(cell["arm"], cell["seed"]) for cell in self.declared["cells"]
        )

    def release(self, lease: Lease) -> None:
        """Gives a cell back to the queue, to be resumed from its checkpoint. Raises LeaseLost."""
        self.leases.release(lease)

    def recover(self, dead: Mapping[str, Failure] | None = None) -> dict[str, str]:
        """Takes cells from workers that are gone; cell -> last part of the former owner's name.

        Gone are: owners in `dead` (last part of the name -> what became of it), processes of this machine that no
        longer run, and owners without a sign of life for the time to live.
        """
        running = self._trials(TrialState.RUNNING)
        silent = {trial._trial_id for trial in self.watch.silent(running)}
        freed = {}
        for trial in running:
            number, owner, step = number_of(trial), owner_of(trial), last_step(trial)
            name = owner.rpartition("|")[2]
            if dead and name in dead:
                failure = replace(dead[name], step=step)
            elif is_gone(owner):
                failure = Failure("lost", "WorkerLost", "its process no longer runs", step)
            elif trial._trial_id in silent:
                failure = Failure("lost", "WorkerLost", f"no sign of life for {self.watch.ttl_s:.0f} s", step)
            else:
                continue
            if self.leases.expire(trial, failure):
                self._keep(trial.user_attrs["cell"], trial.user_attrs["arm"], number, failure, "", owner)
                freed[trial.user_attrs["cell"]] = name
        return freed

    # What the user does

    def retry(self, choice: Choice = ALL, kinds: bool = True) -> int:
        """Queues the chosen failed cells again, each as a new trial; how many there were.

        With `kinds` false, cells that failed for a reason that comes again are left: a loss that is not finite.
        """

        def action() -> int:
            count = 0
            with self.store.lock():
                latest = trials.latest(self._trials())
                for cell in self.declared["cells"]:
                    trial = latest.get(cell["declared"])
                    if trial is None or trial.state != TrialState.FAIL or not choice.takes(cell["arm"], cell["seed"]):
                        continue
                    if kinds or not str(trial.user_attrs.get("reason", "")).startswith("not finite"):
                        trials.repeat(self.study, trial)
                        count += 1
            return count

        return self.store.call(action)

    def snapshot(self, write: bool = True) -> StudyStatus:
        """How the study stands now; also brings the cells in `study.json` up to date, unless nothing may be written."""
        tree = self.declared
        found = self._trials()
        latest, finished = trials.latest(found), trials.finished(found)
        cells = tuple(self._cell(cell, latest, finished) for cell in tree["cells"])
        arms = {arm["name"]: arm["label"] for arm in tree["arms"]}
        notes = _mixtures([latest[cell["declared"]] for cell in tree["cells"] if cell["declared"] in latest])
        status = StudyStatus(tree["name"], arms, cells, notes=notes)
        shown = [
            {key: was[key] for key in ("declared", "starts_from") if key in was} | {k: getattr(cell, k) for k in _SHOWN}
            for was, cell in zip(tree["cells"], cells, strict=True)
        ]
        if write and shown != tree["cells"]:
            self.store.call(lambda: self._write_cells(tree, shown))
        return status

    def _write_cells(self, tree: dict[str, Any], cells: list[dict[str, Any]]) -> None:
        with self.store.lock():
            # Somebody who declared the study anew in the meantime knows better.
            if self.declared is tree:
                write_json(self.folder / "study.json", {**tree, "cells": cells})

    def _not_ended(self) -> set[str]:
        """The fingerprints of the cells that wait or run."""
        return {trial.user_attrs["fingerprint"] for trial in self._trials(TrialState.WAITING, TrialState.RUNNING)}

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.store.call(lambda: self.study.get_trials(deepcopy=False, states=states or None))

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
        theirs, mine = self.store.call(lambda: self.study.user_attrs).get("provenance"), provenance()
        if theirs is None:
            return None
        differing = different_versions(theirs, mine)
        if differing:
            return f"study {self.study.study_name!r} runs with other library versions: {', '.join(differing)}"
        if not same_code(theirs, mine):
            return f"study {self.study.study_name!r} runs other code: {code_name(theirs)} there, {code_name(mine)} here"
        return None

    def _admit(self, allow_mixed: bool) -> None:
        theirs, mine = self.study.user_attrs.get("provenance"), provenance()
        reason = self.mixed()
        if reason and not allow_mixed:
            running = self._trials(TrialState.RUNNING)
            # Code may change between runs: finished cells are then shown as stale. Libraries may not, nor code at work.
            if different_versions(theirs or {}, mine) or any(not is_gone(owner_of(trial)) for trial in running):
                raise ValueError(f"{reason}; bring them together, or pass --allow-mixed to record both")
        if theirs != mine:
            self.study.set_user_attr("provenance", mine)

    def _config(self, cell: str) -> RunConfig:
        """The configuration in a cell's folder; it never changes."""
        if cell not in self._configs:
            path = self.folder / "cells" / cell / "config.json"
            self._configs[cell] = from_json(json.loads(path.read_text(encoding="utf-8"))["run"])
        return self._configs[cell]

    def _plugins(self) -> list[Path]:
        """The files that workers import, as declared."""
        return [Path(name) for name in self.declared.get("plugins", ())]

    def _made_from(self, cell: str) -> dict[str, Any]:
        """Hashes of what a cell's result is made from, beside code and weights: its plugins and its input files."""
        return {"files": source.plugin_hashes(self._plugins()), "inputs": source.input_hashes(self._config(cell))}

    def _outdated(self, trial: FrozenTrial, plugins: Sequence[Path]) -> str | None:
        """What a complete cell was made from that is another thing now, in words; None if nothing is."""
        attrs, out = trial.user_attrs, []
        if not same_code(attrs, provenance()):
            record = self.folder / CODE / f"{attrs.get('source')}.json"
            if record.is_file():
                known = json.loads(record.read_text(encoding="utf-8"))
                out.append(f"the code of {', '.join(source.changed(known, source.modules()))}")
            else:
                out.append(f"the code, {code_name(attrs)}, which is now {code_name(provenance())}")
        files = source.plugin_hashes(plugins)
        out += [name for name, found in attrs.get("files", {}).items() if files.get(name) != found]
        if attrs.get("inputs"):
            now = source.input_hashes(self._config(attrs["cell"]))
            out += [f"the content of {name}" for name, found in attrs["inputs"].items() if now.get(name) != found]
        return f"changed since it finished: {'; '.join(out)}" if out else None

    def _redefined(self, trial: FrozenTrial, cell: Mapping[str, Any]) -> str:
        """In what a finished cell's definition differs from the declared one, where both are there to be read."""
        try:
            declared = cell_name(cell["arm"], cell["seed"], cell["declared"])
            was, now = flatten(self._config(trial.user_attrs["cell"])), flatten(self._config(declared))
        except (OSError, ValueError, KeyError):
            return ""
        changes = [f"{name} {was[name]!r} -> {now[name]!r}" for name in was if was[name] != now[name]]
        return f": {', '.join(changes)}" if changes else ""

    def _archive(self, plugins: Sequence[Path]) -> None:
        """Keep what this code says of itself, and the study's, axes' and plugins' files, beside the runs."""
        (self.folder / CODE).mkdir(exist_ok=True)
        record = self.folder / CODE / f"{source.source_hash()}.json"
        if not record.exists():
            write_json(record, source.modules())
        for path in filter(Path.is_file, map(Path, plugins)):
            data = path.read_bytes()
            kept = self.folder / CODE / f"{hashlib.sha256(data).hexdigest()[:12]}-{path.name}"
            if not kept.exists():
                kept.write_bytes(data)

    def _declare(self, study: Study, cells: Sequence[Cell], rerun_stale: Choice, plugins: Sequence[Path]) -> None:
        found = self._trials()
        latest, finished = trials.latest(found), trials.finished(found)
        lineage.check_shared(cells, latest.values(), rerun_stale)
        new, base = [], {}
        for cell in cells:
            trial, again = latest.get(cell.fingerprint), rerun_stale.takes(cell.arm, cell.seed)
            if trial is None:
                if again or (cell.arm, cell.seed) not in finished:
                    new.append(cell)
            elif again and trial.state == TrialState.COMPLETE and self._outdated(trial, plugins):
                self._set_aside(cell)
                new.append(cell)
                base[cell.fingerprint] = trial.user_attrs["lease"]["number"]
        # The file first: a trial without its configuration could be claimed and not be run.
        for cell in cells:
            path = self.folder / "cells" / cell.name / "config.json"
            if not path.exists():
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
        rerun = ["suite", "retry", str(self.folder), "--arm", arm]
        failures.keep(self.folder / "cells" / cell, attempt, failure, text, rerun, owner)

    def _cell(
        self, cell: dict[str, Any], latest: dict[str, FrozenTrial], finished: dict[tuple[str, int], FrozenTrial]
    ) -> CellStatus:
        trial = latest.get(cell["declared"])
        stale = None
        if trial is None:
            trial = finished.get((cell["arm"], cell["seed"]))
            stale = "finished under another definition of the arm"
            stale += self._redefined(trial, cell) if trial else ""
        elif trial.state == TrialState.COMPLETE:
            stale = self._outdated(trial, self._plugins())
        if trial is None:
            raise ValueError(
                f"storage {masked(self.store.url)} lacks cell {cell['name']}; was it exchanged or emptied?"
            )
        return trials.status_of(trial, stale)


def _mixtures(found: Sequence[FrozenTrial]) -> tuple[str, ...]:
    """What the finished cells do not have in common, one sentence each."""
    complete = [trial for trial in found if trial.state == TrialState.COMPLETE]
    notes = [
        f"cell {trial.user_attrs['cell']} was worked on by {' and by '.join(trial.user_attrs['code'])}"
        for trial in complete
        if len(trial.user_attrs.get("code", ())) > 1
    ]
    if complete:
        first = complete[0].user_attrs
        others = {text for trial in complete for text in different_versions(first, trial.user_attrs)}
        if others:
            notes.append(f"finished cells ran under different libraries: {', '.join(sorted(others))}")
    return tuple(notes)
