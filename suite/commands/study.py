"""`suite run`, `status`, `retry` and `report`: a study, from its file to its report."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from suite.commands.catalogue import console
from suite.doctor import wandb_key_source
from suite.search import search_folder, winners
from suite.storage import VARIABLE
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
        count = share.within(plan_workers(workers or 1, len(cells))).workers
        plan.dry_run(study, cells, folder, count, storage or os.environ.get(VARIABLE))
        return 0
    if os.environ.get("WANDB_MODE") == "online" and not wandb_key_source():
        raise ValueError("WANDB_MODE is online, and W&B finds no key; run `wandb login`, or set WANDB_API_KEY")
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
    if workers == 0:
        return 0
    if status.count("complete"):
        place = ["--folder", str(folder)] if folder != RUNS / study.name else []
        console().print(f"report  {shlex.join(['suite', 'report', name, *place])}", highlight=False, soft_wrap=True)
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


def other_than_recorded(name: str, folder: Path) -> list[str]:
    """In what the study that `name` stands for today is another one than that of the folder, one sentence each.

    Empty too where `name` is the folder itself, or no study's name or file any more.
    """
    from ablations.load import load_study
    from suite.declaration import read_declaration
    from suite.frozen import changes

    tree = read_declaration(folder) if (folder / "study.json").is_file() else {}
    try:
        study = load_study(name)
    except ValueError:
        return []
    if tree.get("name") != study.name or study.search is not None:
        return []
    out = []
    recorded = {(cell["arm"], cell["seed"]): cell["declared"] for cell in tree["cells"]}
    mine = {(cell.arm, cell.seed): cell.fingerprint for cell in study.cells()}
    if changed := sorted({arm for (arm, seed), found in mine.items() if recorded.get((arm, seed), found) != found}):
        out.append(f"its arms {', '.join(changed)} are defined otherwise than those that were run")
    if new := sorted({arm for arm, _ in mine} ^ {arm for arm, _ in recorded}):
        out.append(f"its arms and the recorded ones differ in {', '.join(new)}")
    if new := sorted({seed for _, seed in mine} ^ {seed for _, seed in recorded}):
        out.append(f"its seeds and the recorded ones differ in {', '.join(map(str, new))}")
    known = {claim["name"]: claim for claim in tree.get("claims", ())}
    for claim in study.claims:
        was, now = known.pop(claim.name, None), dataclasses.asdict(claim)
        if was is None:
            out.append(f"its claim {claim.name!r} was never declared")
        elif found := changes(was, now):
            out.append(f"its claim {claim.name!r} is another one: {found}")
    out += [f"it lacks the recorded claim {name!r}" for name in known]
    return [f"the study on disk is another one: {words}; `suite run {name}` declares it" for words in out]


def status(name: str, folder: Path | None, storage: str | None) -> int:
    """Print how a study stands, and first its search if it has one."""
    from suite.launch.local import print_status

    folder = study_folder(name, folder)
    for words in other_than_recorded(name, folder):
        console().print(f"[yellow]note[/]   {words}", highlight=False, soft_wrap=True)
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


def _refresh(folder: Path) -> None:
    """Bring `study.json` up to date with the storage and with what the cells were made from, if both are at hand."""
    from suite.storage import FILE
    from suite.sweep import Sweep

    if (folder / "study.json").is_file() and (folder / FILE).is_file():
        Sweep.attach(folder).snapshot()


def report(name: str, folder: Path | None, out: Path | None, formats: Collection[str]) -> int:
    """Write a study's report and print its verdicts."""
    from reports.build import FORMATS, build

    folder = study_folder(name, folder)
    _refresh(folder)
    facts = [{"kind": "study", "what": "the study's file", "why": words} for words in other_than_recorded(name, folder)]
    written = build(folder, out, formats=formats or FORMATS, facts=facts)
    screen = console()
    for fact in facts:
        screen.print(f"[yellow]note[/]   {fact['why']}", highlight=False, soft_wrap=True)
    for line in written.lines:
        screen.print(line, highlight=False, markup=False, soft_wrap=True)
    screen.print(f"report       {written.index}", highlight=False, soft_wrap=True)
    return 0
