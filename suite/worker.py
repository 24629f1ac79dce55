"""A worker: a process that takes cells from a study until none is left, and lives across them.

Started by `suite.launch.local`, or by hand on another machine that sees the same folder:
`python -m suite.worker --folder runs/mini_sync`. A storage with a password comes in the variable SUITE_STORAGE.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from suite import failures, storage
from suite.declaration import Choice
from suite.failures import MISTAKE, Failure
from suite.lease import HANG_S, HEARTBEAT_S, TTL_S, Lease, LeaseLost, new_owner
from suite.registry import import_file
from suite.run import Interrupted, Progress, RunInfo
from suite.storage import StorageDown
from suite.sweep import CURVE, Sweep

PATIENCE_S = 3600.0
"""How long a worker waits for a storage that does not answer before it gives up."""

LEAVE_S = 25.0
"""Seconds after SIGTERM or SIGINT within which a worker has left. Slurm and Kubernetes kill after 30."""

STOPPED, HUNG, NO_STORAGE = 75, 70, 74
"""Exit codes: the worker was asked to stop; its cell hung; the storage did not answer."""

Runner = Callable[..., dict[str, float]]


class Stop:
    """Whether the worker was asked to leave: by SIGTERM or SIGINT, or because its parent is gone."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._since = 0.0

    def __call__(self, *_: object) -> None:
        if not self._event.is_set():
            self._since = time.monotonic()
        self._event.set()

    def asked(self) -> bool:
        return self._event.is_set()

    def seconds(self) -> float:
        """Since when the worker is to leave, seconds; 0 if it was not asked to."""
        return time.monotonic() - self._since if self._event.is_set() else 0.0

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)

    def listen(self, parent: int | None, leave_s: float) -> None:
        """Hears the two signals, and the end of the process `parent`, whose pipe is then this one's standard input.

        Whatever the process is doing by then, such as waiting for a storage, it ends soon after `leave_s` seconds.
        """
        signal.signal(signal.SIGTERM, self)
        signal.signal(signal.SIGINT, self)
        threading.Thread(target=self._end, args=(leave_s + HEARTBEAT_S,), daemon=True).start()
        if parent is None:
            return
        if sys.platform == "linux":
            set_death_signal = 1
            ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)
        if os.getppid() != parent:
            self()
        threading.Thread(target=self._until_closed, daemon=True).start()

    def _end(self, seconds: float) -> None:
        self._event.wait()
        time.sleep(seconds)
        os._exit(STOPPED)

    def _until_closed(self) -> None:
        while os.read(0, 1024):
            pass
        self()


class Keeper:
    """Keeps a lease alive from a thread of its own, and passes on progress, so that training never waits for storage.

    `stop` is what the run polls. It never lets a run go on that may have lost its cell: when the lease could not be
    renewed for half its time to live, it waits until it is, and raises LeaseLost if it is not ours any more.

    A run that was asked to leave and has not reached the end of its step after `leave_s` seconds is given up where it
    stands, and goes on from its last checkpoint elsewhere: the process ends. One without progress for `hang_s`, too.
    """

    def __init__(
        self, sweep: Sweep, lease: Lease, stop: Stop, hang_s: float = HANG_S, leave_s: float = LEAVE_S
    ) -> None:
        self._sweep, self._lease, self._stop = sweep, lease, stop
        self._hang_s, self._leave_s = hang_s, leave_s
        self._progress = Progress(lease.reached, 0, {})
        self._first: tuple[int, float, float] | None = None
        self._curve: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._evaluated: tuple[float | None, float | None] | None = None
        self._started = self._moved = self._renewed = time.monotonic()
        self._lost: LeaseLost | None = None
        self._closed, self._changed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(timeout=TTL_S)
        if self._lost is None and not self._thread.is_alive():
            with suppress(LeaseLost):
                self._note_curve()

    @property
    def step(self) -> int:
        return self._progress.step

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def on_progress(self, progress: Progress) -> None:
        """Called by the run after each step."""
        if self._first is None:
            self._first = (progress.step, progress.metrics.get("cost/generated_tokens", 0.0), time.monotonic())
        # Metrics that are measured now and then, such as an evaluation's, stay until they are measured again.
        self._progress = Progress(progress.step, progress.steps, {**self._progress.metrics, **progress.metrics})
        self._moved = time.monotonic()
        found = (progress.metrics.get(CURVE), progress.metrics.get("time/eval_s"))
        # the latest value goes with every step: it is a new one at the step of its evaluation alone, and what a
        # resumed run begins with is old
        if found[0] is not None and found != self._evaluated:
            if self._evaluated is not None or progress.step == 0:
                self._curve.put((progress.step, found[0]))
            self._evaluated = found

    def stop(self) -> bool:
        """Whether the run should write a checkpoint and leave. Raises LeaseLost if it may write nothing any more."""
        with self._changed:
            while self._lost is None and time.monotonic() - self._renewed > TTL_S / 2:
                if self._stop.asked():
                    raise LeaseLost(f"the lease of cell {self._lease.cell} could not be renewed before leaving")
                self._moved = time.monotonic()
                self._changed.wait(0.5)
        if self._lost is not None:
            raise self._lost
        return self._stop.asked()

    def shown(self) -> dict[str, Any]:
        """The progress as it is stored."""
        now, tokens = self._progress, self._progress.metrics.get("cost/generated_tokens", 0.0)
        started_at, tokens_before, since = self._first or (0, 0.0, self._started)
        return {
            "step": now.step,
            "steps": now.steps,
            "metrics": {name: value for name, value in now.metrics.items() if value == value},
            "seconds": round(self.seconds, 2),
            "started_at": max(0, started_at - 1),
            "tokens_per_second": round((tokens - tokens_before) / max(time.monotonic() - since, 1e-6), 1),
        }

    def _keep(self) -> None:
        while True:
            try:
                began = time.monotonic()
                self._sweep.report(self._lease, self.shown())
                with self._changed:
                    self._renewed = began
                    self._changed.notify_all()
                self._note_curve()
            except LeaseLost as lost:
                with self._changed:
                    self._lost = lost
                    self._changed.notify_all()
                return
            except StorageDown:
                traceback.print_exc()
            if time.monotonic() - self._moved > self._hang_s:
                self._give_up()
            if self._wait():
                return

    def _wait(self) -> bool:
        """Until the next heartbeat; whether the cell is over by then."""
        until = time.monotonic() + HEARTBEAT_S
        while (left := until - time.monotonic()) > 0:
            if self._closed.wait(min(left, 0.2)):
                return True
            if self._stop.seconds() > self._leave_s:
                self._leave()
        return False

    def _leave(self) -> None:
        """Gives the cell back and ends the process in the middle of a step: checkpoints are whole or not there."""
        print(f"asked to leave {self._leave_s:.0f} s ago: the cell goes on from its last checkpoint", flush=True)
        try:
            self._sweep.release(self._lease)
        finally:
            os._exit(STOPPED)

    def _note_curve(self) -> None:
        """Put the evaluations since the last time into the trial, each at its step."""
        while not self._curve.empty():
            self._sweep.leases.note(self._lease, *self._curve.get())

    def _give_up(self) -> None:
        """Records where a hung run stands and ends the process: a thread that hangs cannot be stopped otherwise."""
        place = self._sweep.cell_folder(self._lease) / "attempts" / str(self._lease.number)
        place.mkdir(parents=True, exist_ok=True)
        with (place / "error.txt").open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        silence = f"no progress for {self._hang_s:.0f} s; the stacks of all threads are in error.txt"
        try:
            self._sweep.fail(self._lease, Failure("hang", "Hang", silence, self.step))
        finally:
            os._exit(HUNG)


@contextmanager
def written_to(path: Path) -> Iterator[None]:
    """Sends this process's and its children's output to a file, and back afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(file, 1)
        os.dup2(file, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in enumerate(saved, start=1):
            os.dup2(before, number)
            os.close(before)
        os.close(file)


def work(
    sweep: Sweep, lease: Lease, runner: Runner, stop: Stop, hang_s: float = HANG_S, leave_s: float = LEAVE_S
) -> str:
    """Runs one claimed cell to its end; says what became of it: `complete`, `released`, `lost`, `again` or `failed`.

    No exception of the run gets out: it is recorded with the cell, and the worker goes on with the next.
    """
    arm = next(arm for arm in sweep.declared["arms"] if arm["name"] == lease.arm)
    info = RunInfo(sweep.declared["name"], lease.arm, arm["label"], arm["differs"])
    folder = sweep.cell_folder(lease)
    with written_to(folder / "log.txt"), Keeper(sweep, lease, stop, hang_s, leave_s) as keeper:
        try:
            return _attempt(sweep, lease, runner, folder, info, keeper)
        except LeaseLost as lost:
            print(f"{lost}; its new owner goes on from the last checkpoint", flush=True)
            return "lost"


def _attempt(sweep: Sweep, lease: Lease, runner: Runner, folder: Path, info: RunInfo, keeper: Keeper) -> str:
    try:
        config = sweep.config(lease)
        metrics = runner(config, folder, info, on_progress=keeper.on_progress, stop=keeper.stop)
        sweep.finish(lease, metrics, keeper.shown())
        return "complete"
    except Interrupted:
        sweep.release(lease)
        return "released"
    except (LeaseLost, StorageDown):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a cell dies of is recorded with it and stops no other
        traceback.print_exc()
        again = sweep.fail(lease, failures.of_exception(error, keeper.step), traceback.format_exc())
        return "again" if again else "failed"


def loop(sweep: Sweep, options: argparse.Namespace, stop: Stop) -> int:
    """Takes cells until all that are wanted are done, failed, or the worker is asked to stop; the exit code."""
    for plugin in sweep.declared["plugins"]:
        import_file(Path(plugin))
    module, _, name = options.runner.partition(":")
    runner: Runner = getattr(importlib.import_module(module), name)
    if options.nproc > 1:
        runner = partial(runner, nproc=options.nproc, plugins=[Path(plugin) for plugin in sweep.declared["plugins"]])
    owner, choice = new_owner(options.name), Choice(options.arms, options.seeds)
    while not stop.asked():
        reason = sweep.mixed()
        if reason and not options.allow_mixed:
            raise ValueError(f"{reason}; bring them together, or pass --allow-mixed to record both")
        for cell in sweep.recover():
            print(f"cell {cell} lost its worker and is free again", flush=True)
        lease = sweep.claim(owner, choice)
        if lease is not None:
            print(f"cell {lease.cell}: attempt {lease.number}", flush=True)
            became = work(sweep, lease, runner, stop, options.hang_after, options.leave_within)
            print(f"cell {lease.cell}: {became}", flush=True)
        elif sweep.unfinished(choice):
            stop.wait(1.0)
        else:
            return 0
    return STOPPED


def main() -> int:
    """The command `python -m suite.worker`."""
    parser = argparse.ArgumentParser(prog="python -m suite.worker", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the study's folder")
    parser.add_argument("--name", default="", help="last part of the owner's name in the leases")
    parser.add_argument("--runner", default="suite.run:run", help="module:function that runs one cell")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of a cell; above 1 the runner is told how many")
    parser.add_argument("--arms", nargs="*", help="take only cells of these arms")
    parser.add_argument("--seeds", nargs="*", type=int, help="take only cells of these seeds")
    parser.add_argument("--parent", type=int, help="leave when this process, which holds the other end of stdin, ends")
    parser.add_argument("--hang-after", type=float, default=HANG_S, help="seconds without progress that count as hung")
    parser.add_argument("--leave-within", type=float, default=LEAVE_S, help="seconds from SIGTERM to the end, at most")
    parser.add_argument("--allow-mixed", action="store_true", help="work beside other code or library versions")
    options = parser.parse_args()
    stop = Stop()
    stop.listen(options.parent, options.leave_within)
    try:
        return loop(
            Sweep.attach(options.folder, os.environ.get(storage.VARIABLE), PATIENCE_S, stop.asked), options, stop
        )
    except (ValueError, StorageDown) as error:
        print(error, file=sys.stderr)
        return MISTAKE if isinstance(error, ValueError) else NO_STORAGE


if __name__ == "__main__":
    sys.exit(main())
