"""`suite tune`: each arm's search, then its winner under fresh seeds."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from rich.markup import escape
from rich.table import Table

from suite.commands.catalogue import console
from suite.commands.study import RUNS, resolve
from suite.study import Study


def tune(
    name: str,
    workers: int | Literal["auto"],
    dry_run: bool,
    folder: Path | None,
    storage: str | None,
    rerun_stale: bool,
    allow_mixed: bool,
    gpus_per_cell: int = 0,
) -> int:
    """Run what is missing of a study's search and of the comparison of its winners, or show what would be run."""
    study, files = resolve(name)
    if study.search is None:
        raise ValueError(f"study {study.name!r} declares no search; `suite run {name}` runs it")
    words = ["suite", "tune", name, *(["--folder", str(folder)] if folder else [])]
    folder = folder or RUNS / study.name
    if dry_run:
        _show(study, folder)
        return 0
    from suite.tune import tune_study

    found = tune_study(
        study,
        folder,
        workers,
        files,
        storage=storage,
        command=shlex.join(words),
        rerun_stale=rerun_stale,
        allow_mixed=allow_mixed,
        gpus_per_cell=gpus_per_cell,
    )
    return found.exit_code


def _show(study: Study, folder: Path) -> None:
    """Print the ranges and the budget; nothing is written."""
    from suite.commands.cost import cost
    from suite.search import examine, search_folder

    search, screen = study.search, console()
    assert search is not None
    examine(study)
    runs, fresh = search.trials * len(search.seeds), len(study.seeds)
    table = Table("arm", "option", "range", "trials", "runs", "rollouts", "runs of the winner")
    for arm in study.arms:
        rollouts = cost(study.config(arm.name)).rollouts
        for place, (option, values) in enumerate(search.ranges[arm.name].items()):
            counts = (str(search.trials), str(runs), f"{runs * rollouts:,}", str(fresh)) if place == 0 else ("",) * 4
            table.add_row("" if place else escape(arm.title), option, escape(str(values)), *counts)
    screen.print(f"[bold]{study.name}[/]  {study.question}", highlight=False, soft_wrap=True)
    screen.print(table)
    pruner = f", pruner {search.pruner}" if search.pruner else ""
    screen.print(
        f"search   sampler {search.sampler}{pruner}; scored by {search.metric} at the last step, mean over seeds "
        f"{', '.join(map(str, search.seeds))}; in {search_folder(folder)}",
        highlight=False,
        soft_wrap=True,
    )
    screen.print(
        f"compare  winners under seeds {', '.join(map(str, study.seeds))}, by {study.metric}; in {folder}",
        highlight=False,
        soft_wrap=True,
    )
