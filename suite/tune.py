"""Runs a study's search, batch by batch, and then the winners under the study's own seeds.

The runs of the trials are cells of a study `STUDY-tune` in a folder beside the study's, run as any other: claimed once,
resumed from their checkpoints, shown live. What is found is written to `search.json` in the study's folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from suite.config import fingerprint
from suite.declaration import check_folder, read_declaration, recorded_url
from suite.failures import write_json
from suite.launch.display import duration
from suite.launch.local import run_study
from suite.launch.machine import GpuShare, plan_workers, share_gpus
from suite.search import FILE, examine, search_folder, tuned, words
from suite.status import CellStatus, StudyStatus
from suite.storage import VARIABLE, Store
from suite.study import Study
from suite.tuning import DIVERGED, MIN_IMPORTANCE, PRUNE_P, Book, Outcomes, Trial, as_json, prune

PATIENCE_S = 600.0
"""How long a search waits for a storage that does not answer."""

Cells = dict[tuple[str, int], CellStatus]
"""(arm of the trials' cells, search seed) -> how the cell stands."""
Run = Callable[[Sequence[int], Sequence[str]], StudyStatus]
"""Runs cells of the search: (seeds, arms of the trials' cells) -> how they stand afterwards."""


@dataclass(frozen=True)
class Tuned:
    """How a search ended."""

    params: dict[str, dict[str, Any]]
    """Arm -> its winner's parameters; of a search that did not get to its end, empty."""
    status: StudyStatus | None
    """The comparison of the winners; None if it was not begun."""
    exit_code: int
    """As of a study: 1 also if an arm has no winner, 130 if the search was stopped, 2 if trials are left."""


def tune_study(
    study: Study,
    folder: Path,
    workers: int | Literal["auto"] = 2,
    plugins: Sequence[Path] = (),
    runner: str = "suite.run:run",
    console: Console | None = None,
    *,
    storage: str | None = None,
    command: str = "",
    rerun_stale: bool = False,
    allow_mixed: bool = False,
    gpus_per_cell: int = 0,
) -> Tuned:
    """Searches each arm, then runs the winners under the study's seeds. Interrupted, it goes on where it was.

    No trial that has ended is run again, and one that was under way goes on from its checkpoints. A trial whose run
    fails is counted and has no score; one whose loss was no number scores 0 on that seed. `gpus_per_cell`: as for
    `run_study`. Raises ValueError for a search that cannot be run, before any work.
    """
    if study.search is None:
        raise ValueError(f"study {study.name!r} declares no search; `suite run {study.name}` runs it")
    study.check()
    examine(study)
    console, place = console or Console(), search_folder(folder)
    plan_workers(workers, 1)
    share = share_gpus(gpus_per_cell)
    check_folder(place)
    check_folder(folder)
    tree = read_declaration(place) if (place / "study.json").exists() else None
    url = storage or os.environ.get(VARIABLE) or recorded_url(place, tree)
    book = Book.open(Store(url, PATIENCE_S), study)
    how: dict[str, Any] = {"runner": runner, "console": console, "storage": storage, "allow_mixed": allow_mixed}
    how["gpus_per_cell"] = gpus_per_cell

    def run(seeds: Sequence[int], arms: Sequence[str]) -> StudyStatus:
        return run_study(book.cells(), place, workers, plugins, arms=arms, seeds=seeds, command=command, **how)

    while batch := book.propose():
        _say(console, book, batch, workers, share)
        stopped = run_batch(book, batch, place, run)
        record(book, folder)
        if stopped is not None:
            return Tuned({}, None, stopped.exit_code)
    record(book, folder)
    params = {arm.name: dict(best.params) for arm in study.arms if (best := book.best(arm.name))}
    console.print(table(book))
    without = [arm.name for arm in study.arms if arm.name not in params]
    if without:
        console.print(f"no trial of {', '.join(without)} ran to its end: there is no winner", highlight=False)
        return Tuned(params, None, 1)
    final = tuned(study, params)
    plain = {"command": command, "rerun_stale": rerun_stale, **how}
    status = run_study(final, folder, workers, plugins, **plain)
    return Tuned(params, status, status.exit_code)


def run_batch(book: Book, batch: Sequence[Trial], place: Path, run: Run) -> StudyStatus | None:
    """Runs the trials of a batch and writes down how each ended; the status of a sweep that was left before its end.

    With a pruner the seeds are run one after the other, and what is clearly worse does not get its next one.
    """
    seeds, going = book.search.seeds, list(batch)
    cells: Cells = {}
    waves = [[seed] for seed in seeds] if book.search.pruner else [list(seeds)]
    for number, wave in enumerate(waves, start=1):
        status = run(wave, list(dict.fromkeys(trial.cell for trial in going)))
        if status.interrupted or status.count("waiting") + status.count("running"):
            return status
        cells.update({(cell.arm, cell.seed): cell for cell in status.cells})
        so_far = [seed for part in waves[:number] for seed in part]
        left = []
        for trial in going:
            ended = outcome(trial, so_far, cells, book.search.metric)
            if ended.state != "failed" and number < len(waves):
                ended = _pruned(book, ended, so_far, place)
                if ended.state != "pruned":
                    left.append(trial)
                    continue
            book.end(ended)
        going = left
        if not going:
            break
    return None


def outcome(trial: Trial, seeds: Iterable[int], cells: Cells, metric: str) -> Trial:
    """What came of a trial's runs under these seeds: its score, or why it has none."""
    found = {seed: cells[trial.cell, seed] for seed in seeds}
    spent = [] if trial.repeats else list(found.values())
    diverged = tuple(seed for seed, cell in found.items() if (cell.error or "").startswith("not finite"))
    trial = replace(
        trial,
        diverged=diverged,
        tokens=sum(cell.metrics.get("cost/generated_tokens", 0.0) for cell in spent),
        seconds=sum(cell.seconds for cell in spent),
    )
    failed = [cell for seed, cell in found.items() if cell.status == "failed" and seed not in diverged]
    if failed:
        return replace(trial, state="failed", reason=failed[0].error or "")
    scores = {s: DIVERGED if s in diverged else float(c.metrics[metric]) for s, c in found.items()}
    stale = [cell.error or "" for cell in found.values() if cell.status == "stale"]
    lost = [found[seed].error or "" for seed in diverged]
    return replace(
        trial,
        state="diverged" if diverged else "complete",
        score=fmean(scores.values()),
        scores=scores,
        reason=(lost or stale or [""])[0],
    )


def _pruned(book: Book, trial: Trial, seeds: Sequence[int], place: Path) -> Trial:
    """The trial as pruned, if its outcomes under these seeds are clearly worse than its rival's."""
    rival = book.rival(trial)
    if rival is None:
        return trial
    theirs, ours = outcomes(book, rival, book.search.seeds, place), outcomes(book, trial, seeds, place)
    if not prune(theirs, ours):
        return trial
    why = f"worse than trial {rival.number} on the validation problems (signed-rank p < {PRUNE_P:g})"
    return replace(trial, state="pruned", score=None, reason=f"{why}, after {len(seeds)} of {len(book.search.seeds)}")


def outcomes(book: Book, trial: Trial, seeds: Sequence[int], place: Path) -> Outcomes:
    """What a trial's runs earned on each validation problem at the last step, 0 to 1; nothing of one that diverged."""
    import pyarrow.parquet

    metric, found = book.search.metric, {}
    for cell in book.cells().cells():
        if cell.arm == trial.cell and cell.seed in seeds and cell.seed not in trial.diverged:
            name = f"eval-validation-problems-{cell.config.train.steps:06d}.parquet"
            path = place / "cells" / cell.name / "evaluations" / name
            rows = pyarrow.parquet.read_table(path).to_pylist()
            greedy = metric.endswith("/accuracy")
            found[cell.seed] = {
                row["uid"]: float(row["reward"] if greedy else row["sampled_right"] / row["sampled"]) for row in rows
            }
    return found


def record(book: Book, folder: Path) -> dict[str, Any]:
    """Writes `search.json`: the search as declared, every trial, and each arm's winner once all trials have ended."""
    search, every, arms = book.search, book.trials(), []
    for arm in book.study.arms:
        trials = [trial for trial in every if trial.arm == arm.name]
        done = sum(trial.state != "running" for trial in trials) >= search.trials
        best = book.best(arm.name) if done else None
        params = None if best is None else dict(best.params)
        winner = None if params is None else tuned(replace(book.study, arms=(arm,)), {arm.name: params})
        arms.append(
            {
                "name": arm.name,
                "label": arm.title,
                "ranges": {option: str(values) for option, values in search.ranges[arm.name].items()},
                "trials": [as_json(trial) for trial in trials],
                "importance": book.importance(arm.name),
                "winner": None if best is None else best.number,
                "params": params,
                "fingerprint": None if winner is None else fingerprint(winner.config(arm.name)),
                "cells": {} if winner is None else {
                    str(seed): fingerprint(winner.config(arm.name, seed)) for seed in book.study.seeds
                },
            }
        )  # fmt: skip
    kept = ("trials", "sampler", "pruner", "batch", "startup", "metric", "key")
    tree = {
        "study": book.study.name,
        **{name: getattr(search, name) for name in kept},
        "seeds": list(search.seeds),
        "min_importance": MIN_IMPORTANCE,
        "prune_p": PRUNE_P,
        "steps": book.study.config(book.study.control.name).train.steps,
        "done": all(trial.state != "running" for trial in every) and len(every) >= search.trials * len(arms),
        "arms": arms,
    }
    write_json(folder / FILE, tree)
    return tree


def table(book: Book) -> Table:
    """Every trial of every arm, the winner in bold."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("arm", "trial", "parameters", "score", "state", ""):
        out.add_column(name, justify="right" if name in ("trial", "score") else "left")
    for arm in book.study.arms:
        best = book.best(arm.name)
        for trial in book.trials(arm.name):
            score = "" if trial.score is None else f"{100 * trial.score:.1f}"
            won = best is not None and trial.number == best.number
            cells = (str(trial.number), words(trial.params), score, "winner" if won else trial.state)
            note = f"the same as {trial.cell}" if trial.repeats else trial.reason
            out.add_row(escape(arm.title), *map(escape, (*cells, note)), style="bold" if won else "")
    return out


def _say(console: Console, book: Book, batch: Sequence[Trial], workers: int | Literal["auto"], share: GpuShare) -> None:
    """Which batch begins, and about how long the whole search and the comparison will take, from the trials so far."""
    search, everything = book.search, book.trials()
    ended = [trial for trial in everything if trial.state != "running"]
    spent = [trial.seconds / max(1, len(trial.scores)) for trial in ended if trial.seconds > 0]
    arms, number = len(book.study.arms), batch[0].number // search.batch
    left = (arms * search.trials - len(ended)) * len(search.seeds) + arms * len(book.study.seeds)
    count = share.within(plan_workers(workers, left)).workers
    time = f"about {duration(fmean(spent) * left / count)} left" if spent else "time left: not known yet"
    names = f"trials {batch[0].number} to {batch[-1].number}" if search.batch > 1 else f"trial {number}"
    total = -(-search.trials // search.batch)
    console.print(
        f"search: batch {number + 1} of {total}, {names} of each arm; with the comparison {left} cells to run, {time}",
        highlight=False,
        soft_wrap=True,
    )
