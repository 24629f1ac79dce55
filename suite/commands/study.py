"""`suite run`, `status`, `retry` and `report`: a study, from its file to its report."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from suite.commands.catalogue import console
from suite.search import search_folder, winners
from suite.study import Study

RUNS = Path("runs")
"""Where studies lie, below the current folder."""


def resolve(name: str, axes: Sequence[str] = ()) -> tuple[Study, list[Path]]:
    """A study by name or path, and the files that its workers must import.

    With axes the study keeps its base and seeds; its arms are those of the axes, one at a time, and it makes no
    claims, since those are on its own arms. It then has a name, and hence a folder, of its own.
    """
    from ablations.axis import one_at_a_time
    from ablations.load import axis_file, load_axis, load_study, study_file

    study, files = load_study(name), [study_file(name)]
    if axes:
        loaded = [load_axis(axis) for axis in axes]
        files += [axis_file(axis) for axis in axes]
        study = dataclasses.replace(
            study,
            name="-".join([study.name, *(axis.name for axis in loaded)]),
            question=" ".join(axis.question for axis in loaded),
            arms=one_at_a_time(loaded, study.base),
            claims=(),
            search=None,
        )
    return study, files


def run(
    name: str,
    workers: int | Literal["auto"],
    seeds: Sequence[int] | None,
    arms: Sequence[str],
    axes: Sequence[str],
    dry_run: bool,
    folder: Path | None,
    storage: str | None = None,
    rerun_stale: bool = False,
    allow_mixed: bool = False,
    tuned: Path | None = None,
    leave_within: float = 25.0,
    gpus_per_cell: int = 0,
) -> int:
    """Run what is missing of a study, or show what would be run; the exit code says how the study stands."""
    from suite.commands import plan
    from suite.launch.local import run_study
    from suite.launch.machine import plan_workers, share_gpus

    study, files = resolve(name, axes)
    folder = folder or RUNS / study.name
    if study.search is not None:
        tuned = tuned or folder
        study = winners(study, tuned)
    elif tuned is not None:
        raise ValueError(f"--tuned names a search's folder, and study {study.name!r} declares no search")
    if not leave_within > 0:
        raise ValueError(f"--leave-within is {leave_within}: workers need a time above 0 seconds to leave")
    share = share_gpus(gpus_per_cell)
    plan.check_arms(study)
    cells = plan.chosen(study, arms, seeds)
    if dry_run:
        plan.dry_run(study, cells, folder, share.within(plan_workers(workers, len(cells))).workers)
        return 0
    plan.warn_inert(study, console())
    words = ["suite", "run", name, *(word for axis in axes for word in ("--axis", axis))]
    words += ["--tuned", str(tuned)] if tuned else []
    status = run_study(
        study,
        folder,
        workers,
        files,
        arms=list(arms) or None,
        seeds=list(seeds) if seeds else None,
        storage=storage,
        command=shlex.join(words),
        rerun_stale=rerun_stale,
        allow_mixed=allow_mixed,
        leave_within_s=leave_within,
        gpus_per_cell=gpus_per_cell,
    )
    return status.exit_code


def study_folder(name: str, folder: Path | None) -> Path:
    """The folder of a study that has been started: given, or found by the study's name, its file, or the folder itself.

    Raises ValueError with near names for a study that does not exist.
    """
    from ablations.load import load_study

    if folder is not None:
        return folder
    for place in (RUNS / name, Path(name)):
        if (place / "study.json").is_file():
            return place
    return RUNS / load_study(name).name


def status(name: str, folder: Path | None, storage: str | None) -> int:
    """Print how a study stands, and first its search if it has one."""
    from suite.launch.local import print_status

    folder = study_folder(name, folder)
    searched = (search_folder(folder) / "study.json").is_file()
    if searched:
        print_status(search_folder(folder), console(), storage)
    if searched and not (folder / "study.json").is_file():
        return 0
    return int(print_status(folder, console(), storage).count("failed") > 0)


def retry(name: str, arms: Sequence[str], seeds: Sequence[int] | None, folder: Path | None, storage: str | None) -> int:
    """Queue failed cells again."""
    from suite.launch.local import retry as queue

    count = queue(study_folder(name, folder), list(arms) or None, list(seeds) if seeds else None, storage)
    console().print(f"{count} failed cells wait again for the next `suite run`", highlight=False)
    return 0


def report(name: str, folder: Path | None, out: Path | None, formats: Collection[str]) -> int:
    """Write a study's report and print its verdicts."""
    from reports.build import FORMATS, build

    written = build(study_folder(name, folder), out, formats=formats or FORMATS)
    screen = console()
    for line in written.lines:
        screen.print(line, highlight=False, markup=False, soft_wrap=True)
    screen.print(f"report       {written.index}", highlight=False, soft_wrap=True)
    return 0
