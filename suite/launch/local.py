"""Runs a study on this machine: worker processes that share the cores, watched and shown until all cells are done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal

from rich.console import Console

from suite.declaration import NOTHING, Choice
from suite.launch.display import Display, page
from suite.launch.machine import THREADS, plan_workers, share_gpus, threads_each
from suite.launch.pool import GRACE_S, Pool, Supervisor
from suite.launch.ranks import check_engine
from suite.lease import HANG_S
from suite.lineage import check_chosen
from suite.registry import unknown
from suite.starts import prepare
from suite.status import StudyStatus
from suite.storage import VARIABLE
from suite.study import Study
from suite.sweep import Sweep
from suite.worker import LEAVE_S

ALONE, RANKS = "suite.run:run", "suite.launch.ranks:run"
"""What runs a cell: in the worker itself, or on several ranks."""


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them (in the main thread only, where Python hears signals)."""
    heard: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield heard
        return
    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_study(
    study: Study,
    folder: Path,
    workers: int | Literal["auto"] = 2,
    plugins: Sequence[Path] = (),
    runner: str = ALONE,
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    console: Console | None = None,
    *,
    storage: str | None = None,
    command: str = "",
    rerun_stale: bool = False,
    allow_mixed: bool = False,
    hang_after_s: float = HANG_S,
    leave_within_s: float = LEAVE_S,
    gpus_per_cell: int = 0,
) -> StudyStatus:
    """Runs the cells of a study that are missing and returns how it stands; its `exit_code` tells the truth.

    A cell that fails stops no other; cells that failed before are tried again, unless they would fail in the same way.
    On the first SIGINT or SIGTERM workers write a checkpoint and give their cells back, within `leave_within_s`; on the
    second they are killed; either way the next run goes on from the checkpoints. `arms` and `seeds` restrict what is
    run, not what is declared. A worker has `gpus_per_cell` GPUs to itself and runs a cell on as many ranks; with 0 it
    has one, which others may share, where the machine has any.
    With 0 workers the study is declared and nothing is run. Raises ValueError for what cannot be run, before any work.
    """
    console = console or Console()
    for arm in arms or ():
        study.arm(arm)
    for seed in seeds or ():
        if seed not in study.seeds:
            raise ValueError(f"study {study.name!r} has no seed {seed}; it has {', '.join(map(str, study.seeds))}")
    if workers != 0:
        plan_workers(workers, 1)
    share = share_gpus(gpus_per_cell)
    _check_engines(study, workers, gpus_per_cell)
    choice = Choice(arms, seeds)
    prepare(study.models(), partial(console.print, highlight=False))
    sweep = Sweep.open(
        study,
        folder,
        plugins,
        storage or os.environ.get(VARIABLE),
        command,
        rerun_stale=choice if rerun_stale else NOTHING,
        allow_mixed=allow_mixed,
    )
    if workers == 0:
        status = sweep.snapshot()
        console.print(
            f"{study.name}: {len(status.cells)} cells are declared in {folder}; none was run", highlight=False
        )
        return status
    sweep.recover()
    sweep.retry(choice, kinds=False)
    everything = sweep.snapshot()
    check_chosen(study, everything, choice, study.seeds)
    status = everything.part(choice.takes)
    plan = share.within(plan_workers(workers, status.count("waiting") + status.count("running")))
    ranks = max(1, gpus_per_cell)
    runner = RANKS if ranks > 1 and runner == ALONE else runner
    arguments = ["--runner", runner, "--hang-after", str(hang_after_s), "--leave-within", str(leave_within_s)]
    arguments += ["--nproc", str(ranks)] if ranks > 1 else []
    arguments += ["--arms", *arms] if arms is not None else []
    arguments += ["--seeds", *map(str, seeds)] if seeds is not None else []
    arguments += ["--allow-mixed"] if allow_mixed else []
    threads, reason = threads_each(plan.workers * ranks, study)
    environment = {**dict.fromkeys(THREADS, str(threads)), **os.environ, VARIABLE: sweep.store.url}
    with Display(console, folder, plan.workers) as display, _interrupts() as heard:
        display.say(f"{study.name}: {len(study.arms)} arms x {len(study.seeds)} seeds = {len(study.cells())} cells")
        if status.count("waiting") + status.count("running"):
            shown = f"{threads} thread{'s' * (threads > 1)} {'a rank' if ranks > 1 else 'each'} ({plan.why}; {reason})"
            display.say(f"{plan.workers} workers with {shown}")
            pool = Pool(folder, arguments, environment, share.groups)
            try:
                Supervisor(sweep, pool, display, choice, heard, leave_within_s + GRACE_S).run(plan.workers)
            finally:
                pool.end()
        sweep.recover()
        status = _noted(sweep.snapshot().part(choice.takes), folder, bool(heard))
        display.show(status)
    console.print(page(status))
    return status


def _check_engines(study: Study, workers: int | Literal["auto"], gpus_per_cell: int) -> None:
    for arm in study.arms:
        config = study.config(arm.name)
        check_engine(config, gpus_per_cell, "--gpus-per-cell")
        if config.rollout.engine == "vllm_server" and workers != 1:
            raise ValueError(
                f"arm {arm.name!r} samples from a server, which serves one run at a time; give --workers 1"
            )


def _noted(status: StudyStatus, folder: Path, interrupted: bool) -> StudyStatus:
    notes = list(status.notes)
    if status.count("failed"):
        notes.append(f"tracebacks: attempts/ in the cells' folders; `suite retry {folder}` tries failed cells again")
    idle = [cell.name for cell in status.cells if cell.metrics.get("cost/trained_tokens") == 0 and cell.share == 1]
    if idle:
        shown = ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
        notes.append(f"no token was trained in {shown}: no rollout gave the objective anything to learn from")
    if status.count("stale"):
        notes.append("stale cells were finished by other code or another definition; --rerun-stale runs them again")
    if interrupted or status.count("waiting") or status.count("running"):
        notes.append("run the same command again to go on from the checkpoints")
    return replace(status, interrupted=interrupted, notes=tuple(notes))


def print_status(folder: Path, console: Console | None = None, storage: str | None = None) -> StudyStatus:
    """Prints how the study in a folder stands, and returns it. Raises ValueError if there is none."""
    sweep = Sweep.attach(folder, storage or os.environ.get(VARIABLE))
    sweep.recover()
    status = _noted(sweep.snapshot(), folder, interrupted=False)
    (console or Console()).print(page(status))
    return status


def retry(
    folder: Path, arms: Sequence[str] | None = None, seeds: Sequence[int] | None = None, storage: str | None = None
) -> int:
    """Queues the failed cells of a study (of these arms and seeds) again; how many there were. `run_study` runs them.

    Raises ValueError if there is no study in the folder, or for an arm that it does not have.
    """
    sweep = Sweep.attach(folder, storage or os.environ.get(VARIABLE))
    known = [arm["name"] for arm in sweep.declared["arms"]]
    for arm in arms or ():
        if arm not in known:
            raise unknown("arm", arm, known, f"study {sweep.declared['name']!r}")
    return sweep.retry(Choice(arms, seeds))
