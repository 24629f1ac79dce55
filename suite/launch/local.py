"""Runs a study on this machine: worker processes that share the cores, watched and shown until all cells are done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Literal

from rich.console import Console

from suite.failures import MISTAKE
from suite.launch.display import Display, page
from suite.lease import HANG_S
from suite.status import StudyStatus
from suite.storage import VARIABLE
from suite.study import Study
from suite.sweep import Sweep

MEMORY_PER_WORKER = 2**30
"""Bytes counted for a worker: PyTorch, the libraries around it, and a tiny model."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
LOOK_S = 1.0
"""Seconds between looks at the storage."""


def cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return count if quota == "max" else max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):
        return count


def free_memory() -> int | None:
    """Bytes of memory that are free for use, within the control group's limit; None where that cannot be told."""
    try:
        rows = (row.split() for row in Path("/proc/meminfo").read_text().splitlines())
        free = next(int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:")
    except (OSError, StopIteration):
        return None
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        return min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        return free


@dataclass(frozen=True)
class Plan:
    """How many workers, and how many threads each."""

    workers: int
    threads: int
    why: str


def plan_workers(workers: int | Literal["auto"], cells: int) -> Plan:
    """Shares the cores among workers. `auto`: one worker a core, as far as memory and cells go.

    Raises ValueError for a number below 1.
    """
    have = cores()
    if workers == "auto":
        memory = free_memory()
        fit = have if memory is None else max(1, memory // MEMORY_PER_WORKER)
        count = max(1, min(have, fit, cells))
        room = "" if memory is None else f", {memory / 2**30:.1f} GB of memory free"
        why = f"{have} cores{room}, {cells} cells to run"
    elif isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1:
        count, why = min(workers, max(1, cells)), f"{have} cores, {cells} cells to run"
    else:
        raise ValueError(f"--workers is {workers!r} and must be a whole number from 1 on, or auto")
    return Plan(count, max(1, have // count), why)


class Workers:
    """The worker processes of one run: started, heard when they die, stopped. Each has a log under `workers/`."""

    def __init__(self, folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self._folder, self._arguments, self._environment = folder, list(arguments), environment
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "workers").mkdir(exist_ok=True)

    def __len__(self) -> int:
        return len(self._running)

    def log(self, name: str) -> Path:
        """Where a worker's output goes while it has no cell."""
        return self._folder / "workers" / f"{name}.log"

    def start(self) -> str:
        """Starts a worker; its name."""
        name = uuid.uuid4().hex[:8]
        command = [sys.executable, "-m", "suite.worker", "--folder", str(self._folder), "--name", name]
        with self.log(name).open("ab") as log:
            # A session of its own: Ctrl-C in the terminal reaches this process alone, which passes it on once.
            self._running[name] = subprocess.Popen(
                [*command, "--parent", str(os.getpid()), *self._arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        return name

    def gone(self) -> dict[str, int]:
        """The workers that ended since the last call, with their exit codes (minus the signal, if one killed them)."""
        over = {name: code for name, process in self._running.items() if (code := process.poll()) is not None}
        for name in over:
            self._close(name)
        return over

    def signal(self, number: int) -> None:
        """Sends a signal to every worker; SIGKILL also to all processes that the worker started."""
        for process in self._running.values():
            try:
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
            except ProcessLookupError:
                continue

    def _close(self, name: str) -> None:
        process = self._running.pop(name)
        if process.stdin is not None:
            process.stdin.close()
        # A worker that was killed may leave processes of its own in its group.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def end(self) -> None:
        """Kills whatever still runs and waits for it."""
        self.signal(signal.SIGKILL)
        for name, process in list(self._running.items()):
            process.wait()
            self._close(name)


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
    runner: str = "suite.run:run",
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    console: Console | None = None,
    *,
    storage: str | None = None,
    command: str = "",
    rerun_stale: bool = False,
    allow_mixed: bool = False,
    hang_after_s: float = HANG_S,
) -> StudyStatus:
    """Runs the cells of a study that are missing and returns how it stands; its `exit_code` tells the truth.

    A cell that fails stops no other; cells that failed before are tried again, unless they would fail in the same way.
    On the first SIGINT or SIGTERM workers write a checkpoint and give their cells back, on the second they are killed;
    either way the next run goes on from the checkpoints. `arms` and `seeds` restrict what is run, not what is declared.
    Raises ValueError for what cannot be run, before any work.
    """
    console = console or Console()
    for arm in arms or ():
        study.arm(arm)
    for seed in seeds or ():
        if seed not in study.seeds:
            raise ValueError(f"study {study.name!r} has no seed {seed}; it has {', '.join(map(str, study.seeds))}")
    plan_workers(workers, 1)
    sweep = Sweep.open(study, folder, plugins, storage, command, rerun_stale=rerun_stale, allow_mixed=allow_mixed)
    sweep.recover()
    sweep.retry(arms, seeds, kinds=False)
    status = _chosen(sweep.snapshot(), arms, seeds)
    plan = plan_workers(workers, status.count("waiting") + status.count("running"))
    arguments = ["--runner", runner, "--hang-after", str(hang_after_s)]
    arguments += ["--arms", *arms] if arms is not None else []
    arguments += ["--seeds", *map(str, seeds)] if seeds is not None else []
    arguments += ["--allow-mixed"] if allow_mixed else []
    environment = {**{name: str(plan.threads) for name in THREADS}, **os.environ, VARIABLE: sweep.store.url}
    with Display(console, folder, plan.workers) as display, _interrupts() as heard:
        display.say(f"{study.name}: {len(study.arms)} arms x {len(study.seeds)} seeds = {len(status.cells)} cells")
        if sweep.unfinished(arms, seeds):
            display.say(f"{plan.workers} workers with {plan.threads} threads each ({plan.why})")
            pool = Workers(folder, arguments, environment)
            try:
                _watch(sweep, pool, display, plan.workers, heard, arms, seeds)
            finally:
                pool.end()
        sweep.recover()
        status = _noted(_chosen(sweep.snapshot(), arms, seeds), bool(heard))
        display.show(status)
    console.print(page(status))
    return status


def _watch(
    sweep: Sweep,
    pool: Workers,
    display: Display,
    count: int,
    heard: list[int],
    arms: Sequence[str] | None,
    seeds: Sequence[int] | None,
) -> None:
    """Keeps `count` workers going until no cell is left, or until it is asked twice to stop."""
    fresh = {pool.start() for _ in range(count)}
    answered, looked, stillborn = 0, 0.0, 0
    while len(pool):
        if len(heard) > answered:
            answered = len(heard)
            display.say(
                "stopping: workers write their checkpoints (once more kills them)" if answered == 1 else "killing"
            )
            pool.signal(signal.SIGTERM if answered == 1 else signal.SIGKILL)
        over = pool.gone()
        dead = {name: _cause(code) for name, code in over.items() if code != 0}
        if dead:
            freed = sweep.recover(dead)
            # A worker that dies before it has a cell would die again: the second time is one too many.
            stillborn += sum(code == MISTAKE or (name in fresh and not freed) for name, code in over.items())
            for name, cause in dead.items():
                if not answered:
                    words = _last_words(pool.log(name)) if over[name] == MISTAKE else ""
                    display.say(f"worker {name} ended: {cause}{words}")
        if over and not answered and stillborn < 2 and sweep.unfinished(arms, seeds):
            fresh = {pool.start() for _ in dead}
        if time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            display.show(_chosen(sweep.snapshot(), arms, seeds))
        time.sleep(0.1)


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def _chosen(status: StudyStatus, arms: Sequence[str] | None, seeds: Sequence[int] | None) -> StudyStatus:
    cells = [c for c in status.cells if (arms is None or c.arm in arms) and (seeds is None or c.seed in seeds)]
    names = {name: label for name, label in status.arms.items() if arms is None or name in arms}
    return replace(status, arms=names, cells=tuple(cells))


def _noted(status: StudyStatus, interrupted: bool) -> StudyStatus:
    notes = []
    if status.count("failed"):
        notes.append(
            f"tracebacks: attempts/ in the cells' folders; `suite retry {status.name}` tries failed cells again"
        )
    if status.count("stale"):
        notes.append("stale cells were finished by other code or another definition; --rerun-stale runs them again")
    if interrupted or status.count("waiting") or status.count("running"):
        notes.append("run the same command again to go on from the checkpoints")
    return replace(status, interrupted=interrupted, notes=tuple(notes))


def print_status(folder: Path, console: Console | None = None, storage: str | None = None) -> StudyStatus:
    """Prints how the study in a folder stands, and returns it. Raises ValueError if there is none."""
    sweep = Sweep.attach(folder, storage)
    sweep.recover()
    status = _noted(sweep.snapshot(), interrupted=False)
    (console or Console()).print(page(status))
    return status


def retry(folder: Path, arms: Sequence[str] | None = None, storage: str | None = None) -> int:
    """Queues the failed cells of a study (of these arms) again; how many there were. `run_study` then runs them."""
    return Sweep.attach(folder, storage).retry(arms)
